"""From recipes to rewards: sums, weights, branches, what is left out, and when the run ends."""

import pytest

from distflow.errors import EngineError, InvalidInput, RewardsFailed
from distflow.telemetry.metrics import Metrics, current
from workers.isolation.scoring import Reference, Scorer, find_reward, report

MODULE = '''
from distflow import reward

@reward(retries=0)
def number(completion):
    return float(completion)

@reward(retries=1, timeout=30.0)
def size(completion, *, unit: float = 1.0):
    return len(completion) / unit

@reward
def passed(completion, tests: str, extra: float = 2.0):
    return float(tests in completion) * extra

@reward
async def asked(question, completions_of_before=None):
    return float(len(question))

@reward
def together(completions: list[str], scores: list[float]) -> list[float]:
    return [own - sum(scores) / len(scores) for own in scores]

@reward(retries=0)
@reward(in_rank=True)
def inverse(completion, middle=0.0, last=0.0):
    return None if completion == "none" else 1 / int(completion) + last

@reward(in_rank=True)
def of_two(completion):
    return 3.0 if len(completion) == 2 else None

@reward(retries=1)
def of_others(completion):
    return 5.0 if len(completion) == 1 else None

@reward(in_rank=True)
async def not_at_once(completion):
    return 2.0

@reward(shortcut=lambda completion: 1 / (len(completion) - 1))
def after_shortcut(completion):
    return 7.0

def solved(answer, opening="", *, unit=1.0):
    if not answer:
        raise ValueError("there is no answer")
    return f"{opening}{answer} of {unit:g}"

@reward(reference=solved)
def declared(completion, answer, *, unit: float = 1.0, other: int = 0):
    return float(completion == solved(answer, unit=unit))

@reward
def never(completion):
    raise RuntimeError("no licence")
'''


@pytest.fixture
def score(module):
    """`score(recipe, **columns)`: what a new scorer says of them."""
    module(MODULE)

    def score(recipe, scorer=None, **columns):
        rows = len(next(iter(columns.values())))
        return (scorer or Scorer(recipe)).score(columns, [100 + row for row in range(rows)])

    return score


def test_sums_and_weights(score):
    completions = ["1", "20"]
    assert score(["number", "size"], completions=completions).rewards == [2.0, 22.0]
    scores = score({"number": 2, "size": {"weight": -0.5, "unit": 0.25}}, completions=completions)
    assert scores.rewards == [2 - 0.5 * 4, 40 - 0.5 * 8]
    assert scores.of_term == {"number": [1.0, 20.0], "size": [4.0, 8.0]}


def test_one_function_twice_with_other_settings_in_branches(score):
    recipe = {"by": "source", "rewards": {"a": {"size": {"unit": 1.0}}, "b": {"size": {"unit": 2.0}}, "c": "number"}}
    scores = score(recipe, completions=["1234", "1234", "7", "1234"], source=["a", "b", "c", "b"])
    assert scores.rewards == [4.0, 2.0, 7.0, 2.0]
    assert scores.of_term == {"size": [4.0, 2.0, 2.0], "number": [7.0]}


def test_a_source_without_a_reward(score):
    recipe = {"by": "source", "rewards": {"gsm8k": "number", "mbpp": "size"}}
    with pytest.raises(InvalidInput, match="`source` of row 101 is 'gsm8', for .* Did you mean `gsm8k`?.*gsm8k, mbpp"):
        score(recipe, completions=["1", "2"], source=["gsm8k", "gsm8"])


def test_columns_go_to_the_parameters_that_name_them(score):
    columns = {"completions": ["ab", "b"], "tests": ["a", "a"], "questions": ["why", "how so"]}
    assert score("passed", **columns).rewards == [2.0, 0.0]
    assert score("passed", extra=[3.0, 4.0], **columns).rewards == [3.0, 0.0]
    assert score("asked", **columns).rewards == [3.0, 6.0]
    assert score("together", completions=["a", "b"], scores=[1.0, 2.0]).rewards == [-0.5, 0.5]


def test_references_are_what_rewards_declare_for_their_rows(score):
    recipe = {"by": "source", "rewards": {"a": {"declared": {"unit": 2.0, "other": 3}}, "b": ["declared", "number"]}}
    columns = {"answers": ["7", "", "9", "8"], "source": ["a", "a", "a", "b"]}
    found = Scorer(recipe).references(columns, [0, 1, 3], opening="<think>")
    assert found == {"declared": [Reference("<think>7 of 2"), Reference(None, "there is no answer"),
                                  Reference("<think>8 of 1")]}
    assert Scorer({"by": "source", "rewards": {"a": "declared", "b": "number"}}).references(columns, [3]) == {
        "declared": [Reference(None)]}
    assert Scorer("number").references(columns, [0]) == {}


def test_what_fails_in_the_rank_costs_its_row_alone(score):
    scores = score("inverse", completions=["2", "0", "none", "x", "4"], last=[1.0] * 5)
    assert scores.keep == [True, False, False, False, True]
    assert scores.rewards == [1.5, 0.0, 0.0, 0.0, 1.25]
    assert [failed.reason for _, _, failed in scores.failures] == [
        "raised ZeroDivisionError: division by zero", "returned None, not a finite number",
        "raised ValueError: invalid literal for int() with base 10: 'x'"]
    assert score("not_at_once", completions=["a"]).rewards == [2.0]
    assert score("after_shortcut", completions=["a", "abc"]).rewards == [7.0, 0.5]


