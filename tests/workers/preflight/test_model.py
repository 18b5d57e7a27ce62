"""Faults that are put into engines are found before the first step, or after the first update; right engines pass."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engines.families import VOCABULARY, build, tiny
from ranks import run_ranks
from training import role_of, role_spec
from transformers import MistralConfig

from distflow.config.run import Data, Lora, RoleRun
from distflow.data.batch import Batch
from distflow.errors import EngineError, InvalidInput
from workers.engines import attention
from workers.engines.embedded import build_tokenizer
from workers.engines.packing import Packing
from workers.preflight.model import ModelProofs, ProofRows, loaded_numbers
from workers.preflight.proofs import Preflight

pytestmark = pytest.mark.usefixtures("alone")
MODELS = ("llama", "qwen2", "tied", "gemma2", "gpt_oss", "granite_swa", "mistral", "granite", "qwen3_moe", "glm4_moe")


def tied():
    model = build("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def started(name="llama", lora=None, dtype=torch.float32):
    """A role's engines on all ranks, and the proofs that a run begins with."""
    model = (tied() if name == "tied" else build(name)).to(dtype)
    tokenizer = build_tokenizer(["one two"])
    settings = RoleRun(lora=lora, learning_rate=1e-2, generation={"max_new_tokens": 12})
    proofs = ModelProofs(role_spec(settings), resumed=False)
    proofs.look("actor", model, tokenizer)
    return role_of(model, tokenizer, settings), proofs


def update(role):
    samples = role.generate(ROWS.prompts.select(torch.tensor([0])), torch.arange(2), repeats=2)
    rows = ROWS.prompts.select(torch.tensor([0, 0]))
    role.update(Batch(torch.arange(2), {"prompts": rows, "responses": samples.tokens}),
                lambda logprobs, *_: -logprobs.sum())


ROWS = ProofRows.of(SimpleNamespace(run=SimpleNamespace(data=Data(train="", max_prompt_tokens=32))),
                    tiny("llama"), build_tokenizer(["one two"]), 12)


@pytest.mark.parametrize("name", MODELS)
def test_right_engines_pass_at_the_start_and_after_an_update(name):
    role, proofs = started(name)
    account = Preflight()
    proofs.at_start({"actor": role}, account)
    assert account.proved == {"models": 3}
    assert not account.mistakes
    update(role)
    proofs.after_update({"actor": role})


def drop_sinks_and_soft_caps(patch):
    patch.setattr(attention, "KNOWN", attention.KNOWN | {"s_aux", "softcap"})
    patch.setattr("workers.engines.capabilities._eager_reads", lambda _: frozenset())


def scale_wrongly(patch):
    attend = Packing.attend
    patch.setattr(Packing, "attend", lambda self, *parts: attend(self, *parts[:3], parts[3] * 1.1))


def show_another_prompt(patch):
    made = Packing.__init__
    patch.setattr(Packing, "__init__", lambda self, prompts, prompt_of, *more: made(
        self, prompts, [0] * len(prompt_of), *more))


def shift_positions(patch):
    positions = Packing.positions
    patch.setattr(Packing, "positions", lambda self: positions(self) + (
        torch.arange(len(positions(self))) >= sum(map(len, self.prompts))))


@pytest.mark.parametrize(("name", "fault", "says"), [
    ("gemma2", drop_sinks_and_soft_caps, "its attention or its head differs"),
    ("granite_swa", drop_sinks_and_soft_caps, "attention"), ("llama", scale_wrongly, "attention"),
    ("llama", show_another_prompt, "packing"), ("llama", shift_positions, "attention")])
def test_faults_of_the_code_are_found(monkeypatch, name, fault, says):
    fault(monkeypatch)
    monkeypatch.setattr("workers.engines.policy._PADDING", 0)  # as on a GPU, where all rows are packed
    role, proofs = started(name)
    with pytest.raises(InvalidInput, match=f"`engine: fsdp`: it computes other log-probabilities.*{says}"):
        proofs.at_start({"actor": role}, Preflight())


def weight(role, name):
    return dict(role.engine.policy.model.named_parameters())[name].to_local()


def rotary(role):
    return role.engine.policy.model.base_model.rotary_emb


