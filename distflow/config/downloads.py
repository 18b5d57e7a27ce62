"""Files of a model's folder that a download has left out or cut off. Reads their ends and headers, and no weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distflow.config.model_code import read_json
from distflow.errors import listing

_SMALL = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""What a tokenizer is read from: the first of these that is there."""
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""What transformers loads: the first of these that is there, or else the files that its index names."""
_WHOLE = ("F64", "F32", "F16", "BF16")
_POINTER = b"version https://git-lfs"


def half_download(folder: Path, weights: bool) -> str:
    """Return which file of a model's folder is missing or not whole, "" if none is. `weights`: look at them, too."""
    try:
        return next(_lacks(folder, weights), "")
    except (ValueError, LookupError, TypeError, AttributeError):  # of an index
        return "its index of weights is cut or damaged"


def narrow_weight(folder: Path) -> str:
    """Return a weight in a model's files that has less than 16 bits, with its dtype, or an integer; "" if none has."""
    files = [folder / name for name in weight_files(folder) if name.endswith(".safetensors")]
    narrow = (f"{name}: {item['dtype']}" for file in files if file.is_file()
              for name, item in safetensors_header(file)[1].items()
              if name.endswith(".weight") and item["dtype"] not in _WHOLE)
    return next(narrow, "")


def _lacks(folder: Path, weights: bool) -> Iterator[str]:
    needed = weight_files(folder) if weights else ["config.json"]
    if not needed:
        other = sorted(file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
        yield "it has no weights (*.safetensors)" + (f" by a name that is loaded ({' or '.join(_WEIGHTS)}, or an index "
                                                     f"of parts). {listing(other, 'It has')}" if other else "")
    if missing := [name for name in needed if not (folder / name).is_file()]:
        yield listing(missing, "its index names, and it lacks")
    tokenizers = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not tokenizers:
        yield "it has no tokenizer (tokenizer.json)"
    for name in (*needed, *tokenizers[:1], *_SMALL):
        if (folder / name).is_file() and (how := _how_broken(folder / name)):
            yield f"{name} {how}"


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files from which transformers loads a model's weights."""
    named = read_json(folder / "config.json").get("transformers_weights")
    names = [named] if named else [each for name in _WEIGHTS for each in (name, f"{name}.index.json")]
    name = next((each for each in names if (folder / each).is_file()), named)
    if name and name.endswith(".index.json") and (folder / name).is_file():
        return sorted({*read_json(folder / name)["weight_map"].values()})
    return [name] if name else []


def _how_broken(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(64)
        opened.seek(max(0, size - 64))
        end = opened.read().rstrip()
    if not start.strip():
        return "is empty"
    if start.startswith(_POINTER):
        return "is a pointer of Git LFS, not the file"
    if file.suffix == ".safetensors":
        return _how_cut(file, size)
    torn = not end.endswith(b"}") if file.suffix == ".json" else \
        start.startswith(b"PK") and not zipfile.is_zipfile(file)
    return "is cut off" if torn else ""


def _how_cut(file: Path, size: int) -> str:
    try:
        length, tensors = safetensors_header(file)
        whole = 8 + length + max((item["data_offsets"][1] for item in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "is cut off within its header"
    return f"is cut off: it has {size:,} of {whole:,} bytes" if size < whole else ""


def safetensors_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header, and what it says of each tensor. Raises ValueError: the file
    is cut off within it."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("it has no header")
        try:
            said = json.loads(opened.read(min(length, file.stat().st_size)))
        except RecursionError:
            raise ValueError("its header is nested too deeply") from None
    return length, {name: item for name, item in said.items() if name != "__metadata__"}
