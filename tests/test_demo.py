"""What the demonstration says when it has ended, of a run that has really validated."""

from harness import ROOT, lines_of


def test_answers_to_validation_are_written_once_after_a_resume(launch, workspace):
    sft = ("--dag", str(ROOT / "dags/sft.yaml"), "--run-file", "tiny.yaml",
           "validation={data: {heldout: train.jsonl}, every: 2}")
    launch(1, *sft, "--name", "run", "steps=4")
    launch(1, "--resume", "runs/run", "steps=6")
    lines = lines_of(workspace / "runs/run/validation.jsonl")
    assert [(line["step"], line["row"]) for line in lines] == [(step, row) for step in (0, 2, 4, 6) for row in range(4)]