def test_a_reward_that_returns_none_is_for_other_samples(score):
    """As with TRL, where each of several rewards is for a task of its own."""
    scores = score({"of_two": 1.0, "of_others": 2.0}, completions=["ab", "a", "abc"])
    assert scores.keep == [True, True, False]
    assert scores.rewards == [3.0, 10.0, 0.0]
    assert scores.of_term == {"of_two": [3.0], "of_others": [5.0]}
    assert {row for _, row, _ in scores.failures} == {2}
    assert scores.retried == 0, "it would say the same"
    assert score({"of_two": 1.0, "size": 0.0}, completions=["a"]).keep == [False], "what is watched alone pays nothing"


def test_a_row_whose_rewards_add_up_to_more_than_a_float32_is_left_out(score):
    scores = score({"number": 10.0, "size": 1.0}, completions=["3e38", "-3e38", "1"])
    assert scores.keep == [False, False, True]
    assert scores.rewards == [0.0, 0.0, 11.0]
    assert "adds up, with its weight" in scores.failures[0][2].reason


def test_a_row_of_which_one_reward_fails_is_left_out(score):
    scores = score({"number": 1.0, "size": 1.0}, completions=["1", "many", "inf", "2"])
    assert scores.keep == [True, False, False, True]
    assert scores.rewards == [2.0, 0.0, 0.0, 3.0]
    assert scores.of_term == {"number": [1.0, 2.0], "size": [1.0, 4.0, 3.0, 1.0]}
    said = report(scores, [100, 101, 102, 103])
    assert said.startswith("2 of 4 samples left out: reward `number` ")
    assert "raised ValueError: could not convert string to float: 'many' (sample 101)" in said
    assert "\n" not in said


def test_a_run_without_any_reward_ends_after_some_steps(score):
    scorer = Scorer({"number": 1.0, "never": 1.0}, patience=3)
    for step in range(2):
        scores = score(None, scorer, completions=["1", "2"])
        assert report(scores, [5, 6]).startswith("EVERY ONE of 2 samples left out: reward `never` raised RuntimeError: "
                                                 "no licence (sample 5, and 1 more)")
        scorer.count(scores, step)
    match = r"of 3 steps in a row .*\.py:\d+: reward `never` raised RuntimeError: no licence"
    with pytest.raises(RewardsFailed, match=match) as caught:
        scorer.count(score(None, scorer, completions=["1", "2"]), 2)
    assert 'raise RuntimeError("no licence")' in str(caught.value)


def test_one_good_sample_and_empty_batches_do_not_end_it(score):
    scorer = Scorer("number", patience=2)
    for step, completions in enumerate((["x", "x"], ["1", "x"], ["x", "x"], ["2", "2"], ["x", "x"])):
        scorer.count(score(None, scorer, completions=completions), step)
    with pytest.raises(RewardsFailed):
        scorer.count(score(None, scorer, completions=["x", "x"]), 5)
    fresh = Scorer("number", patience=1)
    fresh.count(fresh.score({"completions": []}, []), 0)


def test_parts_of_a_step_are_no_steps(score):
    """Where others train, rewards are computed of the prompts that have come, often of one."""
    scorer = Scorer("number", patience=2)
    scorer.count(score(None, scorer, completions=["1"] * 8), 0)
    for step in (1, 1, 2, 1, 2, 1, 2):
        scorer.count(score(None, scorer, completions=["x", "x"]), step)
    with pytest.raises(RewardsFailed, match="of 2 steps in a row"):
        scorer.count(score(None, scorer, completions=["x", "x"]), 2)


def test_timeout_and_retries_of_the_recipe_come_before_those_of_the_function(score):
    scores = score({"number": {"retries": 3}}, completions=["x", "1"])
    assert (scores.retried, scores.keep) == (3, [False, True])


def test_a_broken_recipe_is_refused():
    with pytest.raises(InvalidInput, match="cannot be 5"):
        Scorer(5)
    with pytest.raises(InvalidInput, match="Did you mean `math`"):
        find_reward("maths")

REPORTING = '''
import sys
from distflow import metric, reward

@reward(retries=1)
def one_by_one(completion):
    metric("own/length", len(completion))
    metric("own/torch", "torch" in sys.modules)
    if completion == "bad":
        raise ValueError("no")
    return 1.0

@reward
async def in_turns(completion):
    metric("own/turns", len(completion))
    return 1.0

@reward
def together(completions):
    for completion in completions:
        metric("own/together", len(completion))
    return [1.0] * len(completions)

@reward(in_rank=True)
def at_once(completion):
    metric("own/at_once", len(completion))
    return 1.0 / len(completion)

@reward
def wrong(completion):
    metric("own/length", "many")
    return 1.0
'''


def test_what_rewards_report_comes_back_from_their_processes(module):
    """A call that fails is tried again and does not count."""
    module(REPORTING)
    current().take()  # what earlier tests have left
    scorer = Scorer(["one_by_one", "in_turns", "together", "at_once"], workers=2)
    scores = scorer.score({"completions": ["a", "bb", "bad", ""]}, range(4))
    assert (scores.keep, scores.retried) == ([True, True, False, False], 1)
    found = Metrics()
    for name, total, count in scores.metrics:
        found.mean(name, total, count)
    assert sorted(found.means()) == [("own/at_once", 6.0, 3.0), ("own/length", 3.0, 3.0), ("own/together", 6.0, 4.0),
                                     ("own/torch", 0.0, 3.0), ("own/turns", 6.0, 4.0)]
    assert current().means() == []


def test_a_metric_that_is_no_number_ends_the_run_and_names_it(module):
    module(REPORTING)
    with pytest.raises(EngineError, match=r"reward `wrong` cannot be computed: metric\('own/length', 'many'\)"):
        Scorer("wrong").score({"completions": ["a"]}, [0])
