"""What models earn: the engines' own attention, rows that are packed, a head that is applied alone."""

import pytest
import torch
from engines.families import build
from torch.distributed.device_mesh import init_device_mesh
from training import row_logprobs
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.attention import NAME, attend
from workers.engines.capabilities import Capabilities, head_is_alone, prepare
from workers.engines.description import shapes_of
from workers.engines.fsdp import FSDPEngine

pytestmark = pytest.mark.usefixtures("alone")
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16}
VARYING = {"llama": {"max_position_embeddings": 16, "rope_parameters": ROPE | {"rope_type": "dynamic"}},
           "phi3": {"max_position_embeddings": 128, "original_max_position_embeddings": 16,
                    "rope_parameters": ROPE | LONG}}


@pytest.mark.parametrize(("family", "plain", "packs"), [
    ("llama", "", True), ("gemma2", "", False), ("gpt_oss", "", False), ("nemotron", "", False), ("minicpm3", "", True),
    ("qwen3_next", "GatedDeltaNet", False), ("falcon_h1", "one attention", False), ("bloom", "BloomAttention", False),
    ("llama4_text", "chunked_attention", False)])
def test_capabilities_say_why_a_model_computes_by_its_own_code_and_whether_rows_are_packed(family, plain, packs):
    earned = Capabilities.of(build(family))
    assert plain in earned.plain
    assert bool(plain) == bool(earned.plain)
    assert earned.packs == packs


@pytest.mark.parametrize("kind", ["blip", "blip-2", "instructblip", "kosmos-2"])
def test_a_model_that_reads_more_than_tokens_is_refused_at_planning(kind):
    with pytest.raises(EngineError, match=r"reads `(pixel_values|qformer_input_ids)` besides tokens in each row"):
        next(shapes_of(CONFIG_MAPPING[kind]()))


@pytest.mark.parametrize(("kind", "why"), [("moshi", "its cache keeps those of a window"),
                                           ("kosmos-2.5", "counts positions from the padding token's number on")])
def test_a_model_that_computes_otherwise_with_a_cache_is_refused_at_planning(kind, why):
    with pytest.raises(EngineError, match=why):
        list(shapes_of(CONFIG_MAPPING[kind]()))


def varying(kind):
    """A model with weights so large that other frequencies show."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES, **VARYING[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1 and "norm" in name))
    return model.float().eval()


@pytest.mark.parametrize("kind", VARYING)
def test_rows_have_rotary_frequencies_of_their_own_length(kind):
    model = varying(kind)
    prompts, responses = (Ragged.from_rows([torch.randint(5, 320, (length,)) for length in lengths])
                          for lengths in ((3, 12, 9), (5, 30, 12)))
    truth = torch.cat([row_logprobs(varying(kind), *row) for row in zip(prompts.rows, responses.rows)])
    prepare(model)
    engine = FSDPEngine(model, RoleRun(dtype="float32"), init_device_mesh("cpu", (1,)), 0, 10, Role(trained=True))
    assert Capabilities.of(model).own_length == 16
    for order in ([0, 1, 2], [2, 1, 0], [1, 0]):  # whatever was computed before
        chosen = torch.tensor(order)
        found = engine.logprobs(prompts.select(chosen), responses.select(chosen), 1.0)
        assert torch.allclose(found.values, responses.with_values(truth).select(chosen).values, atol=2e-5)


def test_attention_refuses_what_it_does_not_know(model):
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(EngineError, match="`sinks`"):
        attend(model, query, query, query, None, sinks=torch.zeros(1))
    attend(model, query, query, query, None, sinks=None)


def test_steps_of_attention_are_ours_where_all_that_is_handed_on_is_known(model):
    assert prepare(model).attention == NAME == model.config._attn_implementation
    odd = build("gemma2")
    odd.config.attn_logit_softcapping = None
    for layer in odd.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert prepare(odd).attention == NAME  # no soft cap, nothing strange


@pytest.mark.parametrize(("family", "settings", "plain"), [
    ("llama", {}, True), ("gemma3_text", {}, True), ("gemma3_text", {"final_logit_softcapping": 30.0}, False),
    ("granite", {"logits_scaling": 4.0}, False)])
def test_a_head_is_applied_alone_where_nothing_else_is_done_to_logits(family, settings, plain):
    model = build(family)
    model.config.update(settings)
    assert head_is_alone(model) == plain
