"""Tasks as people bring them, small: records, a recipe of rewards with its module, settings of `data`, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distflow import launch
from distflow.config.load import load
from distflow.errors import InvalidInput
from workers.preflight import prove_with_tokenizer
from workers.preflight.proofs import Preflight

SUMS = [{"question": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(12)]
ANSWERED = [{**each, "answer": f"Let me add.\n#### {each['answer']}"} for each in SUMS]
CHOICES = [{"question": f"Which one?\nA) {a}\nB) {a + 1}\nC) {a + 2}\n", "answer": "ABC"[a % 3]} for a in range(12)]
PAIRS = [{**each, "chosen": each["answer"], "rejected": "0"} for each in SUMS]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALLED = [{"question": [
    {"role": "user", "content": each["question"]},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "add", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": each["answer"]}], "answer": each["answer"], "tools": TOOLS} for each in SUMS]


def changed(call: dict, **function) -> dict:
    """A record of `CALLED` with another tool call."""
    asked, said, shown = call["question"]
    called = {"type": "function", "function": {**said["tool_calls"][0]["function"], **function}}
    return {**call, "question": [asked, {**said, "tool_calls": [called]}, shown]}


@dataclass
class Task:
    records: list[dict[str, Any]]
    reward: Any = None  # of GRPO; None: SFT
    module: str = ""  # source of the module `mine`
    dag: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    tokenizer: Callable[[], Any] | None = None
    missing_rows: int = 0  # of the embedding
    known_ends: Callable[[Any], list[int]] = lambda _: []  # that the model's folder names
    model: Callable[[Path], str] | None = None  # makes a model folder, of which planning reads the template


def proved(task: Task, folder: Path, name: str) -> Preflight:
    """Prove a task as a run does at its start. `name`: of the module with its reward, unlike those of other tasks."""
    for file, records in (("train", task.records), ("heldout", task.held_out)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / f"{name}.py").write_text(f"from distflow import reward\n{task.module}")
    recipe = json.loads(json.dumps(task.reward).replace("mine:", f"{name}:"))
    settings = {f"data.{key}": value for key, value in task.data.items()} | {"data.train": "train.jsonl"}
    if task.reward is not None:
        settings |= {"nodes.reward.with": {"reward": recipe}}
    run = folder / "run.yaml"
    role = {"model": task.model(folder) if task.model else {"architecture": "qwen3"}}
    run.write_text(json.dumps({
        "steps": 1, "data": {"train": "train.jsonl", "batch": 1}, "roles": {"actor": role, "teacher": role},
        "validation": {"data": {"heldout": "heldout.jsonl"}} if task.held_out else None}))
    dag = task.dag or ("sft" if task.reward is None else "grpo")
    spec = load(dag, str(run), [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    account = launch.prove_inputs(spec, starts=True)
    if task.tokenizer:
        tokenizer = task.tokenizer()
        prove_with_tokenizer(account, spec, tokenizer, len(tokenizer) - task.missing_rows, task.known_ends(tokenizer))
        account.require()
    return account


def check_fault(task: Task, refused: bool, says: str, folder: Path, name: str) -> None:
    """Assert that the one fault of a task is refused, with the place, or noted."""
    if refused:
        with pytest.raises(InvalidInput) as caught:
            proved(task, folder, name)
        said = [str(mistake) for mistake in caught.value.mistakes]
        assert any(place in said[0] for place in ("train.jsonl:1", f"{name}.py:", "grpo.yaml")), said[0]
    else:
        said = proved(task, folder, name).doubts
    assert len(said) == 1, said
    assert says in said[0]
