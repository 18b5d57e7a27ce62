"""A value head reads one number per token, wherever rows, ranks and micro-batches are cut."""

from __future__ import annotations

import pytest
import torch
from columns import random_rows
from engines.families import build
from transformers import OPTConfig, OPTForCausalLM

from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from workers.engines.embedded import build_model
from workers.engines.fsdp import FSDPEngine
from workers.engines.policy import inputs_of
from workers.engines.value import ValueModel, with_value_head


def built(layers: int = 2):
    """A value model whose head is not zero, so that what lies before it is seen."""
    model = with_value_head(build_model(270, 0, layers=layers, hidden=64, heads=2, kv_heads=1, head_dim=32))
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    return model


def rows() -> Batch:
    """Eight rows of three prompts, one without tokens."""
    prompts = random_rows(6, 3, 8).select(torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]))
    return Batch(torch.arange(8), {"prompts": prompts, "responses": random_rows(4, 0, 2, 5, 3, 1, 7, 2, seed=1)})


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


@pytest.mark.parametrize("padding", [None, 0, 7])
def test_a_score_is_read_where_the_models_own_class_reads_it(padding):
    """Before an end token that pads, too, as in many reward models made of Llama 3 (transformers#35352)."""
    model, prompts = built(), random_rows(6, 3)
    model.config.pad_token_id = padding
    responses = Ragged.from_rows([torch.tensor(row) for row in ([9, 7], [9, 7, 7], [7, 9, 8], [8], [9, 7, 8, 7])])
    inputs = inputs_of(prompts.select(torch.tensor([0, 0, 0, 1, 1])), responses, 0, torch.device("cpu"))
    values, scores = ValueModel(model)(*inputs)
    whole = [torch.cat([prompts.rows[index // 3], row])[None] for index, row in enumerate(responses.rows)]
    assert torch.allclose(scores, torch.cat([model(row).logits for row in whole])[:, 0], atol=1e-5)
    assert len(values) == len(responses.values)


def test_a_new_head_is_zero_and_the_rest_is_the_models_own(model):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    valued = with_value_head(model)
    weights = dict(valued.named_parameters())
    assert torch.equal(weights.pop("score.weight"), torch.zeros(1, 64))
    assert weights.keys() == before.keys() - {"lm_head.weight"}
    for name, weight in weights.items():
        assert torch.equal(weight, before[name]), name
    assert valued.config.num_labels == 1


def test_a_new_head_is_as_wide_as_what_it_reads():
    """As of opt-350m, whose last states are projected to the width of its embeddings (DeepSpeedExamples#512)."""
    config = OPTConfig(vocab_size=270, hidden_size=64, ffn_dim=96, num_hidden_layers=1, num_attention_heads=2,
                       word_embed_proj_dim=32, do_layer_norm_before=False, max_position_embeddings=64)
    model, batch = with_value_head(OPTForCausalLM(config).eval()), rows()
    torch.nn.init.normal_(model.score.weight)
    inputs = inputs_of(batch["prompts"], batch["responses"], 0, torch.device("cpu"))
    found = [plain(model, *row) for row in zip(batch["prompts"].rows, batch["responses"].rows)]
    assert torch.allclose(ValueModel(model)(*inputs)[1], torch.stack([score for _, score in found]), atol=1e-5)


def test_a_family_whose_classifiers_have_another_head_is_refused():
    with pytest.raises(EngineError, match="CTRLForSequenceClassification has no linear head `score` of one number"):
        with_value_head(build("ctrl"))


def test_the_head_is_not_rounded_with_the_model(mesh):
    engine = FSDPEngine(built(), RoleRun(dtype="bfloat16"), mesh, 0, 1, Role(head="value"))
    found = engine.values(rows()["prompts"], rows()["responses"]).values
    exact = FSDPEngine(built(), RoleRun(), mesh, 0, 1, Role(head="value"))
    assert found.dtype == torch.float32
    assert (found != found.bfloat16().float()).any()
    assert torch.allclose(found, exact.values(rows()["prompts"], rows()["responses"]).values, atol=0.05)
