"""A model's files stay where they are: nothing of them is copied but what an engine keeps."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers_of_kinds import CHATML, KINDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow.config.dag import Role
from distflow.config.load import load
from distflow.config.model_code import needs_code
from distflow.config.run import RoleRun
from distflow.errors import InvalidInput
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout
from workers.engines.loading import _load_folder, _read, read_tokenizer, save_tokenizer
from workers.engines.vision import LibraryProcessor


@pytest.fixture
def folder(tmp_path):
    """A model of 24 MiB in bfloat16."""
    build_model(512, 0, layers=4, hidden=512, heads=4, kv_heads=2, head_dim=64).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def own_memory() -> int:
    """Bytes of this process that are not pages of a file."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def loaded(folder: str) -> tuple[int, int]:
    _load_folder(Path(folder), "lm")  # imports
    before = own_memory()
    model = _load_folder(Path(folder), "lm")
    for parameter in model.parameters():
        parameter.sum()  # reads all pages
    return own_memory() - before, sum(parameter.nbytes for parameter in model.parameters())


def test_weights_are_pages_of_their_files(folder):
    (more, size), = run_ranks(1, loaded, str(folder))
    assert size > 20 << 20
    assert more < size / 4


def test_engines_convert_what_they_keep(folder, mesh):
    model, settings = _load_folder(folder, "lm"), RoleRun(dtype="float32")
    assert model.dtype == torch.bfloat16
    expected = {name: weight.float() for name, weight in
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters()}
    rollout = HFRollout.build(model, build_tokenizer(["one"]), settings, mesh, 0, [2])
    trainer = FSDPEngine(model, settings, mesh, pad_token=0, steps=1, role=Role(trained=True))
    for found in (dict(rollout.model.named_parameters()),
                  {name: shard.full_tensor() for name, shard in trainer.shards().items()}):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], weight), name
    assert rollout.model.lm_head.weight is rollout.model.model.embed_tokens.weight


@pytest.fixture
def hostile(tmp_path, capfd):
    """A whole model folder with code that would leave a file, and the path of that file."""
    tokenizer = build_tokenizer(["one two"])
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    build_model(len(tokenizer), 0, **ids).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    left = tmp_path / "was_run"
    for name in ("modeling_own.py", "custom_generate/generate.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"open({str(left)!r}, 'w')\n")
    yield tmp_path
    assert not left.exists()
    assert "[y/N]" not in capfd.readouterr().out


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


_MAPPED = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def test_code_in_a_folder_is_not_run_and_not_needed(hostile):
    change(hostile / "config.json", auto_map=_MAPPED)
    change(hostile / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_own.OwnTokenizer", None]})
    assert not needs_code(hostile)
    assert type(_load_folder(hostile, "lm")).__module__.startswith("transformers.")
    assert _read(AutoTokenizer, hostile)("one")


def test_code_in_a_folder_is_refused_where_it_is_needed(hostile):
    change(hostile / "config.json", auto_map=_MAPPED, model_type="own")
    assert needs_code(hostile)
    with pytest.raises(InvalidInput, match=r"code of its own \(`auto_map`: modeling_own.OwnConfig, .*never run"):
        _load_folder(hostile, "lm")
    with pytest.raises(InvalidInput, match=r"modeling_own.OwnForCausalLM\), and code in a model's folder is never run"):
        load("grpo", None, [f"roles.actor.model={hostile}"])


def test_an_image_processor_in_a_folder_is_not_run(hostile):
    (hostile / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "OwnProcessor", "auto_map": {"AutoImageProcessor": "modeling_own.OwnProcessor"}}))
    with pytest.raises(InvalidInput, match=r"the image processor of \S+ cannot be loaded: .*custom code"):
        LibraryProcessor.read(hostile, "llava", _read(AutoTokenizer, hostile))


def test_pickled_weights_hold_tensors_alone(hostile):
    class Runs:
        def __reduce__(self):
            return (open, (str(hostile / "was_run"), "w"))

    weights = load_file(hostile / "model.safetensors")
    (hostile / "model.safetensors").unlink()
    torch.save(weights, hostile / "pytorch_model.bin")
    assert _load_folder(hostile, "lm")
    torch.save({**weights, "more": Runs()}, hostile / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        _load_folder(hostile, "lm")


@pytest.mark.parametrize(("change", "says"), [
    (lambda tensors: tensors.pop("lm_head.weight"), r"1 of its weights: lm_head\.weight"),
    (lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}), r"1 of its weights: model\.norm\.weight")])
def test_a_folder_that_lacks_weights_is_refused(tmp_path, change, says):
    """transformers draws them at random, and says so where nobody reads it."""
    model = build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path)
    assert _load_folder(tmp_path, "lm")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=says):
        _load_folder(tmp_path, "lm")


def test_a_critic_needs_no_head_that_gives_tokens(tmp_path):
    model = build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1)
    model.config.tie_word_embeddings = False
    model.model.config.save_pretrained(tmp_path)
    save_file({f"model.{name}": tensor for name, tensor in model.model.state_dict().items()},
              tmp_path / "model.safetensors", {"format": "pt"})
    assert _load_folder(tmp_path, "value").score.out_features == 1


