"""What the demonstration says when it has ended, of a run that has really validated."""

from __future__ import annotations

import json

from harness import ROOT

from distflow.cli import demo


def test_its_end_shows_the_curve_the_same_questions_before_and_after_and_where_to_look(launch, workspace):
    (workspace / "heldout.jsonl").write_text((workspace / "train.jsonl").read_text())
    launch(2, "--dag", str(ROOT / "dags/sft.yaml"), "--run-file", "tiny.yaml", "--name", "run", "--set", "steps=3",
           "--set", "validation={data: {heldout: heldout.jsonl}, every: 2}")
    folder = workspace / "runs/run"
    curve = "\n".join(demo._curve(folder))
    assert [f"step    {step}" in curve for step in (0, 1, 2, 3)] == [True, False, True, True]
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 4 + [2] * 4 + [3] * 4
    shown = list(demo._answers(folder))
    records = [json.loads(line) for line in (workspace / "heldout.jsonl").read_text().splitlines()]
    for place, row in enumerate((0, 2, 4)):  # the first rank answers every other one
        question, before, after = shown[1 + 3 * place : 4 + 3 * place]
        assert records[row]["question"] in question
        for when, text, step in (("before", before, 0), ("after", after, 3)):
            said = next(line for line in lines if (line["step"], line["row"]) == (step, row))["completions"]
            assert text == f"    {when:<6}  wrong  {' '.join(said.split())}"
    assert len(shown) == 10
    assert f"evaluate {folder}" in "\n".join(demo._further(folder))


def test_answers_to_validation_are_written_once_after_a_resume(launch, workspace):
    sft = ("--dag", str(ROOT / "dags/sft.yaml"), "--run-file", "tiny.yaml", "--set",
           "validation={data: {heldout: train.jsonl}, every: 2}")
    launch(1, *sft, "--name", "run", "--set", "steps=4")
    launch(1, "--resume", "runs/run", "--set", "steps=6")
    lines = map(json.loads, (workspace / "runs/run/validation.jsonl").read_text().splitlines())
    assert [(line["step"], line["row"]) for line in lines] == [(step, row) for step in (0, 2, 4, 6) for row in range(4)]
