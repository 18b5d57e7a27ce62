"""Sizes of models from their configurations, and which models are refused before anything is loaded."""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from harness import model_folder
from safetensors.torch import save_file

from distflow.config import sizes
from distflow.config.families import why_contradictory
from distflow.config.load import load_for_planning
from distflow.config.sizes import Shape, shape_of
from distflow.errors import InvalidInput
from planners import plan

HERE = Path(__file__).parent / "configurations"
PUBLIC = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}
"""Configurations of published models, with the parameters that their makers state (`stated`, `active`)."""
PLAIN = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which sizes are kept, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes._answer.cache_clear()
    return tmp_path / "cache" / "distflow" / "sizes"


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_arithmetic_counts_what_the_model_has(kind, tied):
    """All that the model itself says: parameters, head, experts, and FLOPs and caches of rows."""
    from transformers import CONFIG_MAPPING

    from workers.engines.description import shapes_of

    given = {**PLAIN, "tie_word_embeddings": tied, "sliding_window": None, **(MIXTURE if kind == "qwen3_moe" else {})}
    if tied and kind in ("llama", "mistral"):
        del given["head_dim"]
    config = CONFIG_MAPPING[kind](**given)
    *_, built = shapes_of(config)
    said = {name: value for name, value in config.to_dict().items() if value is not None or name == "sliding_window"}
    assert sizes._is_plain(said)
    counted = shape_of(said)
    assert counted is not None
    for name in ("parameters", "layers", "kv_width", "query_width", "vocabulary", "hidden", "positions", "heads",
                 "vocabulary_head", "kv_heads", "experts", "experts_per_token", "expert_parameters", "widening",
                 "head_norms", "attending", "state", "cached", "active_parameters", "learned_positions", "own_length"):
        assert getattr(counted, name) == getattr(built, name), name
    assert counted.forward_flops(10, 20, 300) == built.forward_flops(10, 20, 300)


@pytest.mark.parametrize("name", PUBLIC)
def test_published_models_have_the_parameters_that_are_stated(name):
    """By what builds them: the process that does is proved below."""
    from transformers import CONFIG_MAPPING

    from workers.engines.description import shapes_of

    said = PUBLIC[name]
    settings = {key: value for key, value in said["config"].items() if key != "model_type"}
    shape = shape_of(said["config"]) if sizes._is_plain(said["config"]) else None
    if shape is None:
        *_, shape = shapes_of(CONFIG_MAPPING[said["config"]["model_type"]](**settings))
    assert shape.parameters == pytest.approx(said["stated"], rel=0.01)
    assert shape.active_parameters == pytest.approx(said["active"], rel=said.get("within", 0.03))
    assert shape.cached == said["cached"]


def test_another_process_describes_a_model_once(cache, describing, monkeypatch):
    """Its answer is kept; a broken answer is asked again, and one that cannot be kept is no error."""
    config = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 77}
    first = shape_of(config)
    assert first is not None
    assert (first.layers, first.hidden, first.vocabulary, first.learned_positions) == (2, 64, 320, 77)
    assert first.parameters == 320 * 64 + 77 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert first.linears["transformer.h.0.attn.c_attn"] == 64 + 3 * 64  # which transformers has as Conv1D
    kept, = cache.glob("*.json")
    began = time.perf_counter()
    sizes._answer.cache_clear()
    assert shape_of({**config, "transformers_version": "4.0"}) == first
    assert time.perf_counter() - began < 1
    asked = []
    monkeypatch.setattr(sizes, "_ask", lambda *_: (0, asked.append(1) or first))
    sizes._answer.cache_clear()
    kept.write_text("{")
    assert shape_of(config) == first
    assert sizes.from_json(kept.read_text()) == first
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    sizes._answer.cache_clear()
    assert shape_of(config) == first
    assert len(asked) == 2


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "bamba", "hidden_size": "wide"}, "hidden_size"),
    ({"model_type": "trocr", "is_encoder_decoder": True}, "an encoder reads its prompts (is_encoder_decoder)")])
