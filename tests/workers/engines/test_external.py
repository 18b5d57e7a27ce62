"""Weights of engines that another library runs: what no trainer sends reaches them too."""

import base64
import pickle

import pytest
import torch
from engines.families import build
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from distflow.config.run import Lora
from distflow.errors import EngineError
from workers.engines.adapters import attach
from workers.engines.embedded import build_model
from workers.engines.external import FileNames, constant_tensors
from workers.engines.sglang.weights import Buckets

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2,
         "num_experts_per_tok": 1, "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8}


@pytest.mark.parametrize(("family", "name"), [
    ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
    ("ernie4_5_moe", "model.layers.0.mlp.moe_statics.e_score_correction_bias")])
def test_constant_tensors_are_biases_of_routers_by_their_names_in_files(family, name):
    more = {"moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_layer_interval": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, **more))
    for inner, tensor in model.state_dict().items():
        if "e_score" in inner:
            tensor.copy_(torch.tensor([1.5, -2.5]).view_as(tensor))
    found = constant_tensors(model)
    assert {each: tensor.flatten().tolist() for each, tensor in found.items()} == {name: [1.5, -2.5]}
    bucket, = Buckets(found.items(), {each: tensor.shape for each, tensor in found.items()}, torch.float32, "cpu")
    (sent, tensor), = pickle.loads(base64.b64decode(bucket))
    assert (sent, tensor.flatten().tolist()) == (name, [1.5, -2.5])


def test_constant_tensors_are_none_of_a_plain_or_an_adapted_model():
    model = build_model(270, 0, layers=1, hidden=32, heads=1, kv_heads=1)
    assert constant_tensors(model) == {}
    attach(model, Lora(rank=1), 0)
    assert constant_tensors(model) == {}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "minimax_m2", "hrm_text", "gpt_oss"])
def test_file_names_gives_the_tensors_that_transformers_saves(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path)
    buffer = torch.empty(max(parameter.numel() for parameter in model.parameters()))

    def arriving():
        for name, parameter in model.named_parameters():
            yield name, buffer[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())

    found = {name: tensor.clone() for name, tensor in FileNames(model).stream(arriving())} | constant_tensors(model)
    saved = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())


def test_file_names_refuses_a_part_of_what_files_have_as_one():
    model = build("hrm_text")
    weights = [(name, parameter) for name, parameter in model.named_parameters() if ".q_proj." not in name]
    with pytest.raises(EngineError, match="k_proj.*came without.*Load them together"):
        dict(FileNames(model).stream(weights))
