"""Every causal family that transformers registers is computed as by its own forward pass, or refused.

Ten unlike ones are computed here; DISTFLOW_FAMILIES=all takes all of them, and DISTFLOW_FAMILIES="opt mpt" these.
Where vLLM is installed it needs to be set, since the other environment runs the same code.
"""

import copy
import importlib.util
import json
import os

import pytest
import torch
from engines import families, family_checks
from harness import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText

from distflow.errors import DistflowError
from workers.engines.capabilities import bound_time_steps
from workers.engines.rounding import LOOSE_SHARE
from workers.engines.sglang.engine import name_layers_as_files_do

SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
RECORDED = json.loads(generate.FAMILIES.read_text())["families"]
UNLIKE = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "lfm2", "gpt2", "bloom", "llama4")
ASKED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma2",
         "gemma3_text", "gemma4_text", "phi3", "gpt_oss", "glm", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3",
         "olmo2", "olmo3", "olmoe", "granite", "granitemoehybrid", "lfm2", "falcon_h1", "nemotron_h", "smollm3",
         "minimax_m2", "kimi_linear", "gpt2", "opt"}
"""Families of which the table says, in any case, what vLLM does."""
WANTED = os.environ.get("DISTFLOW_FAMILIES", "")
CHOSEN = families.FAMILIES if WANTED == "all" else WANTED.split() or UNLIKE
elsewhere = pytest.mark.skipif(not WANTED and importlib.util.find_spec("vllm") is not None,
                               reason="`make test` has it; DISTFLOW_FAMILIES chooses families here")


@elsewhere
@pytest.mark.parametrize("family", CHOSEN)
@pytest.mark.filterwarnings("ignore")
def test_a_family_is_what_the_table_says(family, tmp_path):
    recorded = RECORDED[family]
    if "built" in recorded:
        pytest.skip(recorded["built"])
    family_checks.write(tmp_path, family)
    found = {}
    for name, check in family_checks.CHECKS.items():
        try:
            found[name] = check(tmp_path)
        except DistflowError as error:
            found[name] = {"refused": str(error)}
    verdicts = [{name: generate.judged(each, name) for name in found} for each in (found, recorded)]
    assert verdicts[0] == verdicts[1], found


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("family", ["mixtral", "gemma2", "glm", "deepseek_v2", "lfm2"])
def test_a_family_is_sampled_by_vllm_as_it_is_trained(family, tmp_path):
    """Renamed experts; tied embeddings without a head; a class of transformers, which vLLM changes; latent
    attention; queries that are rotated with an axis of heads."""
    family_checks.write(tmp_path, family, 2)
    found = family_checks.sampled(tmp_path, "vllm")
    assert max(found.values()) < LOOSE_SHARE


def test_the_table_says_what_vllm_does():
    assert {name for name, found in RECORDED.items() if "vllm" in found} >= ASKED


def test_sglang_is_given_kinds_of_layers_by_the_names_in_files(tmp_path):
    written = families.tiny("nemotron_h")
    written.save_pretrained(tmp_path)
    name_layers_as_files_do(tmp_path / "config.json")
    named = json.loads((tmp_path / "config.json").read_text())["layers_block_type"]
    assert {*named} <= {"mamba", "attention", "mlp", "moe"}
    assert AutoConfig.from_pretrained(tmp_path).layer_types == written.layer_types


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_engine_samples_wrongly_unless_a_start_refuses_it(engine):
    verdicts = {name: generate.judged(found, engine) for name, found in RECORDED.items() if engine in found}
    assert "right" in verdicts.values()
    assert {"wrong", "fails"}.isdisjoint(verdicts.values())


def test_the_families_computed_in_each_test_run_are_right():
    assert {family: generate.verdict(RECORDED[family]) for family in UNLIKE} == dict.fromkeys(UNLIKE, "right")


def test_the_table_has_every_family_and_none_that_is_wrong():
    assert (*RECORDED,) == families.FAMILIES, "measure the new ones:  python -m benchmarks.families"
    verdicts = {name: generate.verdict(found) for name, found in RECORDED.items()}
    assert {"wrong", "fails"}.isdisjoint(verdicts.values())


def test_nine_of_ten_language_models_train_and_sample():
    language = [found for found in RECORDED.values() if found["kind"] == "language model"]
    assert sum(generate.verdict(found) == "right" for found in language) >= 0.9 * len(language)


def test_every_right_family_passes_the_proofs_of_a_start():
    right = [name for name, found in RECORDED.items() if found["kind"] == "language model" and
             generate.verdict(found) == "right"]
    assert [name for name in right if RECORDED[name].get("proved") != {}] == []
    assert len(right) >= 40


def test_the_page_is_made_from_the_results():
    assert generate.MODELS.read_text() == generate.models_page(), "docs/models.md is stale. Make it again:  make docs"


@elsewhere
@pytest.mark.parametrize("kind", ["qwen2_vl", "mistral3"])
def test_a_model_that_sees_computes_rows_of_text_alone_as_its_own_code_does(kind, tmp_path, monkeypatch):
    for module in (families, family_checks):
        monkeypatch.setattr(module, "AutoModelForCausalLM", AutoModelForImageTextToText)
    family_checks.write(tmp_path, kind)
    found = family_checks.trained(tmp_path) | family_checks.sampled(tmp_path)
    assert found.pop("way") == "own"
    assert max(found.values()) < 1e-5, found


def test_time_steps_of_one_token_are_bounded_as_those_of_many():
    """transformers bounds them in the scan of a row alone; copies, as rollouts make them, do so with their own bias."""
    model = families.build("nemotron_h")
    bound_time_steps(model)
    row = family_checks.rows()[0].rows[3][None]
    for each in (model, copy.deepcopy(model)):
        with torch.no_grad():
            for mixer in each.model.layers:
                getattr(mixer.mixer, "dt_bias", torch.zeros(())).sub_(1.0)
            kept = each(row[:, :20], use_cache=True).past_key_values
            steps = [each(row[:, [place]], past_key_values=kept, use_cache=True).logits for place in range(20, 30)]
            whole = each(row, use_cache=False).logits[:, 20:30]
            torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=0)
