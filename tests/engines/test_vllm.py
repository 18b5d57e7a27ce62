"""What concerns vLLM alone: it draws what transformers draws, shares a process, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines.rollouts import build, tiny
from harness import command, environment, metrics_of
from ranks import run_ranks
from stores import client, hosted
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from distflow.config.run import Lora
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from distflow.weights.fingerprint import sums_of
from distflow.weights.publisher import Publisher
from distflow.weights.puller import Puller
from distflow.weights.shard_slice import Split
from workers.engines.adapters import attach
from workers.engines.embedded import build_model
from workers.engines.rounding import ROUNDING
from workers.engines.tensor_parallel import ROW_PARALLEL
from workers.engines.weight_updates import WeightUpdates
from workers.weight_sync import reads_here

pytest.importorskip("vllm")

TOKEN = bytes(range(32))
SPLIT = "layouts: {rollout: {tp: 2}}\n"
APART = f"""{SPLIT}mode: async
staleness: 0
groups: {{rollout: 2}}
faults: [{{kind: kill, group: rollout, rank: 2, step: 2, phase: generating}}]
"""
BESIDE = f"""{SPLIT}mode: semi_sync
staleness: 0
groups: {{rollout: 2}}
faults: [{{kind: kill, group: trainer, rank: 1, step: 2, phase: generating}}]
"""


@pytest.fixture(scope="module")
def running(mesh):
    engine = build("vllm", mesh, tiny())
    yield engine
    engine.close()


@pytest.fixture
def vllm(running):
    settings = running.generation
    running.load(((name, parameter.data) for name, parameter in tiny().named_parameters()), version=0)
    yield running
    running.generation = settings


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), [
    (1.0, 0, 1.0, 0.0), (0.8, 7, 0.9, 0.0), (1.3, 0, 1.0, 0.6)])
def test_it_draws_the_tokens_that_transformers_draws(vllm, mesh, prompts, temperature, top_k, top_p, min_p):
    hf = build("hf", mesh, tiny())
    ids = torch.arange(8 * len(prompts)) + 1000
    for engine in (vllm, hf):
        engine.generation = engine.generation.model_copy(update={"top_k": top_k, "top_p": top_p, "min_p": min_p})
    theirs, ours = (engine.generate(prompts, 8, ids, key=12, temperature=temperature) for engine in (vllm, hf))
    assert theirs.tokens.values.tolist() == ours.tokens.values.tolist()
    assert theirs.finished.tolist() == ours.finished.tolist()
    assert torch.allclose(theirs.logprobs.values, ours.logprobs.values, rtol=0, atol=ROUNDING[4].token)


def test_sessions_of_several_temperatures_share_a_batch(vllm, prompts):
    """Rows come, go and move in vLLM's batch, and each keeps its own key and temperature."""
    wanted = [vllm.generate(prompts, 2, torch.arange(12), key, temperature).tokens.rows
              for key, temperature in ((1, 0.0), (2, 0.7), (3, 1.3))]
    sessions = [vllm.session(1, 0.0), vllm.session(2, 0.7), vllm.session(3, 1.3)]
    groups = [vllm.rows(prompts, 2, torch.arange(12)) for _ in sessions]
    for start in range(0, 12, 2):
        for session, rows in zip(sessions, groups):
            session.add(rows[start : start + 2])
        sessions[start % 3].step()
    while any(session.busy for session in sessions):
        for session in sessions:
            session.step()
    for rows, expected in zip(groups, wanted):
        assert [row.tokens.tolist() for row in rows] == [row.tolist() for row in expected]


def test_a_session_that_nobody_holds_costs_nothing(vllm, prompts):
    session = vllm.session(key=0)
    session.add(vllm.rows(prompts, 1, torch.arange(len(prompts))))
    session.step()
    scheduler = vllm.core.engine_core.scheduler
    assert scheduler.get_num_unfinished_requests() == len(prompts)
    del session
    gc.collect()
    assert scheduler.get_num_unfinished_requests() == 0


