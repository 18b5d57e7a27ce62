"""Sampling by a model's own cache: each row gets what the model's own forward pass gives it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.embedded import build_tokenizer
from workers.engines.hf import HFRollout
from workers.engines.plain_session import PlainSession, keeps_rows
from workers.engines.rollout import StopStrings

VOCABULARY = 270
ENDS = [2, *range(3, VOCABULARY, 9)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
          "num_key_value_heads": 4, "head_dim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**SIZES, **EXPERTS, "sliding_window": 4, "rope_scaling": None},
    "gemma2": {**SIZES, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma3_text": {**SIZES, "query_pre_attn_scalar": 8, "sliding_window": 4,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {**SIZES, "sliding_window": 4},
    "llama4_text": {**SIZES, **EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
                    "attention_chunk_size": 4, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48},
    "deepseek_v3": {**SIZES, **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
                    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**SIZES, **LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**SIZES, **LINEAR},
    "lfm2": {**{name: size for name, size in SIZES.items() if name != "head_dim"},
             "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {**SIZES, **MAMBA, "mamba_d_ssm": 64},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8,
               "n_groups": 1, "chunk_size": 4},
    "granitemoehybrid": {**SIZES, **MAMBA, **EXPERTS, "shared_intermediate_size": 16,
                         "layer_types": ["mamba", "attention"]},
    "minimax": {**SIZES, **EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "nemotron_h": {**SIZES, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
                   "chunk_size": 4, "time_step_min": 0.1, "layers_block_type": ["mamba", "attention"]},
    "recurrent_gemma": {**SIZES, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32},
}


def tiny(family: str, attends: str = "eager") -> PreTrainedModel:
    """Build a model whose attention is peaked, so that what is left out of it shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **FAMILIES[family]),
        attn_implementation=attends).float().eval()
    for name, parameter in model.named_parameters():
        parameter.data += torch.randn(parameter.shape) * (0.1 if "norm" in name else 0.2)
    return model


def engine(model: PreTrainedModel, plain: str = "is to be sampled so", **generation: Any) -> HFRollout:
    made = HFRollout(model, Generation(**{"max_new_tokens": 9, "batch_rows": 7, **generation}), 0, ENDS)
    made.plain = made.plain or plain
    return made


@pytest.fixture
def prompts() -> Ragged:
    generator = torch.Generator().manual_seed(5)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in (6, 2, 11, 6, 1)])


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of an answer by one forward pass of its row."""
    logits = model(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, answer[:, None]).squeeze(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_gets_what_the_models_own_forward_pass_gives_it_alone(family, prompts):
    model = tiny(family)
    samples = engine(model).generate(prompts, 3, torch.arange(15), key=4)
    for index, (answer, logprobs) in enumerate(zip(samples.tokens.rows, samples.logprobs.rows)):
        assert torch.allclose(logprobs, alone(model, prompts.rows[index // 3], answer), rtol=0, atol=1e-5)
    assert 0 < samples.finished.sum() < 15


@pytest.mark.parametrize(("family", "kept"), [("nemotron_h", False), ("recurrent_gemma", False), ("qwen3_next", True),
                                              ("minimax", True), ("llama4_text", True), ("mamba2", True)])
def test_what_a_model_keeps_is_relied_on_if_it_continues_rows_rightly(family, kept):
    """A step of Nemotron-H leaves out a bound on its time step; RecurrentGemma's state lies in its modules."""
    assert keeps_rows(tiny(family)) == kept


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "bloom", "llama4_text"])
def test_models_whose_layers_are_not_keys_and_values_alone_are_sampled_so(family):
    assert isinstance(engine(tiny(family), "").session(1), PlainSession)


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
@pytest.mark.parametrize("limits", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.6, "min_p": 0.01}])
def test_slots_and_cohorts_draw_the_same(family, limits, prompts):
    slots = engine(tiny(family, attention.NAME), "", **limits)
    assert not isinstance(slots.session(1), PlainSession)
    cohorts = engine(tiny(family), **limits)
    own, plain = (made.generate(prompts, 3, torch.arange(15), key=4) for made in (slots, cohorts))
    assert own.tokens.values.tolist() == plain.tokens.values.tolist()
    assert torch.allclose(own.logprobs.values, plain.logprobs.values, rtol=0, atol=1e-5)
    assert torch.equal(own.finished, plain.finished)


@pytest.mark.parametrize("family", ["qwen3_5_text", "recurrent_gemma"])
def test_turns_aborts_versions_and_stop_strings(family, prompts):
    """Two rows are stopped halfway and continue, and another has a second turn: all draw what they would have drawn."""
    model, tokenizer = tiny(family), build_tokenizer(["one two"], vocab_size=VOCABULARY)
    made = engine(model)
    made.end_tokens = torch.tensor([-1])
    whole = made.generate(prompts.select(torch.tensor([0, 0, 2])), 1, torch.arange(3), key=4).tokens.rows
    made.stop = StopStrings(tokenizer, [tokenizer.decode(whole[2][:5])])
    session, (first, second, third) = made.session(4), made.rows(prompts.select(torch.tensor([0, 0, 2])), 1,
                                                                 torch.arange(3))
    session.add([first, second])
    session.add([third])
    made.version = 3
    assert not any(session.step() for _ in range(3))
    made.version = 4
    assert session.abort([second]) == [second]
    begun = second.tokens
    session.extend(second, begun[:0], 6)
    ended = [row for _ in range(9) for row in session.step()]
    assert ended == [third, first, second]
    assert not session.busy
    assert third.finished
    assert third.tokens.tolist() == whole[2][:5].tolist()
    assert third.versions.tolist() == [3, 3, 3, 4, 4]
    assert first.tokens.tolist() == whole[0].tolist()
    assert [*begun, *second.tokens] == whole[1].tolist()
    session.extend(third, torch.tensor([9, 8, 7]), 4)
    assert [session.step() for _ in range(4)] == [[], [], [], [third]]
    assert torch.allclose(third.logprobs, alone(model, third.sequence, third.tokens), rtol=0, atol=1e-5)


def test_a_prompt_is_read_once_and_rows_that_wait_begin_when_there_is_room(prompts):
    model, read = tiny("mistral"), []
    made = engine(model, max_new_tokens=2, batch_rows=6)
    made.end_tokens, session = torch.tensor([-1]), made.session(1)  # which has tried what the model keeps
    model.register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape)))
    rows = made.rows(prompts.slice(0, 4), 3, torch.arange(12))
    for start in range(0, 12, 3):
        session.add(rows[start : start + 3])
    while session.busy:
        session.step()
    assert read == [(2, 6), (6, 1), (1, 2), (1, 11), (3, 1), (3, 1)]


def test_what_cannot_be_recorded_or_shown_is_refused(prompts):
    with pytest.raises(EngineError, match=r"routing_replay.*Qwen3Next.*Take it out"):
        HFRollout(tiny("qwen3_next"), Generation(routing_replay=True), 0, ENDS)
    session = engine(tiny("bloom")).session(1)
    rows = session.engine.rows(prompts.slice(0, 1), 1, torch.arange(1))
    rows[0].images = Ragged.from_rows([torch.zeros(1)])
    session.add(rows)
    with pytest.raises(EngineError, match="images"):
        session.step()
