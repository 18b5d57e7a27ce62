"""Routing replay: the trainer computes with the experts that the rollout chose."""

from __future__ import annotations

import copy

import pytest
import torch
from columns import random_rows
from training import built

from distflow.config.dag import Role
from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.embedded import EMBEDDED_IMAGE_PROCESSOR
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout
from workers.engines.routing import Routing
from workers.engines.vision import attach_images

SETTINGS = {"generation": {"max_new_tokens": 24, "routing_replay": True}, "micro_batch_tokens": 200,
            "learning_rate": 1e-3}


def undecided(model):
    """The mixture with pairs of experts that only rounding tells apart: a router's rows are equal to 1e-7."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1::2] = weight[::2] * (1 + 1e-7 * torch.randn(weight[::2].shape, generator=draw))
    return model


def mixture(**sizes):
    model = built(architecture="qwen3_moe", mixture=(8, 3), **sizes)
    model.set_attn_implementation(attention.NAME)
    return model


def prompts() -> Ragged:
    return random_rows(3, 18, 5, 11, 26, 7)


def sampled(model, dtype=torch.float32, group=4):
    """Prompts, responses, log-probabilities and experts of answers that the model's rollout has sampled."""
    rollout = HFRollout(copy.deepcopy(model).to(dtype), Generation(**SETTINGS["generation"], batch_rows=9), 0, [1])
    samples = rollout.generate(prompts(), group, torch.arange(6 * group), 0)
    repeated = prompts().select(torch.arange(6).repeat_interleave(group))
    column = Routing.of(model).column(samples.experts, repeated.lengths, samples.tokens.lengths)
    return repeated, samples.tokens, samples.logprobs, column


def apart(engine, rows, experts) -> float:
    found = engine.logprobs(rows[0], rows[1], 1.0, routed_experts=experts)
    return float((found.values - rows[2].values).abs().max())


def test_replayed_experts_end_the_mismatch_of_two_engines(mesh):
    """Without, a token whose experts are all but equal goes to another one in the trainer."""
    model = undecided(mixture())
    rows = sampled(model)
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
    assert apart(engine, rows, rows[3]) < 2e-6 < 1e-2 < apart(engine, rows, None)  # 9.5e-7 and 0.15


def updated(mesh, model, rows, recompute: bool, replayed: bool) -> tuple[float, dict]:
    engine = FSDPEngine(copy.deepcopy(model), RoleRun(**SETTINGS, recompute=recompute), mesh, 0, 1,
                        Role(trained=True))
    columns = {"prompts": rows[0], "responses": rows[1], **({"routed_experts": rows[3]} if replayed else {})}
    batch = Batch(torch.arange(len(rows[0])), columns)
    norm = engine.update(batch, lambda logprobs, *_: -logprobs.sum() / 100, 1.0, 0)["grad_norm"]
    return norm, {name: weight.clone() for name, weight in engine.export()}


def test_gradients_are_those_of_the_replayed_experts_also_where_layers_are_computed_again(mesh):
    model = undecided(mixture())
    rows = sampled(model)
    kept, again, own = (updated(mesh, model, rows, recompute, replayed) for recompute, replayed in (
        (False, True), (True, True), (False, False)))
    assert again[0] == pytest.approx(kept[0], rel=1e-6)
    assert own[0] != pytest.approx(kept[0], rel=1e-4)
    for name, weight in kept[1].items():
        assert torch.allclose(weight, again[1][name], atol=1e-6), name


@pytest.mark.parametrize("keep_cache", [True, False])
def test_rows_of_several_turns_have_the_experts_of_all_their_tokens(mesh, keep_cache):
    model = undecided(mixture())
    rollout = HFRollout(copy.deepcopy(model), Generation(max_new_tokens=8, batch_rows=5, routing_replay=True), 0, [1])
    session = rollout.session(7, keep_cache=keep_cache)
    rows = rollout.rows(prompts(), 2, torch.arange(12))
    for start in range(0, 12, 2):
        session.add(rows[start : start + 2])
    said = {row.id: ([], []) for row in rows}  # tokens after the prompt, and what is compared
    while session.busy:
        for row in session.step():
            tokens, logprobs = said[row.id]
            tokens.append(row.tokens), logprobs.append(row.logprobs)
            if len(tokens) < 4:  # two turns, with an observation between
                tokens.append(torch.tensor([9, 10 + row.id, 11])), logprobs.append(torch.full((3,), torch.nan))
                session.extend(row, tokens[-1], 6)
                continue
            session.forget(row)
    responses = Ragged.from_rows([torch.cat(said[row.id][0]) for row in rows])
    logprobs = torch.cat([torch.cat(said[row.id][1]) for row in rows])
    repeated = prompts().select(torch.arange(6).repeat_interleave(2))
    column = Routing.of(model).column([row.experts for row in rows], repeated.lengths, responses.lengths)
    assert (column.values != Routing.of(model).unknown).all()
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
    found = engine.logprobs(repeated, responses, 1.0, routed_experts=column).values
    sampled_by_it = ~logprobs.isnan()
    assert float((found - logprobs)[sampled_by_it].abs().max()) < 2e-6


def test_tokens_without_recorded_experts_get_the_trainers_own(mesh):
    model = mixture()
    rows = sampled(model)
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
    unknown = Routing.of(model).column([None] * len(rows[0]), rows[0].lengths, rows[1].lengths)
    assert (unknown.values == 255).all()
    found, own = (engine.logprobs(rows[0], rows[1], 1.0, routed_experts=each).values for each in (unknown, None))
    assert torch.equal(found, own)


def test_choices_of_another_model_are_refused(mesh):
    model = mixture()
    rows = sampled(model)
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
    with pytest.raises(EngineError, match="they are of other rows, or of another model"):
        engine.logprobs(rows[0], rows[1], 1.0, routed_experts=rows[3].with_values(rows[3].values[:, :, :2]))


def test_what_is_no_mixture_or_not_packed_is_refused(mesh):
    with pytest.raises(EngineError, match="wants a mixture of experts"):
        FSDPEngine(built(), RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
    sees = attach_images(built(architecture="qwen3_moe", mixture=(4, 2)), EMBEDDED_IMAGE_PROCESSOR)
    with pytest.raises(EngineError, match="wants rows that are packed"):
        FSDPEngine(sees, RoleRun(**SETTINGS), mesh, 0, 1, Role(trained=True))
