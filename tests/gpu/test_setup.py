"""What a run sets up differently where there are GPUs, as far as a machine without one can tell."""

from __future__ import annotations

import os

import pytest
import torch

from distflow.config.run import Generation, RoleRun
from distflow.errors import EngineError, InvalidInput
from distflow.plan import ROLLOUT, TRAINER, Group
from workers.device import gpu_index
from workers.engines.collectives import choose_backend, torch_name
from workers.engines.devices import choose
from workers.engines.vllm.start import environment, launcher_environment


def test_tests_without_the_mark_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()


def test_cudnn_does_not_attend():
    torch.backends.cuda.enable_cudnn_sdp(True)
    choose("cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def groups_of(trainers: int, rollouts: int) -> list:
    return [(Group(TRAINER, 0, 1, None), 0)] * trainers + [(Group(ROLLOUT, trainers, rollouts, None), replica)
                                                           for replica in range(rollouts)]


def test_each_rank_has_a_gpu_of_its_own(capsys):
    assert [gpu_index(local, 4, groups_of(2, 2)) for local in range(4)] == [0, 1, 2, 3]
    assert not capsys.readouterr().out


def test_more_ranks_than_gpus_are_refused_and_never_compute_on_the_cpu():
    with pytest.raises(InvalidInput) as caught:
        gpu_index(0, 1, groups_of(2, 1))
    mistake, = caught.value.mistakes
    assert mistake.what == "3 ranks on a machine that has 1 GPU"
    assert "CUDA_VISIBLE_DEVICES=" in mistake.hint


def test_groups_share_gpus_but_ranks_of_one_group_do_not(capsys):
    assert [gpu_index(local, 1, groups_of(1, 1)) for local in range(2)] == [0, 0]
    assert capsys.readouterr().out == "note: 2 ranks of this machine share 1 GPU: those of different groups divide " \
                                      "memory and time\n"
    assert [gpu_index(local, 2, groups_of(2, 2)) for local in range(4)] == [0, 1, 0, 1]
    with pytest.raises(InvalidInput):
        gpu_index(0, 1, [(None, 0)] * 2)  # mode sync


@pytest.mark.usefixtures("alone")
def test_vllm_starts_on_the_gpu_of_its_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("RANK", "5")
    assert launcher_environment(1, None) == {}
    launched = launcher_environment(1, 3)
    with environment(Generation(), launched):
        assert {name: os.environ[name] for name in launched} == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}
    assert os.environ["LOCAL_RANK"] == os.environ["RANK"] == "5"
    with environment(Generation(), {}):
        assert "LOCAL_RANK" not in os.environ


def test_large_models_recompute_by_default():
    assert not RoleRun().recomputes(10**9)
    assert RoleRun().recomputes(10**9 + 1)
    assert not RoleRun(recompute=False).recomputes(10**10)
    assert RoleRun(recompute=True).recomputes(1)
    assert not RoleRun(engine="megatron").recomputes(10**10)


def test_collectives_are_chosen_by_device():
    assert [choose_backend("auto", device) for device in ("cpu", "cuda")] == ["gloo", "nccl"]
    assert torch_name("gloo", "cpu") == "gloo"
    assert torch_name("nccl", "cuda") == "cpu:gloo,cuda:nccl"
    assert torch_name("ucc", "cuda") == "cpu:ucc,cuda:ucc"


@pytest.mark.parametrize(("asked", "says"), [("ucc", "this torch .* is built without it. UCC needs a torch"),
                                             ("nccl", "NCCL needs a torch for CUDA")])
def test_collectives_that_do_not_work_here_are_refused(asked, says):
    with pytest.raises(EngineError, match=f"`backend: {asked}` does not work here: .*{says}"):
        choose_backend(asked, "cpu")


def test_collectives_that_were_asked_for_are_tried():
    assert choose_backend("gloo", "cpu") == "gloo"