FAULTS = {
    "a zeroed buffer": ("glm4_moe", lambda role: [each.zero_() for name, each in role.engine.policy.named_buffers()
                                                  if "e_score_correction_bias" in name]),
    "another rope base": ("llama", lambda role: rotary(role).inv_freq.pow_(1.1)),
    "rope in half precision": ("llama", lambda role: rotary(role).inv_freq.copy_(rotary(role).inv_freq.bfloat16())),
    "an untied head": ("tied", lambda role: role.engine.policy.model.set_output_embeddings(
        torch.nn.Linear(64, VOCABULARY, bias=False))),
    "a missing bias": ("qwen2", lambda role: weight(role, "model.layers.1.self_attn.q_proj.bias").data.zero_()),
    "logits without their scale": ("granite", lambda role: setattr(role.engine.policy, "head_alone", True)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_what_was_loaded_are_found(fault):
    name, plant = FAULTS[fault]
    role, proofs = started(name)
    with torch.no_grad():
        plant(role)
    with pytest.raises(InvalidInput, match=r"than the model( that transformers loads|'s own code)"):
        proofs.at_start({"actor": role}, Preflight())


def test_a_model_whose_numbers_are_not_finite_is_named_with_its_weight():
    role, proofs = started()
    weight(role, "model.layers.1.mlp.up_proj.weight").data[3, 5] = torch.inf
    with pytest.raises(InvalidInput, match="numbers that are not finite: `model.layers.1.mlp.up_proj.weight` has"):
        proofs.at_start({"actor": role}, Preflight())


def load_half(role):
    load = role.rollout.load
    role.rollout.load = lambda weights, version: load(
        ((name, whole) for name, whole in weights if "lora_B" not in name), version)


def test_an_old_policy_that_samples_on_is_found_after_the_first_update():
    role, proofs = started()
    proofs.at_start({"actor": role}, Preflight())
    update(role)
    role.rollout.version = role.version
    with pytest.raises(InvalidInput, match="`rollout: hf`: it computes .* after the first update"):
        proofs.after_update({"actor": role})


def test_adapters_of_which_half_are_loaded_sample_nothing():
    role, _ = started(lora=Lora(rank=4))
    update(role)
    load_half(role)
    with pytest.raises(EngineError, match=r"role `actor`.* does not hold version 1 .*lora_B.* differs"):
        role.generate(ROWS.prompts, torch.arange(3))


def test_a_model_of_half_precision_is_computed_as_it_was_loaded_too():
    """Most folders hold bfloat16; a buffer that is lost on the way into the engine shows there as well."""
    role, proofs = started("glm4_moe", dtype=torch.bfloat16)
    assert proofs.loaded["actor"].dtype == torch.float32
    FAULTS["a zeroed buffer"][1](role)
    with pytest.raises(InvalidInput, match="than the model that transformers loads"):
        proofs.at_start({"actor": role}, Preflight())


@pytest.mark.parametrize("name", ["tied", "qwen2", "qwen3_moe"])
def test_a_large_model_is_computed_one_layer_at_a_time_as_a_small_one_is_at_once(monkeypatch, name):
    model = tied() if name == "tied" else build(name)
    model.to(torch.bfloat16)
    expected, before = loaded_numbers(model, ROWS), {name: each.data_ptr() for name, each in model.named_parameters()}
    monkeypatch.setattr("workers.preflight.model._LOADED", 0)
    assert loaded_numbers(model, ROWS) is None
    assert torch.equal(loaded_numbers(model, ROWS, "cpu"), expected)
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before
    assert model.dtype == torch.bfloat16


def test_a_rollout_with_other_weights_is_found_at_the_start():
    role, proofs = started()
    role.rollout.weight_buffers()["model.norm.weight"].mul_(1.5)
    with pytest.raises(InvalidInput, match="at its start that the engine which trains does not have"):
        proofs.at_start({"actor": role}, Preflight())


def test_the_long_row_passes_what_the_configuration_names_as_far_as_the_run_goes():
    spec = SimpleNamespace(run=SimpleNamespace(data=Data(train="", max_prompt_tokens=64, max_target_tokens=8)))
    for window, expected in ((16, 24), (40, 48), (4096, 24)):
        config = MistralConfig(sliding_window=window)
        rows = ProofRows.of(spec, config, build_tokenizer(["one two"]), 16)
        assert (rows.prompts.lengths + rows.responses.lengths).tolist() == [10, 5, expected]
        assert torch.equal(rows.prompts.rows[0], rows.prompts.rows[1])


def stale_on_one() -> str:
    role, proofs = started()
    proofs.at_start({"actor": role}, Preflight())
    update(role)
    role.generate(ROWS.prompts, torch.arange(3))  # with the new weights
    if dist.get_rank() == 1:
        role.rollout.weight_buffers()["model.norm.weight"].mul_(1.0001)
    try:
        proofs.after_update({"actor": role})
    except InvalidInput as error:
        return str(error)
    return ""


def test_a_fault_on_one_rank_is_told_by_the_rank_that_writes():
    told, others = run_ranks(2, stale_on_one)
    assert "another weight after the first update than the engine which trains, on another rank" in told
    assert others == ""