@pytest.mark.parametrize("kind", ["chatml", "line_ends", "unigram", "zephyr"])
@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast"])
def test_a_tokenizer_is_that_of_its_file_whatever_class_is_named(tmp_path, kind, named):
    """transformers#45701: DeepSeek-R1-Distill-Llama names a class that drops blanks. marin#8163: version 4 of
    transformers does not know the class that version 5 writes."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    KINDS[kind]().save_pretrained(tmp_path)
    change(tmp_path / "tokenizer_config.json", tokenizer_class=named)
    text = "What is 12 + 13?\n\n  It   is\t25. <|im_start|>user\nRépondez: 日本 🙂 I'm"
    tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    tokenizer = read_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path / "saved")
    for each in (tokenizer, read_tokenizer(tmp_path / "saved")):
        assert each(text, add_special_tokens=False)["input_ids"] == tokens
        assert each.chat_template == KINDS[kind]().chat_template
    assert "TokenizersBackend" not in (tmp_path / "saved/tokenizer_config.json").read_text()


def test_a_saved_tokenizer_has_the_files_of_its_source(tmp_path):
    """mlx-lm#661, llama.cpp#18065: version 4 of transformers takes no list of `extra_special_tokens`. unsloth#785:
    converters need tokenizer.model."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    KINDS["zephyr"]().save_pretrained(source)
    change(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_own.OwnTokenizer", None]})
    (source / "tokenizer.model").write_bytes(b"\x0a\x0e")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    save_tokenizer(read_tokenizer(source), saved)
    files = [{file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.*") if file.suffix != ".json"}
             for folder in (source, saved)]
    assert files[0] == files[1]
    assert {"additional_chat_templates/tool_use.jinja", "tokenizer.model"} <= {str(name) for name in files[1]}
    before, after = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, saved))
    special, _ = before.pop("extra_special_tokens"), before.pop("auto_map")
    assert after == {**before, "additional_special_tokens": special, "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_processors_chat_template_is_the_tokenizers(tmp_path, name):
    """LLaVA has its template there alone, and its conversations were rendered as lines."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    KINDS["no_template"]().save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps({"chat_template": CHATML}))
    tokenizer = read_tokenizer(tmp_path)
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert tokenizer.chat_template == _read(AutoTokenizer, tmp_path / "saved").chat_template == CHATML
    (tmp_path / "tokenizer_config.json").unlink()
    save_tokenizer(read_tokenizer(tmp_path), tmp_path / "further")
    assert _read(AutoTokenizer, tmp_path / "further").chat_template == CHATML


def test_a_saved_tokenizer_has_the_files_that_its_class_names(tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt_neox_japanese"}')
    (source / "vocab.txt").write_text("<|endoftext|>\n<|startoftext|>\na\n<SP>\n")
    (source / "emoji.json").write_text('{"emoji": {}, "emoji_inv": {}}')
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTNeoXJapaneseTokenizer"}')
    save_tokenizer(read_tokenizer(source), saved)
    assert (saved / "emoji.json").is_file()


def test_the_configuration_of_a_head_of_its_own_says_so(tmp_path):
    """transformers#42612: other libraries, Megatron and vLLM among them, would tie what the files have apart."""
    build_model(270, 0, layers=1, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for head, tied in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.randn(270, 64), False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        model = _load_folder(tmp_path, "lm")
        assert model.config.tie_word_embeddings is tied
        assert torch.equal(model.lm_head.weight, head)


def test_a_model_that_was_traced_returns_names(tmp_path):
    build_model(270, 0, layers=1, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    change(tmp_path / "config.json", return_dict=False)
    assert _load_folder(tmp_path, "lm")(torch.arange(3)[None]).logits.shape == (1, 3, 270)


def test_a_prefix_of_all_names_is_told(tmp_path):
    """torch.compile's `_orig_mod.` and others: the head is tied, and no file has it."""
    build_model(270, 0, layers=1, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"take `_orig_mod\.` out of all names"):
        _load_folder(tmp_path, "lm")


@pytest.mark.parametrize(("layers", "says"), [(1, r"from number 1 on: only 1 of them .*\n.*\"num_hidden_layers\": 2"),
                                              (2, None)])
def test_layers_that_the_configuration_leaves_out_are_told(tmp_path, layers, says):
    """Those that predict further tokens (DeepSeek, GLM) have other weights, and stay in the files."""
    build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {name.replace("layers.1", "layers.2"): each.clone() for name, each in tensors.items()
               if "layers.1" in name}
    further["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors | further, tmp_path / "model.safetensors", {"format": "pt"})
    change(tmp_path / "config.json", num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    if says:
        with pytest.raises(InvalidInput, match=says):
            _load_folder(tmp_path, "lm")
    else:
        assert _load_folder(tmp_path, "lm").config.num_hidden_layers == 2


def test_a_head_that_may_be_the_embeddings_is_told(tmp_path):
    build_model(270, 0, layers=1, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    change(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(InvalidInput, match=r'its config.json:  "tie_word_embeddings": true'):
        _load_folder(tmp_path, "lm")


def test_a_configuration_that_contradicts_itself_is_refused(tmp_path):
    """As one in which a user has taken layers out, and not their types."""
    build_model(270, 0, layers=2, hidden=64, heads=2, kv_heads=1).save_pretrained(tmp_path)
    change(tmp_path / "config.json", num_hidden_layers=1)
    with pytest.raises(InvalidInput, match=r"transformers cannot read .*num_hidden_layers"):
        _load_folder(tmp_path, "lm")
