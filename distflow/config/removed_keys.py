"""Keys that there are no more: read as what says the same today, passed over where they said nothing, or refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

ANY = ...
_MEASURED = "Instead, if the rates are measured:  measured: true"
_LOCAL = {False: {"robust.snapshots": "local"}, True: {}}
_THINKING = "data.chat_template_kwargs.enable_thinking"
REPLACED_KEYS: dict[str, dict[Any, dict[str, Any]]] = {
    "all_samples": {True: {"samples": "all"}, False: {}},
    "data.enable_thinking": {True: {_THINKING: True}, False: {_THINKING: False}, None: {}},
    "robust.neighbour": _LOCAL,
    "robust.peer_replica": _LOCAL,
    "robust.restart": {"task": {"robust.restarts": 0}, "role": {}},
}
"""What says the same today, by the path that a key had and its value. Another value is refused."""
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "data.filter": ([], "Take it out: write the records that you want to a file, and name that."),
    "data.strict": (False, "Take it out: records with an empty question or answer are passed over and counted."),
    "devices.*.efficiency": (None, _MEASURED),
    "faults.*.share": (None, "Instead, a fault for each step:  faults: [{kind: kill, step: 3}, {kind: kill, step: 9}]"),
    "groups.share_gpus": (ANY, "Take it out: ranks of different groups may share a GPU."),
    "groups.trainers": ({}, "Instead, by a node of the role:  layouts: {critic: {first: N}}  , where N is the first of "
                            "its ranks among those that train"),
    "machines.*.efficiency": (None, _MEASURED),
    "machines.*.host_gb_s": (25.0, "Take it out: devices are taken to load from host memory at 25 GB/s."),
    "links.*.efficiency": (None, _MEASURED),
    "links.inside": (None, "Instead, for each kind of machine:  machines: {NAME: {…, inside: {gb_s: …}}}"),
    "on_new_weights": ("continue", "Take it out: unfinished rows continue with new weights."),
    "paths.*.efficiency": (None, _MEASURED),
    "ranks": (None, "Instead:  --ranks N  , or  ranks: N  in the run file."),
    "roles.*.compile": (False, "Take it out: on an H100 it trained 5% slower."),
    "roles.*.generation.batch_invariant": (False, "Instead, for vLLM:  export VLLM_BATCH_INVARIANT=1"),
    "roles.*.generation.quantization": ("none", "Take it out: rollouts sample with the trainer's dtype."),
    "roles.*.model.experts": (None, "Take it out: a tiny qwen3_moe has 8 experts."),
    "roles.*.model.experts_per_token": (None, "Take it out: of a tiny qwen3_moe 2 experts compute a token."),
    "roles.*.model.max_positions": (256, "Take it out: a tiny model takes rows of 1,024 tokens."),
    "switch_at": (0.5, "Take it out: ranks that do both begin to train at half of a step's prompts."),
    "timeline": (ANY, "Take it out: it is always written."),
    "trajectories": (ANY, "Take it out."),
    "training_api.max_body_mib": (ANY, "Take it out: there is no limit to set."),
    "validation.group": ("rollout", "Take it out: ranks that sample answer, where there are any."),
    "validation.max_new_tokens": (None, "Take it out: the longest answer is that of `generation`."),
    "validation.min_p": (None, "Take it out: validation draws as training does, at its own temperature and top_p."),
    "validation.stop_at": (None, "Instead, end without a new best mean:  validation: {patience: 3}"),
    "validation.top_k": (None, "Take it out: validation draws as training does, at its own temperature and top_p."),
}
"""By the path that a key had, `*` for any name: the value that said nothing, and what to write instead."""


def instead_of(path: tuple[Any, ...]) -> str | None:
    """Return what to write instead of a removed key; None of a key that never was."""
    removed = _removed(path)
    return removed[1] if removed else None


def read_older_keys(data: Any) -> None:
    """Say in a file what its older keys say as it is said today, and take out those that say nothing."""
    for path, replace in REPLACED_KEYS.items():
        *outer, name = path.split(".")
        holder = data
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if not isinstance(holder, dict):
            continue
        value = holder.get(name, ...)
        if isinstance(value, bool | str | None) and value in replace:
            for instead, said in replace[holder.pop(name)].items():
                *outer, name = instead.split(".")
                found = data
                for part in outer:
                    if not isinstance(found.get(part), dict):
                        found[part] = {}
                    found = found[part]
                found.setdefault(name, said)
    _drop_removed(data, ())


def _drop_removed(data: Any, path: tuple[Any, ...]) -> None:
    named = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    for name, value in named:
        removed = _removed((*path, name))
        if removed and (removed[0] is ANY or removed[0] == value):
            del data[name]
        else:
            _drop_removed(value, (*path, name))


def _removed(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    name = ".".join(map(str, path))
    return next((said for pattern, said in REMOVED_KEYS.items() if fnmatchcase(name, pattern)), None)
