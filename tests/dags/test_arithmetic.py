"""The embedded problems: made by the script beside them, right, and held-out ones never trained on."""

import json
import subprocess
import sys

import pytest
from harness import ROOT

DATA = ROOT / "dags/data"
SETS = {name: [json.loads(line) for line in (DATA / f"arithmetic/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "demonstrations", "heldout", "preferences")}


def test_the_script_makes_the_shipped_files(tmp_path):
    subprocess.run([sys.executable, str(DATA / "make_arithmetic.py"), "--out", str(tmp_path)], check=True,
                   capture_output=True)
    for name in SETS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (DATA / f"arithmetic/{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", SETS)
def test_every_step_of_a_working_is_right(name):
    for problem in SETS[name]:
        working, _, final = problem["answer"].partition(" #### ")
        for step in working.split(", "):
            left, result = step.split(" = ")
            first, sign, second = left.split()
            expected = {"+": int(first) + int(second), "-": int(first) - int(second), "*": int(first) * int(second)}
            assert int(result) == expected[sign], problem
        assert final == result


def test_the_teacher_is_hasty_and_only_where_there_are_two_steps():
    pairs = list(zip(SETS["train"], SETS["demonstrations"], strict=True))
    assert all(right["question"] == shown["question"] for right, shown in pairs)
    assert all(right == shown for right, shown in pairs if right["level"] == 1)
    hasty = [", " not in shown["answer"] for right, shown in pairs if right["level"] > 1]
    assert 0.75 < sum(hasty) / len(hasty) < 0.85
    assert all(shown == right or right["answer"].startswith(shown["answer"].split(" #### ")[0] + ", ")
               for right, shown in pairs)


def test_the_chosen_answer_is_right_and_the_rejected_one_is_not():
    assert len(SETS["preferences"]) == 2000
    hasty = 0
    for pair, trained in zip(SETS["preferences"], SETS["train"]):
        assert {name: pair[name] for name in trained} == trained  # so that both sets make the same tokenizer
        (chosen, right), (rejected, wrong) = (pair[name].split(" #### ") for name in ("chosen", "rejected"))
        assert pair["chosen"] == trained["answer"]
        assert wrong != right
        assert rejected.endswith(f"= {wrong}")
        hasty += chosen.startswith(f"{rejected}, ")
        assert chosen.startswith(f"{rejected}, ") or (
            abs(int(wrong) - int(right)) == 1 and rejected.removesuffix(wrong) == chosen.removesuffix(right))
    assert 0.4 < hasty / 2000 < 0.7


def test_no_held_out_question_is_trained():
    questions = {name: {problem["question"] for problem in problems} for name, problems in SETS.items()}
    assert not questions["train"] & questions["heldout"]
    assert all(len(questions[name]) == len(SETS[name]) for name in SETS)
    assert {problem["level"] for problem in SETS["heldout"]} == {1, 2, 3}
