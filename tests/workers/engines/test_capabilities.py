"""What models earn, and that whatever they earn they compute what transformers' own code does."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from workers.engines.attention import NAME, attend
from workers.engines.capabilities import Capabilities, head_is_alone, prepare
from workers.engines.fsdp import FSDPEngine

pytestmark = pytest.mark.usefixtures("alone")
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD = SIZES | {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 16}
FAMILIES = {  # settings, the reason for the plain way, and whether rows are packed
    "llama": (HEAD, "", True),
    "gemma2": (HEAD | {"query_pre_attn_scalar": 16}, "", False),
    "gpt_oss": (HEAD | EXPERTS | {"rope_scaling": None}, "", False),
    "nemotron": (HEAD, "", False),
    "minicpm3": (SIZES | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                          "qk_rope_head_dim": 8, "v_head_dim": 16}, "", True),
    "qwen3_5_text": (HEAD | LINEAR, "GatedDeltaNet", False),
    "falcon_h1": (HEAD | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                          "mamba_d_state": 16, "mamba_chunk_size": 8}, "one attention", False),
    "bloom": ({"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "BloomAttention", False),
    "llama4_text": (HEAD | EXPERTS | {"num_experts_per_tok": 1, "attention_chunk_size": 8, "no_rope_layers": [1, 0],
                                      "intermediate_size_mlp": 96}, "chunked_attention", False),
}
VARYING = {"llama": (HEAD | {"max_position_embeddings": 16, "rope_parameters": ROPE | {"rope_type": "dynamic"}}),
           "phi3": (SIZES | {"original_max_position_embeddings": 16, "rope_parameters": ROPE | LONG})}


def built(kind, settings):
    """A model with weights so large that what is left out of its attention shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings), attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1 and "norm" in name))
    return model.eval()


def columns(lengths):
    return Ragged.from_rows([torch.randint(5, 320, (length,)) for length in lengths])


def engine_of(model):
    prepare(model)
    return FSDPEngine(model, RoleRun(dtype="float32"), init_device_mesh("cpu", (1,)), 0, 10, True)


def alone(model, prompts, responses):
    """The log-probabilities of each row by itself: no cache, no padding."""
    logits = (model(torch.cat(row)[None], use_cache=False).logits[0, len(row[0]) - 1 : -1] for row in zip(
        prompts.rows, responses.rows))
    return torch.cat([each.log_softmax(-1).gather(1, row[:, None])[:, 0] for each, row in zip(logits, responses.rows)])


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_trained_with_the_numbers_of_their_own_code(kind):
    settings, plain, packs = FAMILIES[kind]
    model = built(kind, settings)
    earned = Capabilities.of(model)
    assert plain in earned.plain
    assert bool(plain) == bool(earned.plain)
    assert earned.packs == packs
    prompts, responses = columns((3, 12, 5)).select(torch.tensor([0, 0, 1, 2])), columns((9, 2, 20, 1))
    weights = torch.linspace(-1, 1, len(responses.values))
    truth = alone(model, prompts, responses)
    (truth * weights).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    engine = engine_of(model)
    assert torch.allclose(engine.logprobs(prompts, responses, 1.0).values, truth, atol=2e-5)
    batch = Batch(torch.arange(4), {"prompts": prompts, "responses": responses})
    engine.accumulate(batch, lambda logprobs, *_: (logprobs * weights[: len(logprobs)]).sum(), 1.0)
    for name, shard in engine.shards().items():
        assert torch.allclose(shard.grad.full_tensor(), gradients[name], atol=1e-4 * gradients[name].abs().max() + 1e-5)


@pytest.mark.parametrize("kind", VARYING)
def test_rows_have_rotary_frequencies_of_their_own_length(kind):
    model = built(kind, VARYING[kind])
    prompts, responses = columns((3, 12, 9)), columns((5, 30, 12))  # 8, 42 and 21 tokens
    truth = torch.cat([alone(built(kind, VARYING[kind]), prompts.select(row), responses.select(row))
                       for row in torch.arange(3).split(1)])
    engine = engine_of(model)
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
    odd = built("gemma2", FAMILIES["gemma2"][0] | {"attn_logit_softcapping": None})
    assert prepare(odd).attention == NAME  # no soft cap, nothing strange


@pytest.mark.parametrize(("kind", "settings", "plain"), [
    ("llama", {}, True), ("gemma3_text", {"query_pre_attn_scalar": 16}, True),
    ("gemma3_text", {"query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0}, False),
    ("granite", {"logits_scaling": 4.0}, False)])
def test_a_head_is_applied_alone_where_nothing_else_is_done_to_logits(kind, settings, plain):
    assert head_is_alone(built(kind, HEAD | settings)) == plain