def test_what_it_cannot_do_is_said(vllm, mesh):
    row = vllm.rows(Ragged.from_rows([torch.arange(5, 9)]), 1, torch.arange(1))[0]
    row.images = Ragged.from_rows([torch.zeros(3)])
    with pytest.raises(EngineError, match="rollout: hf"):
        vllm.session(key=0).add([row])
    long = vllm.rows(Ragged.from_rows([torch.full((300,), 7)]), 1, torch.arange(1))
    with pytest.raises(EngineError, match="300 tokens"):
        vllm.session(key=0).add(long)
    with pytest.raises(EngineError, match="without .*v_proj"):
        vllm.load([(f"model.layers.0.self_attn.{part}_proj.weight", torch.zeros(size, 64))
                   for part, size in (("q", 64), ("k", 32))], version=1)
    session = vllm.session(key=0)
    session.add(vllm.rows(Ragged.from_rows([torch.arange(5, 9)]), 1, torch.arange(1)))
    with pytest.raises(EngineError, match="under way"):
        vllm.sleep()
    session.abort()
    vllm.sleep()
    vllm.wake()
    with pytest.raises(EngineError, match="since it slept"):
        session.add(vllm.rows(Ragged.from_rows([torch.arange(5, 9)]), 1, torch.arange(1)))


def test_adapters_alone_come_and_give_what_transformers_gives(mesh, prompts):
    model, ids = tiny(), torch.arange(2 * len(prompts))
    attach(model, Lora(rank=4), seed=0)
    adapters = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    engine = build("vllm", mesh, model, lora=Lora(rank=4))
    with torch.no_grad():
        for version in range(1, 3):
            for index, weight in enumerate(adapters.values()):
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(100 * version + index))
            assert engine.load(adapters.items(), version) == sum(weight.nbytes for weight in adapters.values())
            theirs, ours = (each.generate(prompts, 2, ids, key=12) for each in (engine, build("hf", mesh, model)))
            assert theirs.tokens.values.tolist() == ours.tokens.values.tolist()
            assert theirs.versions.values.unique().tolist() == [version]
            assert torch.allclose(theirs.logprobs.values, ours.logprobs.values, rtol=0, atol=ROUNDING[4].token)
    with pytest.raises(EngineError, match="as a whole"):
        engine.load([*adapters.items()][1:], version=3)
    engine.sleep()
    engine.wake()
    engine.load(adapters.items(), version=3)
    assert engine.generate(prompts, 2, ids, key=12).tokens.values.tolist() == ours.tokens.values.tolist()
    engine.close()


def test_too_large_a_rank_is_refused(mesh):
    model = tiny()
    attach(model, Lora(rank=513), seed=0)
    with pytest.raises(EngineError, match="rank 512 at most"):
        build("vllm", mesh, model, lora=Lora(rank=513))


def test_a_closed_engine_says_so(mesh):
    engine = build("vllm", mesh, tiny())
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.check_health()
    assert dist.is_initialized()
    dist.barrier()


def two_layouts(reference: list[list[int]]) -> None:
    """On two ranks: an engine for each (the launcher's environment must not mislead it), then one for both."""
    prompts = Ragged.from_rows([torch.arange(9, 9 + length) for length in (3, 12, 40)])
    launch = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(launch)
    for shape in ((2, 1, 1, 1), (1, 1, 1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "cp", "tp"))
        model = tiny(kv_heads=2)
        engine = build("vllm", mesh, model)
        assert {name: os.environ[name] for name in launch} == launch
        for version in range(2):
            samples = engine.generate(prompts, 4, torch.arange(12), key=3)
            assert [row.tolist() for row in samples.tokens.rows] == reference[version]
            assert not list(Path("/dev/shm").glob("*cpushm*"))  # it would outlive a killed run, and stop the next
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine.load(((name, parameter.data) for name, parameter in model.named_parameters()), version + 1)
        engine.close()
        dist.barrier()
    for name in launch:
        del os.environ[name]


def test_ranks_alone_and_together_draw_the_same(mesh):
    model, prompts = tiny(kv_heads=2), Ragged.from_rows([torch.arange(9, 9 + length) for length in (3, 12, 40)])
    reference = []
    for _ in range(2):
        samples = build("hf", mesh, model).generate(prompts, 4, torch.arange(12), key=3)
        reference.append([row.tolist() for row in samples.tokens.rows])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    run_ranks(2, two_layouts, reference)


def large() -> PreTrainedModel:
    return build_model(8192, 0, layers=4, hidden=512, heads=8, kv_heads=4)


def pull_slices(port: int) -> tuple[int, int]:
    """On two ranks, each a machine: an engine for both loads the version that was published. Return the bytes that this
    rank has received, and those that it reads."""
    rank = dist.get_rank()
    os.environ |= {"DISTFLOW_MACHINE": f"machine {rank}", "LOCAL_RANK": str(rank)}
    model, mesh = large(), init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=("dp", "pp", "cp", "tp"))
    engine = build("vllm", mesh, model)
    puller = Puller(client(port), TOKEN, f"rollout {rank}", reads=reads_here(engine))
    updates = WeightUpdates(puller, 0)
    while not (weights := updates.pulled_weights()):
        assert not updates.job.done()
    dist.barrier()
    updates.load_into(engine)  # which proves that the ranks together hold what was published
    boxes = {name: engine.reads.get(name, [([0], parameter.shape)]) for name, parameter in model.named_parameters()}
    read = sum(4 * math.prod(size) for each in boxes.values() for _, size in each)
    updates.close()
    engine.close()
    del os.environ["DISTFLOW_MACHINE"], os.environ["LOCAL_RANK"]
    return weights.chunks.moved, read