def test_what_transformers_or_engines_refuse_is_refused(cache, config, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        shape_of(config)


def write(folder: Path, config: dict | str) -> Path:
    model_folder(folder, {})
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "t5"}, "holds no causal language model: `t5` is an encoder and a decoder"),
    ({"model_type": "bart", "is_encoder_decoder": False}, "`bart` is an encoder and a decoder"),
    ({"model_type": "bert"}, "`bert` is an encoder, whose tokens see those after them (is_decoder: false)"),
    ({"model_type": "vit"}, "transformers has no causal language model of `model_type: vit`"),
    ({"model_type": "unheard-of"}, "does not know its `model_type: unheard-of`"),
    ({"hidden_size": 64}, "it has no `model_type`, by which transformers finds the class of a model"),
    ("[1]", "is not the configuration of a language model: it holds [1], not settings by their names"),
    ("[" * 100_000, "is not the configuration of a language model: it is nested too deeply"),
    ({**PLAIN, "model_type": "llama", "hidden_size": "wide"}, "a value has the wrong type"),
    ({"model_type": "llama", "hidden_size": 64}, "it has no 'num_hidden_layers'"),
    ({**PLAIN, "model_type": "llama", "rope_scaling": {"type": "unheard-of", "factor": 2.0}}, "KeyError: 'unheard-of'"),
    ({**PLAIN, "model_type": "llama", "rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}},
     "says two things: `rope_theta` is 1000000.0 and, in `rope_parameters`, 500000.0"),
    ({"model_type": "gemma3", "text_config": {**PLAIN, "rope_scaling": {"factor": 4.0}}},
     "`rope_scaling` has `factor: 4.0` without a kind of scaling"),
    ({**PLAIN, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0},
      "rope_parameters": {"rope_type": "default"}}, "`rope_scaling` and `rope_parameters` name different kinds"),
    ({**PLAIN, "model_type": "olmo3", "rope_theta": 1e6}, "transformers takes 500000 in layers with a window"),
    ({**PLAIN, "model_type": "llama", "pad_token_id": 320}, "Padding_idx must be within num_embeddings")])
def test_what_is_no_causal_language_model_is_refused_with_its_line(tmp_path, config, says):
    spec = load_for_planning("grpo", None, [f"roles.actor.model={write(tmp_path / 'model', config)}"])
    mistake, = (mistake for mistake in spec.mistakes if "role `actor`" in mistake.what)
    assert says in mistake.what
    assert not mistake.of_machine


@pytest.mark.parametrize("config", [
    {"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2]}, "rope_parameters": {"rope_theta": 1e4}},
    {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2]}, "rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": {"type": "su"}, "rope_parameters": {"rope_type": "longrope"}},
    {"rope_theta": 1e6, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
    {"model_type": "olmo3", "rope_theta": 500000}, {"model_type": "olmo3", "rope_theta": None},
    {"model_type": "olmo3", "rope_theta": 1e6, "layer_types": ["full_attention"] * 2}])
def test_a_configuration_that_says_one_thing_of_rotary_embeddings_is_taken(config):
    assert why_contradictory(config) == ("", "")


def test_quantized_weights_are_refused_before_they_are_loaded(tmp_path):
    config = {**PLAIN, "model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert "has quantized weights (quant_method: awq), and training needs them whole" in refused_on_this_machine(
        write(tmp_path / "quantized", config))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_narrow_weights_are_refused_also_where_no_quantization_is_named(tmp_path, dtype):
    folder = write(tmp_path / "model", {**PLAIN, "model_type": "llama"})
    for narrow, says in (("up_proj.weight", True), ("attn.bias", False)):
        save_file({"norm.weight": torch.ones(4), narrow: torch.ones(4).to(dtype)}, folder / "model.safetensors")
        assert (f"has quantized weights ({narrow}: " in refused_on_this_machine(folder)) == says


def test_an_adapter_beside_a_model_is_refused_as_transformers_would_load_both(tmp_path):
    folder = write(tmp_path / "model", {**PLAIN, "model_type": "llama"})
    (folder / "adapter_config.json").write_text('{"base_model_na')  # cut by a download
    for whole, says in ((True, "has an adapter beside a model, which may have it in its weights already"),
                        (False, "has an adapter, and not the model that it belongs to")):
        save_file({}, folder / "model.safetensors") if whole else (folder / "model.safetensors").unlink()
        assert says in load_for_planning("sft", None, [f"roles.actor.model={folder}"]).mistakes[0].what


@pytest.mark.parametrize(("adapter", "says"), [
    ({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}, "python -c \"import peft; m = peft.AutoPeftModelForCausalLM."),
    ({"base_model_name_or_path": ".", "task_type": "SEQ_CLS"}, "peft.AutoPeftModelForSequenceClassification."),
    ({"base_model_name_or_path": "unsloth/Qwen3-0.6B-bnb-4bit"}, "It names the model `unsloth/Qwen3-0.6B-bnb-4bit`, "
     "which is quantized. Write the whole one's"),  # peft#2586, peft#2105: rounding would undo what it has learned
    ({"base_model_name_or_path": "/root/models/mine"}, "It names the model `/root/models/mine`, which is not here. ")])
def test_an_adapter_gets_the_line_that_makes_it_a_model(tmp_path, adapter, says):
    """The line failed for reward models, and for adapters whose model has moved."""
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    hint = load_for_planning("sft", None, [f"roles.actor.model={tmp_path}"]).mistakes[0].hint
    assert says in hint
    assert hint.startswith("It names the model") == says.startswith("It names the model")


