"""A value head reads one number per token, wherever rows, ranks and micro-batches are cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from workers.engines import attention, fsdp
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine
from workers.engines.policy import inputs_of
from workers.engines.value import ValueModel, with_value_head

STEPS = 3
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1}


def built(layers: int = 2):
    """A value model whose head is not zero, so that what lies before it is seen."""
    model = with_value_head(build_model(270, 0, layers=layers, hidden=64, heads=2, kv_heads=1, head_dim=32))
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    return model


def rows() -> Batch:
    """Eight rows of three prompts; a row without tokens; pairs (0, 1), (2, 3) … have one id."""
    generator = torch.Generator().manual_seed(0)

    def ragged(lengths: list[int]) -> Ragged:
        return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in lengths])

    prompts = ragged([6, 3, 8]).select(torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    return Batch(torch.arange(8) // 2, {"prompts": prompts, "responses": ragged([4, 0, 2, 5, 3, 1, 7, 2])})


def plain(model, prompt: torch.Tensor, response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in one forward, no cache and no padding: the values before each response token, and after the last."""
    states = model.base_model(torch.cat([prompt, response])[None]).last_hidden_state[0]
    everywhere = model.score(states).squeeze(-1)[len(prompt) - 1 :]
    return everywhere[:-1], everywhere[-1]


@pytest.mark.parametrize("chunks", [1, 4, 99])
def test_values_scores_and_gradients_equal_plain_forwards(chunks):
    model, batch = built(), rows()
    inputs = inputs_of(batch["prompts"], batch["responses"], 0, torch.device("cpu"))
    values, scores = ValueModel(model, chunks)(*inputs, temperature=0.3)
    weights = torch.linspace(-1, 1, len(values))
    ((values * weights).sum() + scores.square().sum()).backward()
    shared = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    found = [plain(model, *row) for row in zip(batch["prompts"].rows, batch["responses"].rows)]
    expected, ends = torch.cat([values for values, _ in found]), torch.stack([score for _, score in found])
    ((expected * weights).sum() + ends.square().sum()).backward()
    assert torch.allclose(values, expected, atol=1e-5)
    assert torch.allclose(scores, ends, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(shared[name], parameter.grad, atol=1e-4), name


def test_rows_packed_beforehand_give_the_same_values(monkeypatch):
    model = built()
    model.set_attn_implementation(attention.NAME)
    critic, inputs = ValueModel(model, 1), inputs_of(rows()["prompts"], rows()["responses"], 0, torch.device("cpu"))
    expected, packed = critic(*inputs), critic.pack(*inputs)
    monkeypatch.setattr(critic, "pack", None)
    for one, other in zip(expected, critic(*inputs, packed=packed)):
        assert torch.equal(one, other)


def test_a_score_is_what_the_classifier_itself_gives(mesh):
    model, batch = built(), rows()
    engine = FSDPEngine(copy.deepcopy(model), RoleRun(), mesh, 0, 1, trained=False, head="value")
    scores = engine.scores(batch["prompts"], batch["responses"])
    expected = [model(torch.cat(row)[None]).logits.item()
                for row in zip(batch["prompts"].rows, batch["responses"].rows)]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert scores.dtype == torch.float32


def test_a_new_head_is_zero_and_the_rest_is_the_models_own(model):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    valued = with_value_head(model)
    weights = dict(valued.named_parameters())
    assert torch.equal(weights.pop("score.weight"), torch.zeros(1, 64))
    assert weights.keys() == before.keys() - {"lm_head.weight"}
    for name, weight in weights.items():
        assert torch.equal(weight, before[name]), name
    assert valued.config.num_labels == 1


def test_a_head_of_several_numbers_is_refused(model):
    valued = with_value_head(model)
    valued.score = torch.nn.Linear(64, 2)
    with pytest.raises(EngineError, match="no linear head `score` of one number"):
        ValueModel(valued)


def squared(values, scores, micro):
    return (values - 0.5).square().sum() / 24 + (scores + 0.5).square().sum() / 8


@pytest.mark.parametrize("tokens", [1, 12, 30])
def test_micro_batches_change_nothing(mesh, tokens):
    whole, pieces = (FSDPEngine(built(), RoleRun(**SETTINGS, micro_batch_tokens=budget), mesh, 0, 10, trained=True,
                                head="value") for budget in (10_000, tokens))
    for step in range(STEPS):
        norms = [engine.update(rows(), squared, 1.0, step)["grad_norm"] for engine in (whole, pieces)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    found = [engine.values(rows()["prompts"], rows()["responses"]).values for engine in (whole, pieces)]
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 50, 10_000])
def test_rows_of_one_id_stay_in_one_micro_batch(mesh, tokens):
    engine = FSDPEngine(built(), RoleRun(**SETTINGS, micro_batch_tokens=tokens), mesh, 0, 10, True, head="value")
    seen = []

    def look(values, scores, micro):
        seen.append(micro.ids.tolist())
        return squared(values, scores, micro)

    engine.update(rows(), look, 1.0, 0, together=True)
    assert [each for ids in seen for each in ids] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(len(ids) % 2 == 0 for ids in seen)
    assert len(seen) == {1: 4, 50: 2, 10_000: 1}[tokens]


def training(small: int, cut: int) -> tuple[list[float], list[float], list[float]]:
    """Gradient norms of some steps, then values and scores; the first rank has the rows up to `cut`."""
    limit, fsdp._SMALL = fsdp._SMALL, small
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        engine = FSDPEngine(built(), RoleRun(**SETTINGS, micro_batch_tokens=20), mesh, 0, 10, True, head="value")
    finally:
        fsdp._SMALL = limit
    mine = rows().slice(0, cut) if dist.get_rank() == 0 else rows().slice(cut, 8)
    norms = [engine.update(mine, squared, 1.0, step)["grad_norm"] for step in range(STEPS)]
    return norms, engine.values(mine["prompts"], mine["responses"]).values.tolist(), engine.scores(
        mine["prompts"], mine["responses"]).tolist()


@pytest.mark.parametrize("small", [0, 64_000_000])
@pytest.mark.parametrize("cut", [5, 8])
def test_two_ranks_equal_one(small, cut):
    (norms, values, scores), = run_ranks(1, training, 64_000_000, 8)
    first, second = run_ranks(2, training, small, cut)
    assert first[0] == second[0] == pytest.approx(norms, rel=1e-4)
    assert first[1] + second[1] == pytest.approx(values, abs=1e-4)
    assert first[2] + second[2] == pytest.approx(scores, abs=1e-4)


def test_the_head_is_not_rounded_with_the_model(mesh):
    engine = FSDPEngine(built(), RoleRun(dtype="bfloat16"), mesh, 0, 1, trained=False, head="value")
    found = engine.values(rows()["prompts"], rows()["responses"]).values
    exact = FSDPEngine(built(), RoleRun(), mesh, 0, 1, trained=False, head="value")
    assert found.dtype == torch.float32
    assert (found != found.bfloat16().float()).any()
    assert torch.allclose(found, exact.values(rows()["prompts"], rows()["responses"]).values, atol=0.05)


def test_no_rows_are_no_values(mesh):
    engine = FSDPEngine(built(), RoleRun(), mesh, 0, 1, trained=False, head="value")
    empty = rows().slice(0, 0)
    assert len(engine.values(empty["prompts"], empty["responses"]).values) == 0
    assert engine.scores(empty["prompts"], empty["responses"]).shape == (0,)