def test_each_machine_of_a_split_model_pulls_what_its_ranks_read():
    store = hosted()
    weights = {name: parameter.data * 1.5 for name, parameter in large().named_parameters()}
    publisher = Publisher(store, TOKEN, rank=0, ranks=1)
    publisher.publish(1, weights, torch.float32, sums_of(weights.items(), torch.float32), Split(2, ROW_PARALLEL))
    found = run_ranks(2, pull_slices, store.port)
    publisher.close()
    whole = sum(tensor.nbytes for tensor in weights.values())
    assert all(read < 0.52 * whole and read <= moved < 1.05 * read for moved, read in found), (found, whole)


def run(workspace: Path, ranks: int, name: str, engine: str, more: str = "", *overrides: str) -> dict:
    text = (workspace / "tiny.yaml").read_text().replace("kv_heads: 1", "kv_heads: 2")
    (workspace / "own.yaml").write_text(text + more)
    done = subprocess.run(command(ranks, "--dag", "grpo.yaml", "--run-file", "own.yaml", "--name", name, "--set",
                                  f"roles.actor.rollout={engine}", "--set", "steps=3",
                                  *(word for line in overrides for word in ("--set", line))),
                          cwd=workspace, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return metrics_of(workspace / "runs" / name)


def test_a_run_is_the_same_with_either_engine_and_split(workspace):
    """The algorithm does not know: the same samples in every step, which follow from the same weights."""
    ours = run(workspace, 1, "ours", "hf")
    adapted = run(workspace, 1, "adapted", "vllm", "", "roles.actor.lora={rank: 4}")
    assert all(line["mismatch/logprob_max"] < ROUNDING[4].token for line in adapted.values())
    assert 0 < adapted[3]["weights/bytes"] < ours[3]["weights/bytes"] / 4
    alone, split = run(workspace, 1, "alone", "vllm"), run(workspace, 2, "split", "vllm", SPLIT)
    for step, line in ours.items():
        for other in (alone, split):
            assert other[step]["response/fingerprint"] == line["response/fingerprint"]
            assert other[step]["loss"] == pytest.approx(line["loss"], abs=1e-4)
            assert other[step]["mismatch/logprob_max"] < ROUNDING[4].token


def test_those_that_train_sample_too_with_a_model_over_two_ranks(workspace):
    """Ranks 0 and 1 train, and have one model to sample with; 2 and 3 another. Rank 1, which follows, is killed
    while it samples."""
    ours, split = run(workspace, 1, "ours", "hf"), run(workspace, 4, "split", "vllm", BESIDE)
    events = [json.loads(line) for line in (workspace / "runs/split/events.jsonl").read_text().splitlines()]
    assert [event["ranks"] for event in events if event["event"] == "failure"] == [[0, 1]]
    for step, line in ours.items():
        assert split[step]["response/fingerprint"] == line["response/fingerprint"]
        assert split[step]["loss"] == pytest.approx(line["loss"], abs=1e-4)


@pytest.mark.parametrize("groups", ["{rollout: 2}", "{rollout: 2, inference: {reference: rollout}}"])
def test_a_rollout_over_two_ranks_samples_the_same_even_if_one_of_them_dies(workspace, groups):
    """Rank 0 trains, 1 and 2 have one model: 2, which follows, is killed, and both begin anew, but not the trainer. The
    reference is on rank 0, or 1."""
    ours, split = run(workspace, 1, "ours", "hf"), run(workspace, 3, "split", "vllm",
                                                       APART.replace("{rollout: 2}", groups))
    for step, line in ours.items():
        assert split[step]["response/fingerprint"] == line["response/fingerprint"]
        assert split[step]["loss"] == pytest.approx(line["loss"], abs=1e-4)
    events = [json.loads(line) for line in (workspace / "runs/split/events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["event"] == "failure"]
    assert [(event["group"], event["ranks"], event["verdict"]) for event in failed] == \
        [("rollout 0", [1, 2], "starts again")]
    lives = [event["attempt"] for event in events if event["event"] == "worker_ready" and event["rank"] == 0]
    assert lives == [0]
