"""What can be said of SGLang's engine without SGLang: how weights are handed over, and how ranks are told."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from distflow.errors import EngineError
from workers.engines.devices import NAMES
from workers.engines.sglang import weights as arrival
from workers.engines.sglang.engine import TPGroup, TurnResult
from workers.engines.sglang.weights import Buckets

SHAPES = {"a": torch.Size([3, 5]), "b": torch.Size([7]), "c": torch.Size([40, 10]), "d": torch.Size([])}


def _opened(line) -> None:
    """What another process finds in each bucket, as SGLang's server does."""
    while bucket := line.recv():
        line.send([(name, tensor.tolist(), str(tensor.dtype)) for name, tensor in pickle.loads(
            base64.b64decode(bucket))])


@pytest.mark.run
@pytest.mark.parametrize("room", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_process_finds_the_weights_though_they_go_through_one_buffer(monkeypatch, room, dtype):
    monkeypatch.setattr(arrival, "BUCKET", room)
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    buffer = torch.empty(400)

    def arriving():
        for name, tensor in values.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(torch.nan)

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_opened, args=(theirs,))
    reader.start()
    buckets, found, count = Buckets(arriving(), SHAPES, dtype, "cpu"), [], 0
    for bucket in buckets:
        ours.send(bucket)
        assert ours.poll(300.0)
        found += ours.recv()
        count += 1
    ours.send("")
    reader.join()
    assert found == [(name, tensor.to(dtype).tolist(), str(dtype)) for name, tensor in values.items()]
    assert buckets.size == sum(shape.numel() for shape in SHAPES.values()) * dtype.itemsize
    assert count == {1: 4, 100: 3}.get(room, 1)


@pytest.mark.parametrize(("name", "shape", "says"), [("a", [5, 3], r"`a` \[5, 3\].*\[3, 5\]"),
                                                     ("e", [2], "`e`.*not known")])
def test_what_is_not_the_models_is_refused(name, shape, says):
    with pytest.raises(EngineError, match=says):
        list(Buckets([(name, torch.zeros(shape))], SHAPES, torch.float32, "cpu"))


def _told(fails: bool):
    """What each rank hears of two calls; the first rank's second one may fail."""
    share = TPGroup(init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES))
    sampled = TurnResult("7.", [1, 2], [-0.1, torch.tensor(-1 / 3).item()], [4, 4], False, "AAAA")
    turns = share.broadcast(lambda: [sampled])

    def ask():
        if fails:
            raise EngineError("it has ended")
        return []

    try:
        return share.leads, [TurnResult(*turn) for turn in turns], share.broadcast(ask)
    except EngineError as error:
        return share.leads, [TurnResult(*turn) for turn in turns], str(error)


@pytest.mark.run
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_rank_tells_the_others(fails):
    results = run_ranks(2, _told, fails)
    turn = TurnResult("7.", [1, 2], [-0.1, torch.tensor(-1 / 3).item()], [4, 4], False, "AAAA")
    assert results == [(leads, [turn], "it has ended" if fails else []) for leads in (True, False)]


def _refusal():
    os.environ["DISTFLOW_MACHINE"] = f"machine {dist.get_rank()}"  # the real thing needs a second one
    try:
        TPGroup(init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES))
    except EngineError as error:
        return str(error)
    finally:
        del os.environ["DISTFLOW_MACHINE"]


def test_a_model_over_two_machines_is_refused_on_both():
    for said in run_ranks(2, _refusal):
        assert "1 of the 2 ranks over which its model is split are on others" in said
