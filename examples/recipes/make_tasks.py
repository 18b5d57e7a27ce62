"""Write problems of reasoning-gym as JSON lines: training and held-out ones, which share no question."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reasoning_gym

TRAIN_SEED, HELD_OUT_SEED = 1, 7


def write_problems(folder: Path, task: str, settings: Mapping[str, Any], *, train: int, held_out: int) -> None:
    """Write `train.jsonl` and `heldout.jsonl` with `question` and `answer`.

    Small tasks repeat their questions: each is kept once, and the held-out ones leave the training set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked: set[str] = set()
    for name, seed, count in (("heldout", HELD_OUT_SEED, held_out), ("train", TRAIN_SEED, train)):
        rows = []
        for entry in reasoning_gym.create_dataset(task, seed=seed, size=20 * count, **settings):
            if len(rows) < count and entry["question"].casefold() not in asked:
                asked.add(entry["question"].casefold())
                rows.append({"question": entry["question"], "answer": entry["answer"]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder / name}.jsonl: {len(rows)} problems")
