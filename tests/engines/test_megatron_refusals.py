"""What the Megatron engine cannot do is said before anything is built, with what to write instead."""

import pytest

pytest.importorskip("megatron.core")

from engines import megatron_ranks as ranks
from transformers import LlamaConfig, Qwen3MoeConfig

from distflow.config.run import Lora
from distflow.errors import EngineError
from distflow.plan import Layout
from workers.engines.megatron import engine
from workers.engines.megatron.layout import check
from workers.engines.megatron.weights import entries

SIZES = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 6,
         "intermediate_size": 48}


@pytest.mark.parametrize(("layout", "said"), [
    (Layout(1, tp=8), "tp: 8 does not divide the model's 12 attention heads and 4 key-value heads. tp may be 1, 2, 4"),
    (Layout(1, pp=4), "pp: 4 does not divide the model's 6 layers. pp may be 1, 2, 3, 6"),
    (Layout(2, ep=2), "has none. Remove ep"),
])
def test_a_layout_that_does_not_divide_the_model(layout, said):
    with pytest.raises(EngineError, match=said):
        check(layout, LlamaConfig(**SIZES))


@pytest.mark.parametrize(("layout", "said"), [
    (Layout(3, ep=3), "ep: 3 does not divide the model's 8 experts. ep may be 1"),
    (Layout(1, ep=2), "ep: 2 does not divide the model's 1 ranks of dp × cp × tp. ep may be 1"),
])
def test_a_layout_that_does_not_divide_the_experts(layout, said):
    with pytest.raises(EngineError, match=said):
        check(layout, Qwen3MoeConfig(**SIZES, num_experts=8))


def test_a_layout_that_fits_is_not_refused():
    check(Layout(2, pp=3, tp=4), LlamaConfig(**SIZES))
    check(Layout(2, cp=2, ep=4), Qwen3MoeConfig(**SIZES, num_experts=8))
    check(Layout(2, tp=2, ep=4), Qwen3MoeConfig(**SIZES, num_experts=8))


def test_parameters_that_have_no_place():
    model = ranks.tiny("llama")
    names = {**model.state_dict(), "model.layers.0.mlp.up_proj.bias": None}
    with pytest.raises(EngineError, match=r"model\.layers\.0\.mlp\.up_proj\.bias\. Train this model with"):
        entries(model.config, names, Layout(1))


@pytest.mark.parametrize(("given", "said"), [({"head": "value"}, "no  head: value"),
                                             ({"settings": ranks.settings(lora=Lora())}, "no adapters")])
def test_heads_and_adapters(given, said):
    with pytest.raises(EngineError, match=said):
        engine._refuse(**{"settings": ranks.settings(), "head": "lm", **given})
