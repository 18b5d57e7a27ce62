"""What the planner expects to pass through a dock, and what its shards count when rows are as long as the run
allows: within 5%, ids, lengths, metadata and the messages' own headers included."""

import subprocess
import sys

import pytest
import torch
import yaml
from harness import ROOT, environment

from distflow.config.load import load
from distflow.data.batch import Batch, Ragged, encode_text
from distflow.dock import Consumer
from distflow.plan import SOURCE, RowLineage
from planners import plan as make_plan
from planners import through_dock

BATCH, PROMPT, RESPONSE, GROUP = 16, 500, 700, 4


@pytest.fixture
def grpo(tmp_path):
    """GRPO with `GROUP` responses to each prompt, and the arguments that name it on the command line."""
    run = {"steps": 1, "roles": {"actor": {"model": {"architecture": "qwen3"},
                                           "generation": {"max_new_tokens": RESPONSE}}},
           "data": {"train": "data.jsonl", "batch": BATCH, "max_prompt_tokens": PROMPT, "max_target_tokens": PROMPT}}
    (tmp_path / "data.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    change = f"nodes.rollout.with.group_size={GROUP}"
    spec = load(str(ROOT / "dags/grpo.yaml"), str(tmp_path / "run.yaml"), [change])
    return spec, make_plan(spec, 2), [str(ROOT / "dags/grpo.yaml"), "--run-file", str(tmp_path / "run.yaml"),
                                      "--set", change]


def column(name, rows):
    """At its longest, as the functions of `grpo.yaml` write it."""
    length = PROMPT if name in ("prompts", "answers", "targets") else RESPONSE
    if name in ("answers", "completions"):
        return encode_text("abcd" * length for _ in range(rows))
    if dtype := {"rewards": torch.float32, "advantages": torch.float32, "group": torch.int64,
                 "completions.cut_thoughts": torch.bool}.get(name):
        return torch.ones(rows, dtype=dtype)
    dtype = torch.int64 if name in ("prompts", "responses") else torch.float32
    return Ragged(torch.ones(rows * length, dtype=dtype), torch.full((rows,), length))


@pytest.mark.parametrize("shards", [1, 4])
def test_the_plan_expects_what_the_dock_counts(grpo, dock, shards):
    spec, plan, _ = grpo
    volume, fans = through_dock(spec, plan, shards), RowLineage(plan.tasks, plan.source)
    at = dock(shards, tuple(Consumer(task.node, ("never",)) for task in plan.tasks))
    ids = {}
    for edge in volume.edges:
        if not edge.reader:
            rows = BATCH * fans.times(fans.of(edge.producer))
            depth = len(fans.of(edge.producer))  # rows of prompts and rows of samples are different rows
            ids[edge.producer] = torch.arange(rows) + depth * 1_000_000
            at.put(Batch(ids[edge.producer], {name: column(name, rows) for name in edge.columns}))
        else:
            fetched = at.fetch(ids[edge.producer], edge.columns)
            assert set(fetched.columns) == set(edge.columns)
    through = [part["received"] + part["sent"] for part in at.status()]
    assert sum(through) == pytest.approx(volume.bytes_in + volume.bytes_out, rel=0.05)
    assert max(through) == pytest.approx(volume.bytes_through_each_shard, rel=0.05)


def test_each_column_goes_in_once_and_out_for_every_reader(grpo):
    spec, plan, _ = grpo
    edges = {(edge.producer, edge.reader): edge for edge in through_dock(spec, plan, 1).edges}
    samples = BATCH * GROUP
    assert edges[SOURCE, ""].bytes_per_step >= edges[SOURCE, "rollout"].bytes_per_step == BATCH * PROMPT * 8
    assert edges["reward", ""].bytes_per_step == edges["reward", "advantage"].bytes_per_step == samples * 4
    assert set(edges["rollout", ""].columns) == {name for (producer, reader), edge in edges.items() if reader
                                                 and producer == "rollout" for name in edge.columns}
    with pytest.raises(ValueError, match="at least one storage shard"):
        through_dock(spec, plan, 0)


@pytest.mark.parametrize(("options", "code"), [(["--dock", "4"], 0), (["--dock", "0"], 2)])
def test_the_command_line_shows_it(grpo, options, code):
    _, _, arguments = grpo
    done = subprocess.run([sys.executable, "-m", "distflow.cli", "plan", *arguments, *options], cwd=ROOT,
                          env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("each of 4 shards" in done.stdout) == (options == ["--dock", "4"])
    assert code == 0 or "a dock has at least one storage shard" in done.stderr
