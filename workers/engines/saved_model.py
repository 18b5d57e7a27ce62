"""Writes a trained model as a Hugging Face folder, by the names that its source folder has, and reads it back.

    ModelFiles     tensors of a folder, read one at a time
    ModelWriter    writes trained tensors as they were gathered, and all others with the bytes of the source: also
                   those that transformers does not load (layers that predict several tokens)
    ModelDamaged   error of a folder that does not have what was to be written

Tensors have two names: that of the files, and that of the loaded model, since transformers renames and fuses what it
reads. What is compared goes by those of the files.
"""

from __future__ import annotations

import copy
import json
import math
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from distflow.config.model_code import read_json
from distflow.errors import EngineError, listing
from workers.engines.rounding import ROUNDING

_SHARD_BYTES = 5 * 10**9
"""Size of a file: more than that is never copied at a time."""
_COMPUTED = 10**9
"""Parameters up to which the written model computes two rows."""
_TEXT = "Question: what is 17 + 25? The sum of 17 and 25 is 42, since 7 + 5 = 12, and 10 + 20 + 12 = 42. "
_ROWS = ((4, 6), (12, 40))  # tokens of prompt and response


class ModelDamaged(EngineError):
    """A written model does not have the tensors or the numbers that it should."""


class ModelFiles(Mapping[str, Tensor]):
    """Tensors of a model folder, by their names in the files. They are pages of the files, read when they are used."""

    def __init__(self, folder: Path):
        """Raises EngineError: the folder has no weights."""
        self.folder, self.opened = folder, {}
        for whole, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
            if (folder / whole).is_file():
                self.files: dict[str, str] = dict.fromkeys(self._open(whole).keys(), whole)
                return
            if (folder / index).is_file():
                named = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
                self.files = {}  # an index may name other files than have a tensor, which transformers does not mind
                for file in sorted({*named}):
                    self.files |= dict.fromkeys(self._open(file).keys(), file)
                return
        raise EngineError(f"the folder {folder} has no weights any more ({SAFE_WEIGHTS_NAME}), and what is not trained "
                          "is saved as it is there. Put it back:  distflow export RUN  then writes the model")

    def __getitem__(self, name: str) -> Tensor:
        opened = self._open(self.files[name])
        return opened[name] if isinstance(opened, dict) else opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def _open(self, file: str) -> Any:
        if file not in self.opened:
            path = self.folder / file
            self.opened[file] = safe_open(path, "pt") if path.suffix == ".safetensors" else torch.load(
                path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return self.opened[file]


@dataclass(frozen=True)
class SavedTensors:
    """Tensors to be saved, by their names in the files."""

    all: dict[str, Tensor]
    trained: set[str]
    left_out: set[str]
    """Names in the source that the saved model does not have: copies of tied tensors, a head that was replaced."""


class CheckedModel(NamedTuple):

    tensors: int
    unchanged: int  # tensors with the bytes of the source
    difference: float | None  # largest mean difference of a row's numbers from the engine's; None if not compared
    seconds: float


class ModelWriter:

    def __init__(self, model: PreTrainedModel, source: Path | None, copies_rest: bool = True):
        """`source`: the folder that `model` was loaded from; None if it was built here. `copies_rest`: whether the
        folder's tensors that transformers does not load are copied; they have no place in a model of another kind."""
        self.kind, self.config = type(model), copy.deepcopy(model.config)
        self.source, self.copies_rest = source, copies_rest
        self.conversions = getattr(model, "_weight_conversions", None)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    @property
    def computes(self) -> bool:
        """Whether the model is small enough for the written one to compute rows."""
        return self.parameters <= _COMPUTED

    def tensors(self, weights: dict[str, Tensor], trained: set[str]) -> SavedTensors:
        """Return the tensors to be saved. `weights`: whole tensors by their names in the loaded model, at least those
        that are `trained`. Raises EngineError: the model has others."""
        model = self._skeleton()
        copies = model.all_tied_weights_keys
        if not weights.keys().isdisjoint(copies):  # they differ in the files, or one has adapters: all are written
            weights = {name: weights[owner] for name, owner in copies.items() if owner in weights} | weights
            self.config.tie_word_embeddings = self.config.get_text_config().tie_word_embeddings = False
            model = self._skeleton()
        if odd := sorted(trained - (weights.keys() & dict(model.named_parameters()).keys())):
            raise EngineError(f"the weights to be saved differ from the model's: {odd[:5]}")
        source = ModelFiles(self.source) if self.source else {}
        find, tied, found = _Places(model), model.all_tied_weights_keys, dict[str, Tensor]()
        places = {name: find(name) for name in source}
        loaded = {each for names, _ in places.values() for each in names}
        copied, left_out, done = set(), set(), set()
        for name, (names, fused) in places.items():
            owners = [tied.get(each, each) for each in names]
            if trained.isdisjoint(owners):
                (copied if names or self.copies_rest else left_out).add(name)
            elif owners != names and not loaded.isdisjoint(owners):
                left_out.add(name)
            elif not fused:
                found[name] = weights[owners[0]]
            done.update([] if fused else owners)
        found |= {name: source[name] for name in copied}
        rest = revert_weight_conversion(model, {name: weights[name] for name in weights.keys() - done})
        found |= {name: tensor for name, tensor in rest.items() if name not in found}
        return SavedTensors(found, found.keys() - copied, left_out)

    def _skeleton(self) -> PreTrainedModel:
        """Return the model without values, for its names."""
        with torch.device("meta"):
            model = self.kind(copy.deepcopy(self.config))
        if self.conversions is not None:
            model._weight_conversions = self.conversions
        return model

    def write(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
        """Write files and configuration. `dtype`: of the trained weights, which the configuration names."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(json.dumps(self._settings(dtype), indent=2) + "\n", encoding="utf-8")
        pattern = SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors")
        split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern,
                                                   max_shard_size=_SHARD_BYTES)
        for file, names in split.filename_to_tensors.items():
            save_file({name: tensors[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _settings(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the configuration of the source's file, with what has changed of it. Transformers 5 would write it in
        a form of which version 4 and other readers take defaults, such as 10,000 for `rope_theta`."""
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = [self.kind.__name__], dtype
        file: dict[str, Any] = read_json(self.source / CONFIG_NAME) if self.source else {}
        if not self.source or file["model_type"] != config.model_type:  # of a part of that model
            return json.loads(config.to_json_string())
        read, settings = (json.loads(each.to_json_string(use_diff=False))
                          for each in (type(config).from_pretrained(self.source), config))
        changed = _with_changes(file, read, settings)
        if "torch_dtype" in file:  # its older name
            changed.pop("dtype", None)
            changed["torch_dtype"] = settings["dtype"]
        changed.pop("auto_map", None)  # the code that it names is not there
        return changed

    def check(self, folder: Path, saved: SavedTensors, rows: Rows, numbers: Sequence[Tensor] | None,
              dtype: torch.dtype) -> CheckedModel:
        """Read a written folder back and compare it. Raises ModelDamaged: it is not what was saved.

        Args:
            numbers: the engine's log-probability or value of each response token of `rows`, computed in `dtype`; None
                if they are not compared.
        """
        began = time.perf_counter()
        written, source = ModelFiles(folder), ModelFiles(self.source) if self.source else {}
        for name in source.keys() - saved.left_out:
            _compare(name, written, saved.all[name] if name in saved.trained else source[name],
                     "was trained" if name in saved.trained else f"is not trained, and {self.source} has it")
        for name in saved.all.keys() - source.keys():
            _compare(name, written, saved.all[name], "was trained")
        for name in sorted(written.keys() - saved.all.keys()):
            raise ModelDamaged(_DAMAGED.format(name, written.files[name], "should not be there: it is tied to another "
                               "one, or no tensor of the model"))
        model = self._load(folder, source.keys() - saved.trained)
        difference = None if numbers is None else _difference(model, rows, numbers, dtype)
        return CheckedModel(len(saved.all), len(saved.all.keys() - saved.trained), difference,
                            round(time.perf_counter() - began, 3))

    def _load(self, folder: Path, unknown: Set[str]) -> PreTrainedModel:
        """Load a folder by transformers alone; a large model without its values."""
        kind: Any = self.kind
        model, report = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                             output_loading_info=True, device_map=None if self.computes else "meta")
        find = _Places(self._skeleton())
        unknown = unknown | {find.renamed(name)[0] for name in unknown}  # reports have names of a loaded model
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if odd := sorted(map(str, set(report.get(what) or ()) - unknown)):
                raise ModelDamaged(f"transformers does not load the written model {folder} as it is: "
                                   f"{what.replace('_', ' ')}: {listing(odd)}")
        return model.eval()


Rows = Sequence[tuple[Tensor, Tensor]]  # prompt and response of each row
_TEXT = "text_config"
_DAMAGED = "the written model is damaged: tensor `{}` in {} {}"


def _with_changes(file: dict[str, Any], read: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, with those that differ from what was `read` of it. Those of a text model that the
    file has at its top level, as Qwen2-VL's does, stay there."""
    changed = {key: value for key, value in settings.items() if value != read.get(key) and not key.startswith("_")}
    nested = {key: _with_changes(file[key], read[key], value) for key, value in changed.items()
              if key.endswith("_config")
              and all(isinstance(each, dict) for each in (file.get(key), read.get(key), value))}
    of_text = changed.pop(_TEXT, {}) if _TEXT not in file and isinstance(read.get(_TEXT), dict) else {}
    return file | (_with_changes({}, read[_TEXT], of_text) if of_text else {}) | changed | nested


def _compare(name: str, written: ModelFiles, expected: Tensor, origin: str) -> None:
    """Require that a tensor was written as it was, bit for bit."""
    if name not in written:
        raise ModelDamaged(f"the written model is damaged: tensor `{name}` is missing in {written.folder}; it {origin}")
    tensor = written[name]
    if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        why = f"is {list(tensor.shape)} {tensor.dtype}, not {list(expected.shape)} {expected.dtype}; it {origin}"
    elif not torch.equal(_bytes(tensor), _bytes(expected)):
        odd = (_bytes(tensor).view(-1, tensor.itemsize) != _bytes(expected).view(-1, tensor.itemsize)).any(1)
        zero = ": it is zero throughout" if not tensor.any() else ""
        why = f"has other values than it should in {int(odd.sum())} of {len(odd)} places{zero}; it {origin}"
    else:
        return
    raise ModelDamaged(_DAMAGED.format(name, written.files[name], why))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check_rows(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> Rows:
    """Return two rows of fixed text, a short and a longer one: all that the model's positions and tokens allow."""
    text: Any = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or math.inf
    known = [token for token in tokenizer.encode(_TEXT, add_special_tokens=False) if token < text.vocab_size] or [0]
    tokens = torch.tensor((known * 64)[:64])
    return [(tokens[:prompt], tokens[prompt : prompt + response]) for prompt, response in _ROWS
            if prompt + response <= longest]


@torch.no_grad()
def row_numbers(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the log-probability, or the value, of each response token [R] by transformers alone, of one row alone."""
    tokens, places = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
    if model.get_output_embeddings() is None:
        return model.score(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)[0, places, 0]
    logits = model(input_ids=tokens, use_cache=False).logits[0, places].float()
    return logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def _difference(model: Any, rows: Rows, numbers: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Return the largest mean difference of a row's numbers, computed by transformers alone, from the engine's."""
    largest = 0.0
    for (prompt, response), engines in zip(rows, numbers, strict=True):
        plain = row_numbers(model, prompt, response)
        scores = model.get_output_embeddings() is None  # which may be large
        scale = max(1.0, float(plain.abs().mean())) if scores else 1.0
        largest = max(largest, float((plain - engines).abs().mean()) / scale)
    rounding = ROUNDING[dtype.itemsize].mean
    if not largest <= rounding:
        raise ModelDamaged(f"the written model computes otherwise than the engine that trained it: by {largest:.2g} in "
                           f"the mean of a row's tokens, where {rounding:g} is rounding. Its tensors are those "
                           "that were gathered, so that either the engine gathers what it does not compute with, or it "
                           "computes otherwise than transformers does")
    return largest


class _Places:
    """Places of tensors of files in a loaded model, as transformers finds them."""

    def __init__(self, model: PreTrainedModel):
        mapping = get_model_conversion_mapping(model)
        self.renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self.converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self.by_pattern = {pattern: each for each in self.converters for pattern in each.source_patterns}
        self.prefix, self.there = model.base_model_prefix, model.state_dict()

    def __call__(self, name: str) -> tuple[list[str], bool]:
        """Return the names in the loaded model, none if the tensor is not loaded, and whether it is fused or cut."""
        place, pattern = self.renamed(name)
        if place not in self.there:
            return [], False
        first, *others = self.by_pattern[pattern].target_patterns if pattern else [place]
        places = [place, *(place.replace(first, other) for other in others)]
        return places, pattern is not None

    def renamed(self, name: str) -> tuple[str, str | None]:
        """Return the name that a tensor would have in the loaded model, and the pattern by which it is fused or cut."""
        place, pattern = rename_source_key(name, self.renamings, self.converters, self.prefix, self.there)
        if place not in self.there and name in self.there:
            place, pattern = rename_source_key(name, [], [], self.prefix, self.there)
        return place, pattern
