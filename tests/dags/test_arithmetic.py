"""The embedded problems: made by the script beside them, right, and held-out ones never trained on."""

import json
import subprocess
import sys

import pytest
from harness import ROOT

DATA = ROOT / "dags/data"
SETS = {name: [json.loads(line) for line in (DATA / f"arithmetic/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")}


def test_the_script_makes_the_shipped_files(tmp_path):
    subprocess.run([sys.executable, str(DATA / "make_arithmetic.py"), "--out", str(tmp_path)], check=True,
                   capture_output=True)
    for name in SETS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (DATA / f"arithmetic/{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", SETS)
def test_every_working_is_right(name):
    for problem in SETS[name]:
        working, _, final = problem["answer"].partition(" #### ")
        left, result = working.split(", ")[-1].split(" = ")
        first, sign, second = left.split()
        expected = {"+": int(first) + int(second), "-": int(first) - int(second), "*": int(first) * int(second)}[sign]
        assert int(result) == int(final) == expected, problem


def test_no_held_out_question_is_trained():
    questions = {name: {problem["question"] for problem in problems} for name, problems in SETS.items()}
    assert not questions["train"] & questions["heldout"]
    assert all(len(questions[name]) == len(SETS[name]) for name in SETS)
    assert {problem["level"] for problem in SETS["heldout"]} == {1, 2, 3}
