"""The load-balancing loss that a configuration asks for is transformers' own, over whole rows."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from columns import uneven_rows
from engines.families import build
from ranks import run_ranks
from reported import reported
from training import Learner, built, layered, loss_of, named_mesh, share_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from distflow.config.dag import Role
from distflow.config.run import Generation, RoleRun
from distflow.data.batch import Batch
from distflow.telemetry.metrics import Metrics, recording
from distflow.weights.reshard import gather_tensors
from workers.engines import attention
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout
from workers.engines.routing import Routing, without_router_logits
from workers.functions.updates import policy_update

COEFFICIENT = 2.0


def mixture():
    model = built(architecture="qwen3_moe", mixture=(4, 2))
    model.config.output_router_logits, model.router_aux_loss_coef = True, COEFFICIENT
    model.set_attn_implementation(attention.NAME)
    without_router_logits(model)
    return model


def engine_of(mesh, small: int, model=None, **settings) -> FSDPEngine:
    with layered(small):
        return FSDPEngine(model or mixture(), RoleRun(**{"micro_batch_tokens": 10_000, **settings}), mesh, 0, 10,
                          Role(trained=True))


def balanced(layout, small, settings) -> tuple[float, dict[str, numpy.ndarray]]:
    """This share's mean of the loss, and the gradient of all shares."""
    mesh, metrics = named_mesh(**layout), Metrics()
    engine = engine_of(mesh, small, **settings)
    with recording(metrics):
        engine.accumulate(share_of(mesh), loss_of, 1.0)
    found = gather_tensors({name: shard.grad for name, shard in engine.shards().items()})
    gradients = {name: tensor.clone().numpy() for name, tensor in found}
    return reported(metrics)["router/aux_loss"], gradients