@pytest.mark.parametrize(("given", "there", "says"), [
    (".", "model", "Instead:  {}/model"), ("checkpoints/step-4", "model-actor", "Instead:  {}/model-actor"),
    ("best", "best/model", "Instead:  {}/best/model"),
    ("checkpoints/step-4", "", "A checkpoint is no model. This writes one:  distflow export {}")])
def test_a_run_that_is_given_as_a_model_gets_the_folder_of_its_model(tmp_path, given, there, says):
    run = tmp_path / "run"
    (run / "checkpoints/step-4").mkdir(parents=True)
    write(run / "model-actor", {**PLAIN, "model_type": "llama"}) if there == "best/model" else None
    (run / "plan.json").write_text("{}")
    if there:
        write(run / there, {**PLAIN, "model_type": "llama"})
    hint = load_for_planning("sft", None, [f"roles.actor.model={run / given}"]).mistakes[0].hint
    assert hint == says.format(run)


def refused_on_this_machine(folder: Path) -> str:
    mistakes = load_for_planning("sft", None, [f"roles.actor.model={folder}"]).mistakes
    return "\n".join(mistake.what for mistake in mistakes if mistake.of_machine)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
INDEX = json.dumps({"weight_map": {"a": "part-1.KIND", "b": "part-2.KIND"}})
TORCH = "pytorch_model.bin"


@pytest.mark.parametrize(("file", "content", "says"), [
    ("model.safetensors.index.json", INDEX.replace("KIND", "safetensors"), "and it lacks: part-1.safetensors, part-2"),
    ("pytorch_model.bin.index.json", INDEX.replace("KIND", "bin"), "its index names, and it lacks: part-1.bin, part-2"),
    ("pytorch_model.bin.index.json", INDEX[:30], "its index of weights is cut or damaged"),
    ("model-1-of-2.safetensors", "", "by a name that is loaded (model.safetensors or pytorch_model.bin, or an index of "
     "parts). It has: model-1-of-2.safetensors"),
    ("model.safetensors", "", "model.safetensors is empty"), (TORCH, "", "pytorch_model.bin is empty"),
    ("model.safetensors", POINTER, "model.safetensors is a pointer of Git LFS, not the file"),
    (TORCH, POINTER, "pytorch_model.bin is a pointer of Git LFS"),
    ("model.safetensors", 20, "model.safetensors is cut off within its header"),
    ("model.safetensors", -1, "model.safetensors is cut off: it has "), (TORCH, -30, "pytorch_model.bin is cut off"),
    ("tokenizer.json", POINTER, "tokenizer.json is a pointer of Git LFS"),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0, "b"', "tokenizer.json is cut off"),
    ("tokenizer.json", "", "tokenizer.json is empty"),
    ("generation_config.json", '{"eos_token_id": [1,', "generation_config.json is cut off"),
    ("tokenizer_config.json", '{"eos_token":', "tokenizer_config.json is cut off"),
    ("tokenizer.json", None, ""), ("model.safetensors", None, ""), (TORCH, None, "")])
def test_half_a_download_is_refused_before_weights_are_loaded(tmp_path, file, content, says):
    """A number is where a whole file of weights is cut."""
    folder = write(tmp_path / "model", {**PLAIN, "model_type": "llama"})
    if file not in ("model.safetensors", "tokenizer.json") and not file.startswith(("generation", "tokenizer")):
        (folder / "model.safetensors").unlink()
    tensors = {"model.norm.weight": torch.ones(64)}
    save_file(tensors, folder / file) if file == "model.safetensors" else None
    torch.save(tensors, folder / file) if file == TORCH else None
    if content is not None:
        whole = (folder / file).read_bytes() if isinstance(content, int) else b""
        (folder / file).write_bytes(whole[:content] if isinstance(content, int) else
                                    content if isinstance(content, bytes) else content.encode())
    said = refused_on_this_machine(folder)
    assert says in said
    assert bool(said) == bool(says)


