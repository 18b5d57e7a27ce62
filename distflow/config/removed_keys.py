"""Keys that there are no more, and what to write instead."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

ANY = ...
_MEASURED = "Instead, if the rates are measured:  measured: true"
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "all_samples": (False, "Instead:  samples: all"),
    "backend": ("auto", "Take it out: nccl on GPUs, gloo on CPUs."),
    "data.enable_thinking": (None, "Instead:  data: {chat_template_kwargs: {enable_thinking: false}}"),
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
    "robust.neighbour": (True, "Instead:  robust: {snapshots: local}"),
    "robust.peer_replica": (True, "Instead:  robust: {snapshots: local}"),
    "robust.restart": ("role", "Instead:  robust: {restarts: 0}"),
    "roles.*.compile": (False, "Take it out: on an H100 it trained 5% slower."),
    "roles.*.generation.batch_invariant": (False, "Instead, for vLLM:  export VLLM_BATCH_INVARIANT=1"),
    "roles.*.generation.quantization": ("none", "Take it out: rollouts sample with the trainer's dtype."),
    "roles.*.lora.rslora": (False, "Instead, with √rank times the `alpha`:  lora: {rank: 16, alpha: 128}"),
    "roles.*.model.experts": (None, "Take it out: a tiny qwen3_moe has 8 experts."),
    "roles.*.model.experts_per_token": (None, "Take it out: of a tiny qwen3_moe 2 experts compute a token."),
    "roles.*.model.head_dim": (32, "Take it out: it is  hidden / heads ."),
    "roles.*.model.max_positions": (256, "Take it out: a tiny model takes rows of 1,024 tokens."),
    "switch_at": (0.5, "Take it out: ranks that do both begin to train at half of a step's prompts."),
    "timeline": (ANY, "Take it out: it is always written."),
    "training_api.max_body_mib": (ANY, "Take it out: there is no limit to set."),
    "trajectories": (16, "Instead, to have all conversations:  samples: all"),
    "validation.group": ("rollout", "Take it out: ranks that sample answer, where there are any."),
    "validation.max_new_tokens": (None, "Instead:  roles: {actor: {generation: {max_new_tokens: N}}}"),
    "validation.min_p": (None, "Instead:  roles: {actor: {generation: {min_p: P}}}"),
    "validation.patience": (None, "Instead, keep the best models:  validation: {best: true}"),
    "validation.stop_at": (None, "Instead, keep the best models:  validation: {best: true}"),
    "validation.top_k": (None, "Instead:  roles: {actor: {generation: {top_k: K}}}"),
}
"""By the path that a key had, `*` for any name: the value that said nothing, and what to write instead."""


def instead_of(path: tuple[Any, ...]) -> str | None:
    """Return what to write instead of a removed key; None of a key that never was."""
    removed = _removed(path)
    return removed[1] if removed else None


def drop_removed(data: Any, recorded: bool, path: tuple[Any, ...] = ()) -> None:
    """Take removed keys that change nothing out of a file: those whose value says nothing any more, and of one that an
    older version has `recorded` those with the value that said nothing then."""
    named = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    for name, value in named:
        removed = _removed((*path, name))
        if removed and (removed[0] is ANY or (recorded and removed[0] == value)):
            del data[name]
        else:
            drop_removed(value, recorded, (*path, name))


def _removed(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    name = ".".join(map(str, path))
    return next((said for pattern, said in REMOVED_KEYS.items() if fnmatchcase(name, pattern)), None)
