"""Saved models: every tensor of the source folder is trained, or as it was; and what is read back is checked."""

import json
import re

import pytest
import torch
from engines.families import tiny
from safetensors.torch import load_file, save_file
from training import role_of, role_spec
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from distflow.config.run import Lora, Model, RoleRun
from workers.engines import saved_model
from workers.engines.embedded import build_tokenizer
from workers.engines.loading import load_model
from workers.engines.saved_model import ModelDamaged, ModelFiles, ModelWriter

SIZES = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
FAMILIES = ("llama", "tied", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "mixtral", "qwen3_moe")


def source_of(family, folder, extra=None, sharded=False, pickled=False, kind=AutoModelForCausalLM, config=None):
    """Write the folder of a random model, whose buffers are random too; `extra`: tensors that nothing loads."""
    config = config or tiny("llama" if family == "tied" else family)
    config.tie_word_embeddings |= family == "tied"
    torch.manual_seed(3)
    model = kind.from_config(config)
    with torch.no_grad():
        for place, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in place or tensor.ndim < 2 and place in model.state_dict():
                tensor.copy_(torch.randn(tensor.shape) * 0.3 + 1)
    model.bfloat16().save_pretrained(folder, **({"max_shard_size": "20KB"} if sharded else {}))
    if extra or pickled:
        tensors = load_file(folder / "model.safetensors") | (extra or {})
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin") if pickled else \
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(["one two"], vocab_size=261).save_pretrained(folder)
    return folder


def role_from(source, head="lm", **settings):
    settings = RoleRun(learning_rate=1e-2, **settings)
    loaded = load_model(role_spec(settings, source), Model(path=str(source)), head)
    return role_of(*loaded, settings, source, head, samples=False)


