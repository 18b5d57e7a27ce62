"""Finds models and data files of the Hugging Face hub in its cache on this machine, downloads what is not there, and
uploads models.

    OWNER/NAME[@REVISION]                            a model
    hf://datasets/OWNER/NAME[@REVISION]/PATH         a file of a data set

What is in the cache is used as it is, without a question to the hub; a resumed run keeps its commit. HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE are the hub's own variables.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.errors import InvalidInput, did_you_mean

_NAMES = {"models": re.compile(r"(?:hf://)?([\w.-]*\w/[\w.-]*\w)(?:@([\w./-]+))?"),
          "data": re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/\w+|[^/]+))?/(.+)")}
_DATA_SET = re.compile(r"(?:hf://)?(?:datasets/)?([\w.-]+/[\w-]+(?:\.[\w-]+)*?)(?:@([^/]+))?/?"
                       r"(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?<!\.csv)(?<!\.txt)(?<!\.arrow)")
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_WEIGHTS = ["*.safetensors"]
_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "vocab.json"]
_UNUSED = ["*/*", "consolidated*"]  # other forms of the same weights


@dataclass(frozen=True)
class HubName:
    """Model, or with `path` a file of a data set, on the hub."""

    repository: str
    revision: str | None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        prefix, path = ("hf://datasets/", f"/{self.path}") if self.path else ("", "")
        return f"{prefix}{self.repository}{revision}{path}"


def hub_name(name: str, kind: str) -> HubName | None:
    """Return what `name` of a kind, "models" or "data", says on the hub; None if it is no name there."""
    pattern = _NAMES.get(kind)
    found = pattern.fullmatch(name) if pattern else None
    return HubName(*found.groups()) if found else None


def pinned(name: HubName, path: Path) -> HubName:
    """Return the name of what lies at a path of the cache, with its commit."""
    parts = path.parts
    commits = [parts[place + 2] for place, part in enumerate(parts) if part.startswith(("models--", "datasets--"))]
    return replace(name, revision=commits[-1])


def fetch(name: HubName, weights: bool = False) -> Path:
    """Return the folder of a model, which may lack its weights unless they are asked for, or a data file, in this
    machine's cache. Raises InvalidInput: it is not there, and cannot be downloaded."""
    found = fetched(name, weights)
    if isinstance(found, str):
        raise InvalidInput(found)
    return found


@functools.cache
def fetched(name: HubName, weights: bool = False) -> Path | str:
    """Return the path that `fetch` returns, or what it says instead."""
    import httpx2
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = name
    try:
        found = _get(name, weights, cached=True)
        if name.path or _is_whole(found, weights):
            return found
        wanted = pinned(name, found)  # older clients, and those that want one file, leave a part of a commit
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        return f"`{name}` is no name on the hub: {error}"
    try:
        found = _get(wanted, weights, cached=False)
    except (OSError, RuntimeError, httpx2.HTTPError) as error:  # of the hub, the disk, and the network
        return _explained(name, error)
    if weights and not _is_whole(found, weights):
        return f"model `{name}` has no weights as *.safetensors at {found.name}. Convert them with transformers, " \
               "from_pretrained and save_pretrained, and name that folder"
    return found


def _is_whole(folder: Path, weights: bool) -> bool:
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file() or not any((folder / each).is_file() for each in _TOKENIZERS):
        return False
    if not weights:
        return True
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / file).is_file() for file in files)


def _get(name: HubName, weights: bool, cached: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # pyright: ignore[reportPrivateImportUsage]

    if os.environ.get("LOCAL_RANK", "0") != "0":
        disable_progress_bars()  # the ranks of a machine wait for the first one
    if name.path:
        return Path(hf_hub_download(name.repository, name.path, repo_type="dataset", revision=name.revision,
                                    local_files_only=cached))
    return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=cached,
                                  allow_patterns=_SMALL + _WEIGHTS * weights, ignore_patterns=_UNUSED))


def _explained(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    kind = "data set" if name.path else "model"
    page = f"{constants.ENDPOINT}/{'datasets/' * bool(name.path)}{name.repository}"
    match error:
        case errors.GatedRepoError():
            return f"{kind} `{name.repository}` is gated: accept its terms at {page} and export HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return f"the hub has no {kind} `{name.repository}`, or it is private: export HF_TOKEN then"
        case errors.RevisionNotFoundError():
            return f"{kind} `{name.repository}` has no revision `{name.revision}` (a branch, a tag or a commit)"
        case errors.RemoteEntryNotFoundError():
            return f"data set `{name.repository}` has no file `{name.path}`. " \
                   + did_you_mean(name.path, _data_files(name), "It has")
    if constants.HF_HUB_OFFLINE:
        return f"`{name}` is not in the hub's cache on this machine ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE " \
               "forbids to download it"
    return f"`{name}` is not in the hub's cache on this machine, and cannot be downloaded from {constants.ENDPOINT}: " \
           f"{next(iter(str(error.__cause__ or error).splitlines()), '') or type(error).__name__}"


def _data_files(name: HubName) -> list[str]:
    """Return the data files of a data set; none if the hub does not say."""
    import httpx2
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(name.repository, repo_type="dataset", revision=name.revision)
    except (OSError, RuntimeError, httpx2.HTTPError):
        return []
    return [file for file in files if file.endswith((".jsonl", ".json", ".csv", ".parquet"))]


def data_set_line(name: str, folder: Path) -> str:
    """Return what to write in place of the bare name of a data set on the hub, as openai/gsm8k; "" if it is no such
    name, or one of a local folder's: here or in `folder`."""
    bare = _DATA_SET.fullmatch(name)
    if bare is None or any((place / bare[1].split("/")[0]).exists() for place in (Path(), folder)):
        return ""
    return f"If that is a data set of the Hugging Face hub, name a file of it:  data: {{train: " \
           f"{HubName(bare[1], bare[2], 'FILE.parquet')}}}\n" \
           f"Its files:  https://huggingface.co/datasets/{bare[1]}/tree/main"
