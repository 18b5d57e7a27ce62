"""Identity of the files that a checkpoint relies on, by which a resumed run sees that one was replaced.

A checkpoint's position is a number of prompts, and means other records in another data file. So the run says which file
differs and where it continues. Frozen weights are those of a model's folder: what is trained on top of them means
nothing on others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from distflow.config.downloads import weight_files
from distflow.config.shipped import find, matching
from distflow.config.spec import Spec
from distflow.data.checks import open_validation_sets
from distflow.data.dataset import Records

_WHOLE, _SAMPLES, _SAMPLE = 2**24, 64, 2**16
"""Bytes up to which a file is read whole; of a longer one, how many samples of how many bytes are read."""
HELD_OUT = "validation "
MODEL, BASE = "model of role ", "frozen weights of role "
"""Begin the names of roles that are not trained, and of those that are trained in part or by adapters."""
BESIDE = (HELD_OUT, MODEL, BASE)  # begin names of what is no training set
DataFiles = dict[str, list]
"""By path, [records, digest]; other names than those of training sets begin with one of `BESIDE`."""


def data_files(spec: Spec, training: Mapping[str, Records]) -> DataFiles:
    found: DataFiles = {}
    for name, records in training.items():
        path = (spec.data_path(name) or Path(name)).absolute()  # a resumed run names it so, whatever the first one did
        found[str(path)] = [len(records), _digest(spec, name)]
    names = spec.run.validation.data if spec.run.validation else {}
    for name, records in open_validation_sets(spec).items():
        own = next(key for key, path in names.items() if path == name)
        found[f"{HELD_OUT}{own}"] = [len(records), _digest(spec, name)]
    return found


def frozen_weights(spec: Spec) -> DataFiles:
    """Return the identity of the weights that are in no checkpoint."""
    found: DataFiles = {}
    for name, role in spec.dag.roles.items():
        model, settings = spec.model_of(name), spec.settings_of(name)
        if not model or role.follow or (role.trained and settings and not (settings.lora or settings.freeze)):
            continue
        state, folder = hashlib.blake2b(digest_size=8), find(model.path, "models", spec.folder) if model.path else None
        for file in [folder / each for each in weight_files(folder)] if folder else ():
            _add_file(state, file)
        if not model.path:
            state.update(f"{model.model_dump_json(exclude_defaults=True)} {spec.run.seed}".encode())
        found[f"{BASE if role.trained else MODEL}{name}"] = [0, state.hexdigest()]
    return found


def changes(before: Mapping[str, list], now: Mapping[str, list]) -> Iterator[tuple[str, bool, str]]:
    """Yield each file that differs, whether it has another number of records, and how it differs."""
    for name in before.keys() & now.keys():
        (count, digest), (count_now, digest_now) = before[name], now[name]
        if count != count_now:
            yield name, True, f"{count_now:,} records, and {count:,} before"
        elif digest != digest_now:
            yield name, False, f"{count:,} records as before, with other content"


def _digest(spec: Spec, name: str) -> str:
    path = spec.data_path(name) or Path(name)
    state = hashlib.blake2b(digest_size=8)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else matching(path):
        if file.is_file():
            _add_file(state, file)
    return state.hexdigest()


def _add_file(state: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    state.update(size.to_bytes(8))
    with path.open("rb") as file:
        if size <= _WHOLE:
            state.update(file.read())
            return
        for number in range(_SAMPLES):
            file.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            state.update(file.read(_SAMPLE))
