"""Whole runs of a model that sees: the same DAGs, questions with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import ROOT, metrics_of
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from distflow.data.dataset import open_images, open_records

MODEL = "{architecture: qwen3_vl, layers: 2, hidden: 64, heads: 2, kv_heads: 1}"
SEEING = ("--run-file", "tiny.yaml", f"roles.actor.model={MODEL}", "data.images=image",
          "data.train=pictures.jsonl")


def write_pictures(folder: Path) -> None:
    """Ten questions: most with one image, one with two, one with none; the files lie beside the data."""
    records = open_records(ROOT / "dags/data/squares/train.parquet").get(range(12))
    for index, record in enumerate(records):
        open_images(record, "image", folder)[0].save(folder / f"{index}.png")
    lines = [{"question": f"How many squares? {index}", "answer": "#### 1", "image": f"{index}.png"}
             for index in range(8)]
    lines.append({"question": "Here <image> and there <image>?", "answer": "#### 2", "image": ["8.png", "9.png"]})
    lines.append({"question": "What is not there?", "answer": "#### 0", "image": []})
    (folder / "pictures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def pictures(workspace):
    write_pictures(workspace)
    return workspace


def test_a_model_that_sees_is_saved_and_loaded(launch, pictures):
    grpo = ("--dag", "grpo.yaml", *SEEING, "steps=1")
    launch(1, *grpo, "--name", "one")
    AutoModelForImageTextToText.from_pretrained(pictures / "runs/one/model")
    assert AutoImageProcessor.from_pretrained(pictures / "runs/one/model", backend="pil").patch_size == 8
    launch(1, *grpo, "--name", "next", "roles.actor.model=runs/one/model")


def test_looking_is_learned(launch, workspace):
    """From a teacher who does not look to half of the answers right. Six seeds and rates gave 0.5 to 0.8 here."""
    vision = ("--run-file", "embedded_vision.yaml")
    launch(1, "--dag", "sft.yaml", *vision, "--name", "blind", "steps=40", "data.train=squares/demonstrations.parquet")
    launch(1, "--dag", str(ROOT / "dags/grpo.yaml"), *vision, "--name", "seeing", "steps=40",
           "roles.actor.model=runs/blind/model", "roles.actor.learning_rate=5e-4")
    summary = json.loads((workspace / "runs/seeing/summary.json").read_text())
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > max(0.45, summary["accuracy_before"] + 0.2)
    rewards = [values["reward/mean"] for values in metrics_of(workspace / "runs/seeing").values()]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2


def test_what_cannot_be_seen_is_said_before_the_start(launch, pictures):
    def said(*arguments: str) -> str:
        return launch(1, "--dag", "grpo.yaml", *SEEING, "--name", "bad", *arguments, code=None).stderr

    text = said("roles.actor.model={architecture: qwen3}")
    assert "`data.images` asks for images, but the model of role `actor` takes none" in text
    assert "pictures.jsonl:1: the record has no field `picture`, where its images should be" in said(
        "data.images=picture")
    (pictures / "3.png").write_text("no image")
    text = said()
    assert "pictures.jsonl:4: field `image`: `3.png` cannot be read as an image" in text
    assert not (pictures / "runs").exists()