def train(role):
    """Change all weights that are trained, as an optimizer would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for shard in role.engine.shards().values():
            if shard.requires_grad:
                local = shard.to_local()
                local.add_(torch.randn(local.shape, generator=generator) * 0.02)


def compare(source, saved, trained=lambda name: True):
    """Require the tensors of both folders to be the same but for those that are trained; return how many are not."""
    before, after = ModelFiles(source), ModelFiles(saved)
    assert before.keys() == after.keys()
    same = 0
    for name in before:
        assert before[name].shape == after[name].shape
        if trained(name):
            assert not torch.equal(before[name].float(), after[name].float()), name
            assert after[name].dtype == torch.float32
        else:
            assert before[name].dtype == after[name].dtype
            assert torch.equal(before[name], after[name]), name
            same += 1
    return same


def saved_by(source, **settings):
    """Save what a role has trained beside its folder; return the new one."""
    role = role_from(source, **settings)
    train(role)
    role.save_pretrained(source.parent / "model")
    return source.parent / "model"


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_keeps_what_is_not_trained(alone, tmp_path, family):
    source = source_of(family, tmp_path / "source")
    saved = saved_by(source)
    biases = compare(source, saved, lambda name: "e_score_correction_bias" not in name)
    assert bool(biases) == (family in FAMILIES[2:6])
    config = json.loads((saved / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == json.loads((source / "config.json").read_text())["architectures"]


OLDER = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16",
         "transformers_version": "4.45.0", "own_key": {"a": 1}, "auto_map": {"AutoConfig": "code_own.OwnConfig"}}


@pytest.mark.parametrize(("left_out", "named", "changed"), [
    ({"rope_parameters", "dtype"}, OLDER, {"torch_dtype": "float32"}),
    ({"dtype"}, {"torch_dtype": "float32"}, {}), ({"dtype"}, {}, {"dtype": "float32"}),
    ({"rope_parameters"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"dtype": "float32"}),
    (set(), {"tie_word_embeddings": True}, {"tie_word_embeddings": False, "dtype": "float32"})])
def test_save_pretrained_writes_the_settings_of_its_source(alone, tmp_path, left_out, named, changed):
    """vllm#42624, MarinFold#184, ms-swift#8352: version 4 of transformers and others read `rope_theta: 10000` of what
    version 5 writes, without a word."""
    source = source_of("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in left_out} | named
    (source / "config.json").write_text(json.dumps(config))
    written = json.loads((saved_by(source) / "config.json").read_text())
    config.pop("auto_map", None)  # the code that it names is not there
    assert written == config | changed


ADAPTED, KEPT = {"lora": Lora(rank=2, targets=["q_proj"])}, {"freeze": ["model.layers.0.*", "embed_tokens.weight"]}


@pytest.mark.parametrize(("family", "settings", "trained"), [
    *((family, ADAPTED, lambda name: "q_proj.weight" in name) for family in ("llama", "tied", "glm4_moe")),
    *((family, KEPT, lambda name: not re.search("layers.0.|embed", name)) for family in ("qwen3_moe", "tied"))])
def test_save_pretrained_keeps_what_is_frozen_or_has_no_adapter(alone, tmp_path, family, settings, trained):
    source = source_of(family, tmp_path / "source")
    assert compare(source, saved_by(source, **settings), trained) > 8


@pytest.mark.parametrize("form", [{"sharded": True}, {"pickled": True}])
def test_save_pretrained_reads_sharded_and_pickled_sources(alone, tmp_path, form):
    source = source_of("glm4_moe", tmp_path / "source", **form)
    assert compare(source, saved_by(source), lambda name: "e_score_correction_bias" not in name) == 1


def test_save_pretrained_copies_layers_that_transformers_does_not_load(alone, tmp_path, monkeypatch):
    extra = {f"model.layers.61.{name}": torch.randn(4, 4).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}
    source = source_of("deepseek_v3", tmp_path / "source", extra)
    monkeypatch.setattr(saved_model, "_SHARD_BYTES", 60_000)
    assert compare(source, saved_by(source), lambda name: "layers.61" not in name and "e_score" not in name) == 3
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    again = role_from(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")
    compare(tmp_path / "model", tmp_path / "again", lambda name: False)


def test_save_pretrained_copies_experts_of_layers_that_the_configuration_leaves_out(alone, tmp_path):
    """Transformers names such experts as if it had stacked them."""
    source = source_of("glm4_moe", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert compare(source, saved_by(source), lambda name: "layers.1." not in name) > 12


@pytest.mark.parametrize(("family", "target", "changed", "more"), [
    ("tied", "lm_head", 1, {"lm_head.weight"}), ("tied", "embed_tokens", 2, {"lm_head.weight"}),
    ("mixtral", "all-linear", 34, set())])
def test_save_pretrained_merges_adapters_of_tied_heads_and_of_experts(alone, tmp_path, family, target, changed, more):
    """The check compares the log-probabilities of the merged folder with those of the adapted engine."""
    source = source_of(family, tmp_path / "source")
    saved_by(source, lora=Lora(rank=2, targets=[target]))
    before, after = ModelFiles(source), ModelFiles(tmp_path / "model")
    assert after.keys() - before.keys() == more
    new = [name for name in after if name not in before or not torch.equal(before[name].float(), after[name].float())]
    assert len(new) == changed


@pytest.mark.parametrize(("names", "written"), [
    (["lm_head.weight", "model.embed_tokens.weight"], ["model.embed_tokens.weight"]),
    (["lm_head.weight"], ["lm_head.weight"])])
def test_save_pretrained_writes_tied_tensors_once(alone, tmp_path, names, written):
    source = source_of("tied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {name: embedding.clone() for name in names}, source / "model.safetensors",
              metadata={"format": "pt"})
    saved_by(source)
    assert ModelFiles(tmp_path / "model").keys() - tensors.keys() == set(written)


def test_save_pretrained_reads_each_file_of_weights_whatever_the_index_says(alone, tmp_path):
    """As transformers does: an index may name the wrong file, tensors that there are not, and not all that there are.
    """
    source = source_of("llama", tmp_path / "source", sharded=True)
    index = source / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    files = sorted({*said["weight_map"].values()})
    _, second, *rest = sorted(said["weight_map"])
    said["weight_map"] = {second: files[-1], "gone": files[0]} | dict.fromkeys(rest, files[0]) | dict(zip(rest, files))
    index.write_text(json.dumps(said))
    assert compare(source, saved_by(source, **ADAPTED), lambda name: "q_proj.weight" in name) > 8


def test_save_pretrained_of_a_value_model_leaves_out_the_vocabulary_head(alone, tmp_path):
    source = source_of("llama", tmp_path / "source")
    saved_by(source, head="value")
    assert ModelFiles(source).keys() ^ ModelFiles(tmp_path / "model").keys() == {"lm_head.weight", "score.weight"}


def test_save_pretrained_of_a_value_model_names_one_label(alone, tmp_path):
    source = source_of("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (source / "config.json").write_text(json.dumps(config | labels))
    written = json.loads((saved_by(source, head="value") / "config.json").read_text())
    assert [len(written[name]) for name in labels] == [1, 1]


def test_save_pretrained_writes_settings_of_a_text_model_where_its_source_has_them(alone, tmp_path):
    """Qwen2-VL's are at the top level; version 4 of transformers takes those of a `text_config` alone."""
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1}
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6}}
    config = CONFIG_MAPPING["qwen2_vl"](text_config=text, vision_config=vision, image_token_id=268)
    source = source_of("qwen2_vl", tmp_path / "source", kind=AutoModelForImageTextToText, config=config)
    flat = json.loads((source / "config.json").read_text())
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (source / "config.json").write_text(json.dumps(flat | {
        key: value for key, value in flat.pop("text_config").items() if key not in ("rope_parameters", "model_type")}
        | rope | {"tie_word_embeddings": True}))
    written = json.loads((saved_by(source, freeze=["*visual*"]) / "config.json").read_text())
    assert "text_config" not in written
    assert {key: written[key] for key in rope} == rope
    assert written["tie_word_embeddings"] is False