def plain(cuts) -> tuple[list[float], dict[str, numpy.ndarray]]:
    """Load-balancing losses of the rows between `cuts`, each read alone, and the gradient with their mean by tokens."""
    model, rows = built(architecture="qwen3_moe", mixture=(4, 2)), uneven_rows()
    total = float((rows["prompts"].lengths + rows["responses"].lengths).sum())
    losses, whole = [], torch.zeros(())
    for start, stop in zip(cuts, cuts[1:]):
        logits, count = [], 0
        for prompt, response in zip(rows["prompts"].rows[start:stop], rows["responses"].rows[start:stop]):
            tokens = torch.cat([prompt, response])
            output = model.model(tokens[None], use_cache=False, output_router_logits=True)
            scores = model.lm_head(output.last_hidden_state)[0, len(prompt) - 1 : -1].log_softmax(-1)
            whole = whole - scores.gather(1, response[:, None]).sum() / 22
            logits.append(output.router_logits)
            count += len(tokens)
        losses.append(load_balancing_loss_func(tuple(map(torch.cat, zip(*logits))), 4, 2))
        whole = whole + COEFFICIENT * losses[-1] * count / total
    whole.backward()
    return [loss.item() for loss in losses], {name: weight.grad.numpy() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(("layout", "small", "settings", "cuts"), [
    ({}, 0, {}, [0, 7]), ({"cp": 2}, 0, {}, [0, 7]),
    ({"dp": 2}, 0, {"recompute": True}, [0, 5, 7]), ({"tp": 2}, 0, {}, [0, 7])], ids=str)
def test_gradients_have_the_load_balancing_loss(layout, small, settings, cuts):
    ranks = layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)
    losses, expected = plain(cuts)
    results = run_ranks(ranks, balanced, layout, small, settings)
    assert [loss for loss, _ in results[:: ranks // len(losses)]] == pytest.approx(losses, rel=1e-5)
    for name, gradient in results[0][1].items():
        assert numpy.allclose(gradient, expected[name], atol=1e-5), name


def test_padded_rows_have_the_loss_of_whole_rows(mesh):
    _, expected = plain([0, 7])
    engine = engine_of(mesh, 64_000_000)
    engine.policy.packs = False
    engine.accumulate(uneven_rows(), loss_of, 1.0)
    for name, shard in engine.shards().items():
        assert numpy.allclose(shard.grad.full_tensor().numpy(), expected[name], atol=1e-5), name


def test_micro_batches_weigh_as_much_as_they_have_tokens(mesh):
    losses, expected = plain([0, 3, 6, 7])
    batch, found = uneven_rows(), Metrics()
    with recording(found):
        engine = engine_of(mesh, 0, micro_batch_tokens=25)
        assert [len(micro) for micro in engine._micro_batches(batch)] == [3, 3, 1]
        engine.accumulate(batch, loss_of, 1.0)
    weights = [24, 23, 15]
    mean = sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)
    assert reported(found)["router/aux_loss"] == pytest.approx(mean, rel=1e-5)
    for name, shard in engine.shards().items():
        assert numpy.allclose(shard.grad.full_tensor().numpy(), expected[name], atol=1e-5), name


def test_rows_without_an_advantage_have_the_load_balancing_loss(mesh):
    """As TRL has it (trl#6083); the update leaves out rows that have no other gradient."""
    (loss,), _ = plain([0, 7])
    role, rows, metrics = Learner(model=mixture()), uneven_rows(), Metrics()
    logprobs = rows["responses"].with_values(torch.zeros(len(rows["responses"].values)))
    with recording(metrics):
        policy_update(role, rows["prompts"], rows["responses"], logprobs, torch.zeros(7), torch.arange(7))
    assert reported(metrics)["router/aux_loss"] == pytest.approx(loss, rel=1e-5)


def test_replayed_rows_have_the_loss_of_whole_rows(mesh):
    """Of the last token no choice is known: the router chooses."""
    generation = {"max_new_tokens": 6, "routing_replay": True}
    rollout, rows = HFRollout(copy.deepcopy(mixture()), Generation(**generation), 0, [1]), uneven_rows()
    prompts = rows["prompts"].select(torch.tensor([0, 3, 5]))
    samples = rollout.generate(prompts, 2, torch.arange(6), 0)
    repeated = prompts.select(torch.arange(3).repeat_interleave(2))
    column = Routing.of(rollout.model).column(samples.experts, repeated.lengths, samples.tokens.lengths)
    columns = {"prompts": repeated, "responses": samples.tokens}
    norms = []
    for more, settings in (({}, {}), ({"routed_experts": column}, {"generation": generation})):
        engine = engine_of(mesh, 0, **settings)
        norms.append(engine.update(Batch(torch.arange(6), {**columns, **more}), loss_of, 1.0, 0)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def granite():
    """A mixture whose head is not a plain matrix, so that all of the model computes."""
    model = build("granitemoe")
    model.config.output_router_logits, model.router_aux_loss_coef = True, COEFFICIENT
    model.set_attn_implementation(attention.NAME)
    without_router_logits(model)
    return model


def test_models_that_would_compute_the_loss_themselves_sample_and_train(mesh):
    model, rows = granite(), uneven_rows()
    samples = HFRollout(copy.deepcopy(model), Generation(max_new_tokens=4), 0, [1]).generate(
        rows["prompts"], 1, torch.arange(7), 0)
    engine = engine_of(mesh, 0, model)
    found = engine.logprobs(rows["prompts"], samples.tokens, 1.0)
    assert torch.allclose(found.values, samples.logprobs.values, atol=1e-5)
    metrics = Metrics()
    with recording(metrics):
        engine.update(rows, loss_of, 1.0, 0)
    assert reported(metrics)["router/aux_loss"] > 1.9


def test_a_loss_that_cannot_be_had_is_named(mesh, capsys):
    model = build("deepseek_v3")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.01
    FSDPEngine(model, RoleRun(), mesh, 0, 10, Role(trained=True))
    shown = capsys.readouterr().out
    assert "(output_router_logits, router_aux_loss_coef: 0.01), which is not computed: transformers has none" in shown