def test_of_two_files_the_one_that_is_loaded_must_be_whole(tmp_path):
    """As transformers chooses: a file before its index, what the configuration names before both, the fast tokenizer
    before another."""
    folder = write(tmp_path / "model", {**PLAIN, "model_type": "llama"})
    file, tensors = folder / "model.safetensors", {"model.norm.weight": torch.ones(64)}
    save_file(tensors, file)
    (folder / "model.safetensors.index.json").write_text(INDEX.replace("KIND", "safetensors"))
    (folder / "tokenizer.model").write_bytes(POINTER)
    assert refused_on_this_machine(folder) == ""
    for number in (1, 2):
        save_file(tensors, folder / f"part-{number}.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "model.safetensors is cut off: it has " in refused_on_this_machine(folder)
    file.write_bytes(whole)
    config = {**PLAIN, "model_type": "llama", "transformers_weights": "other.safetensors.index.json"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "other.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "lost.safetensors"}}))
    assert "its index names, and it lacks: lost.safetensors" in refused_on_this_machine(folder)


def test_an_encoder_as_reward_model_is_refused_with_the_way_that_takes_it(tmp_path):
    folder = write(tmp_path / "encoder", {"model_type": "roberta"})
    hints = [mistake.hint for mistake in load_for_planning("ppo", None, [f"roles.critic.model={folder}"]).mistakes]
    assert any("see examples/encoder_reward" in hint for hint in hints)


def test_a_value_head_is_refused_where_transformers_has_no_classifier(tmp_path):
    folders = [write(tmp_path / kind, {**PLAIN, "model_type": kind}) for kind in ("llama", "bloom", "mamba")]
    for folder, refused in zip(folders, (False, False, True)):
        for role in ("critic", "actor"):  # whose model the critic takes where it has none
            mistakes = load_for_planning("ppo", None, [f"roles.{role}.model={folder}"]).mistakes
            said = [mistake for mistake in mistakes if "no sequence classifier of `model_type: mamba`" in mistake.what]
            assert bool(said) == refused


def planned(folder: Path, dag: str, *overrides: str):
    """Plan with a model whose tokenizer is not looked at."""
    spec = load_for_planning(dag, None, [f"roles.actor.model={folder}", "validation=null", *overrides])
    return plan(spec, 1)


@pytest.fixture
def described(tmp_path, monkeypatch):
    """`described(config)`: a folder whose sizes are described by this process, which has loaded torch."""
    from transformers import CONFIG_MAPPING

    from workers.engines.description import shapes_of

    def shape(said: str):
        config = json.loads(said)
        _, earned = islice(shapes_of(CONFIG_MAPPING[config.pop("model_type")](**config)), 2)
        return 0, earned

    sizes._answer.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sizes, "_ask", shape)
    return lambda config: write(tmp_path / "model", config)


LEARNED = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 100}
DYNAMIC = {**PLAIN, "model_type": "llama", "max_position_embeddings": 100,
           "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
LONGROPE = {**{key: value for key, value in PLAIN.items() if key != "head_dim"}, "model_type": "phi3",
            "max_position_embeddings": 400, "pad_token_id": 0, "original_max_position_embeddings": 100,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
                                "long_factor": [4.0] * 8}}
OPT = {"model_type": "opt", "vocab_size": 320, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
       "num_attention_heads": 4, "max_position_embeddings": 100, "word_embed_proj_dim": 64}
LIMITS = "data.max_prompt_tokens=60", "roles.actor.generation.max_new_tokens=41", "data.max_target_tokens=41"


@pytest.mark.parametrize(("config", "dag", "says"), [
    (LEARNED, "grpo", "has learned 100 positions"), (LEARNED, "sft", "has learned 100 positions"),
    (OPT, "sft", "has learned 100 positions"),
    (DYNAMIC, "grpo", "beyond 100 tokens the rotary frequencies"), (DYNAMIC, "sft", ""),
    (LONGROPE, "grpo", "beyond 100 tokens the rotary frequencies"), (LONGROPE, "dpo", "")])
def test_rows_longer_than_positions_allow_are_refused(described, config, dag, says):
    folder = described(config)
    if says:
        with pytest.raises(InvalidInput) as caught:
            planned(folder, dag, *LIMITS)
        mistake = next(mistake for mistake in caught.value.mistakes if "role `actor`" in mistake.what)
        key = "roles.actor.generation.max_new_tokens" if dag == "grpo" else "data.max_target_tokens"
        assert says in mistake.what
        assert mistake.hint == f"Lower their sum by 1:  --set data.max_prompt_tokens=59  or  --set {key}=40"
    else:
        assert planned(folder, dag, *LIMITS).ranks == 1
    assert planned(folder, dag, *LIMITS, "data.max_prompt_tokens=59").ranks == 1


def test_unknown_sizes_are_told_and_planned(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(sizes, "_ask", lambda *_: (-1, None))
    sizes._answer.cache_clear()
    folder = write(tmp_path / "model", LEARNED)
    made = planned(folder, "sft")
    assert any("the sizes of its model" in note and "are not known" in note for note in made.notes)
    assert not made.memory
    monkeypatch.setattr(sizes, "_ask", lambda *_: (0, Shape(1000, 1, 8, 320, 64, plain="mixes tokens by recurrence")))
    sizes._answer.cache_clear()
    assert any(note.endswith("its model mixes tokens by recurrence") for note in planned(folder, "sft").notes)