def test_save_pretrained_of_a_multimodal_model_keeps_its_names(alone, tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    text = {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True}
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, mm_tokens_per_image=4,
                                      image_token_index=270, boi_token_index=268, eoi_token_index=269)
    source = source_of("gemma3", tmp_path / "source", kind=AutoModelForImageTextToText, config=config)
    saved_by(source, freeze=["*vision_tower*", "*multi_modal_projector*"])
    assert compare(source, tmp_path / "model", lambda name: "vision" not in name and "projector" not in name) > 10


def test_save_pretrained_keeps_heads_apart_that_differ_in_the_files(alone, tmp_path):
    source = source_of("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert compare(source, saved_by(source)) == 0
    assert not json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"]


def _damage(change):
    """Return a writer whose files are changed after they are written."""
    write = ModelWriter.write

    def damaged(self, tensors, dtype, folder):
        write(self, tensors, dtype, folder)
        written = load_file(folder / "model.safetensors")
        change(written)
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    return damaged


DOWN, BIAS = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(("family", "change", "said"), [
    ("glm4_moe", lambda written: written[BIAS].zero_(), rf"{BIAS}` .* zero throughout; it is not trained"),
    ("glm4_moe", lambda written: written.pop(BIAS), rf"{BIAS}` is missing .* not trained"),
    ("llama", lambda written: written.pop("model.norm.weight"), "model.norm.weight` is missing .* was trained"),
    ("llama", lambda written: written[DOWN].sub_(1e-6), rf"{DOWN}` .* other values .* was trained"),
    ("llama", lambda written: written.update({DOWN: written[DOWN].bfloat16()}), rf"{DOWN}` .*bfloat16, not .*float32"),
    ("tied", lambda written: written.update({"lm_head.weight": written["model.embed_tokens.weight"] + 0.1}),
     "lm_head.weight` .* should not be there")])
def test_a_damaged_folder_is_not_taken(alone, tmp_path, monkeypatch, family, change, said):
    role = role_from(source_of(family, tmp_path / "source"))
    monkeypatch.setattr(ModelWriter, "write", _damage(change))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/older").touch()
    with pytest.raises(ModelDamaged, match=said):
        role.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/older").exists()
    assert "damaged" in (tmp_path / "model.partial/reason.txt").read_text()


def test_adapters_of_a_model_that_is_damaged_do_not_replace_older_ones(alone, tmp_path, monkeypatch):
    role = role_from(source_of("llama", tmp_path / "source"), lora=Lora(rank=2, targets=["q_proj"]))
    monkeypatch.setattr(ModelWriter, "write", _damage(lambda written: written.pop("model.norm.weight")))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/older").touch()
    with pytest.raises(ModelDamaged, match="model.norm.weight` is missing"):
        role.save_pretrained(tmp_path / "model")
    assert (tmp_path / "adapter/older").exists()
    assert not (tmp_path / "adapter.partial").exists()


def test_a_folder_that_computes_otherwise_than_the_engine_is_not_taken(alone, tmp_path, monkeypatch):
    """The engine gathers weights of before the last step."""
    role = role_from(source_of("llama", tmp_path / "source"))
    stale = [(name, tensor.clone()) for name, tensor in role.engine.export()]
    train(role)
    monkeypatch.setattr(role.engine, "export", lambda: iter(stale))
    with pytest.raises(ModelDamaged, match="computes otherwise than the engine"):
        role.save_pretrained(tmp_path / "model")


def test_the_first_model_of_a_run_is_checked_and_an_event_says_so(alone, tmp_path, recorded):
    role = role_from(source_of("glm4_moe", tmp_path / "source"))
    for _ in range(2):
        role.save_pretrained(tmp_path / "model")
    event, = recorded("model_checked")
    assert [event[key] for key in ("role", "folder", "unchanged")] == ["actor", "model", 1]
    assert event["tensors"] == len(ModelFiles(tmp_path / "source"))
    assert event["difference"] < 1e-5
    assert event["seconds"] < 5


def test_a_large_model_is_loaded_without_its_values(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "_COMPUTED", 0)
    role = role_from(source_of("mixtral", tmp_path / "source"))
    role.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(ModelWriter, "write", _damage(lambda written: written.pop("lm_head.weight")))
    with pytest.raises(ModelDamaged, match="lm_head.weight` is missing"):
        role_from(tmp_path / "source").save_pretrained(tmp_path / "other")
