import pytest

from distflow.schema.errors import InvalidInput
from workers.rewards.scoring import find_reward
from workers.rewards.texts import math


@pytest.mark.parametrize(("completion", "answer", "expected"), [
    ("3 + 4 = 7 #### 7", "#### 7", 1.0),
    ("#### 8", "#### 7", 0.0),
    ("7", "#### 7", 0.0),
    ("#### 1,234", "work #### 1234", 1.0),
    ("#### 0.50", "#### 1/2", 1.0),
    ("#### 3/0", "#### 3", 0.0),
    ("#### 7.", "#### 7", 1.0),
    ("#### 5 #### 7", "#### 7", 1.0),
    ("#### ", "#### 7", 0.0),
    ("", "#### 7", 0.0),
    ("#### -7", "#### 7", 0.0),
    ("#### 12 12", "#### 12", 0.0),
    (r"\frac{1}{2}", r"\frac{2}{4}", 1.0),
    (r"so it is $\boxed{18}$.", "x #### 18", 1.0),
    (r"so it is $\boxed{17}$.", "x #### 18", 0.0),
    (r"#### x^2 + 2x + 1", r"#### (x+1)^2", 1.0),
])
def test_math_compares_final_answers(completion, answer, expected):
    assert math(completion, answer) == expected


def test_an_unknown_reward_is_refused_with_a_proposal():
    with pytest.raises(InvalidInput, match="Did you mean `math`"):
        find_reward("maths")
