"""With `swap` one engine of a role has its memory at a time, and nothing that it computes changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from training import role_of

from distflow.config.run import Lora, RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.role_engines import RoleEngines

SIZES = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1}


def swapping(swap: bool = True, lora: Lora | None = None) -> RoleEngines:
    settings = RoleRun(lora=lora, learning_rate=1e-2, swap=swap, generation={"max_new_tokens": 6})
    return role_of(build_model(270, 0, **SIZES), build_tokenizer(["one"]), settings)


def steps(role: RoleEngines) -> list[Tensor]:
    """Sampled tokens, their log-probabilities by the trainer, and an update from them, twice; then the weights."""
    prompts = Ragged.from_rows([torch.tensor([7, 8, 9]), torch.tensor([11, 12])])
    seen = []
    for _ in range(3):
        samples = role.generate(prompts, torch.arange(4), repeats=2)
        rows = prompts.select(torch.tensor([0, 0, 1, 1]))
        seen += [samples.tokens.values, role.logprobs(rows, samples.tokens).values]
        role.update(Batch(torch.arange(4), {"prompts": rows, "responses": samples.tokens}),
                    lambda logprobs, entropies, micro: -logprobs.sum() / 10)
    return seen + [weight.clone() for _, weight in role.engine.export()]


def equal(lora: Lora | None) -> None:
    plain, swapped = (steps(swapping(swap, lora)) for swap in (False, True))
    assert len(plain) == len(swapped) > 6
    for number, (one, other) in enumerate(zip(plain, swapped)):
        assert torch.equal(one, other), number


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["whole", "lora"])
def test_nothing_changes(ranks, lora):
    run_ranks(ranks, equal, lora)


def held(tensors) -> int:
    """Bytes of the storages of tensors."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def one_at_a_time() -> None:
    role = swapping()
    trainer, rollout = role.engine, role.rollout
    assert held(rollout.model.parameters()) == 0 < held(trainer.resident())
    steps(role)
    parameters = sum(weight.numel() for weight in rollout.model.parameters())
    assert held(rollout.model.parameters()) == 0
    ours = held(trainer.resident())
    assert ours >= 3 * 4 * parameters / dist.get_world_size()
    with role.engine_swap.sampling():
        assert held(trainer.resident()) == 0
        assert held(rollout.model.parameters()) == 4 * parameters
        assert role.engine_swap.everything.bytes + role.engine_swap.optimizer.bytes == ours
    assert held(trainer.resident()) == ours


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_one_engine_has_its_memory(ranks):
    run_ranks(ranks, one_at_a_time)


def test_an_error_comes_through_and_the_trainer_has_its_memory_again(mesh, monkeypatch):
    """Also where the rollout could not sleep: rows are under way."""
    role = swapping()
    steps(role)

    def refuses():
        raise EngineError("rows are under way")

    monkeypatch.setattr(role.rollout, "sleep", refuses)
    ours = held(role.engine.resident())
    with pytest.raises(KeyError), role.engine_swap.sampling():
        raise KeyError
    assert held(role.engine.resident()) == ours > 0
    monkeypatch.undo()
    role.update(Batch(torch.arange(1), {name: Ragged(torch.tensor([5, 6]), torch.tensor([2]))
                                        for name in ("prompts", "responses")}), lambda logprobs, *_: -logprobs.sum())

    def loses(*_):
        raise EngineError("the library died")

    monkeypatch.setattr(role.rollout, "load", loses)
    with pytest.raises(EngineError, match="the library died"), role.engine_swap.sampling():
        pass
    assert held(role.engine.resident()) == ours


def frozen_between_nodes() -> None:
    tokens = Ragged.from_rows([torch.tensor([7, 8, 9]), torch.tensor([11, 12])])
    plain, role = (role_of(build_model(270, 0, **SIZES), build_tokenizer(["one"]), RoleRun(swap=swap), samples=False,
                           trained=False) for swap in (False, True))
    whole = held(role.engine.resident())
    assert whole == held(plain.engine.resident()) > 0
    for _ in range(2):
        role.release()
        plain.release()
        assert (held(role._trainer.resident()), held(plain.engine.resident())) == (0, whole)
        assert torch.equal(role.logprobs(tokens, tokens).values, plain.logprobs(tokens, tokens).values)
        assert held(role.engine.resident()) == whole


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_role_has_no_memory_between_its_nodes(ranks):
    run_ranks(ranks, frozen_between_nodes)
