"""Keys that there are no more: read as what says the same today, passed over where they said nothing, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

Reading = Callable[[Any, dict[str, Any]], dict[str, Any] | None]
"""From a key's value, and the mapping that it stands in, to what says the same there today, by dotted keys; None:
nothing does."""


def _always(_: Any, __: Any) -> dict[str, Any]:
    return {}


def _if_was(nothing: Any) -> Reading:
    """Pass over the value that said nothing."""
    return lambda value, _: {} if value == nothing else None


def _said(today: dict[Any, dict[str, Any]]) -> Reading:
    return lambda value, _: today.get(value) if isinstance(value, bool | str | None) else None


def _read_fuse(value: Any, run: dict[str, Any]) -> dict[str, Any] | None:
    """Pass over `false` where a role samples one row at a time: nothing is fused then."""
    roles = run.get("roles")
    kept = [role.get("generation") for role in roles.values() if isinstance(role, dict)] if isinstance(roles, dict) \
        else []
    alone = any(isinstance(each, dict) and each.get("batch_rows") == 1 for each in kept)
    return {} if value is True or (value is False and alone) else None


def _read_name(_: Any, file: dict[str, Any]) -> dict[str, Any] | None:
    """Pass over the name of a cluster; a DAG has one still."""
    return {} if {"machines", "devices", "memory_gib"} & file.keys() else None


def _read_head_dim(value: Any, model: dict[str, Any]) -> dict[str, Any] | None:
    """Pass over the width of a head that follows from the other sizes, or of which a mistake is told."""
    hidden, heads = model.get("hidden", 128), model.get("heads", 4)
    wrong = not all(type(size) is int and size > 0 for size in (hidden, heads))
    return {} if wrong or value == hidden // heads else None


def _read_rslora(value: Any, lora: dict[str, Any]) -> dict[str, Any] | None:
    """Scale by alpha / √rank: the same as by `alpha` · √rank / rank, unless a mistake is told of these."""
    if value is not True:
        return {} if value is False else None
    rank, alpha = lora.get("rank", 16), lora.get("alpha", 32)
    if type(rank) is not int or rank <= 0 or type(alpha) not in (int, float):
        return {}
    lora.pop("alpha", None)
    return {"alpha": alpha * math.sqrt(rank)}


def _read_paths(value: Any, _: Any) -> dict[str, Any] | None:
    """Name links between two places by these."""
    links: dict[str, Any] = {}
    for path in value if isinstance(value, list) else [None]:
        if not isinstance(path, dict) or not isinstance(ends := path.get("between"), list) or len(ends) != 2 or \
                (name := "-".join(map(str, ends))) in links:
            return None
        links[name] = {key: each for key, each in path.items() if key != "between"}
    return {f"links.{name}": link for name, link in links.items()}


_MEASURED = "Instead, if the rates are measured:  measured: true"
_LOCAL = _said({False: {"snapshots": "local"}, True: {}})
_THINKING = "chat_template_kwargs.enable_thinking"
_DRAWS = "Take it out: validation draws as training does, at its own temperature and top_p."
OLDER_KEYS: dict[str, tuple[Reading, str]] = {
    "all_samples": (_said({True: {"samples": "all"}, False: {}}), "Instead, for all rows:  samples: all"),
    "data.enable_thinking": (_said({True: {_THINKING: True}, False: {_THINKING: False}, None: {}}),
                             "Instead:  chat_template_kwargs: {enable_thinking: …}"),
    "data.filter": (_if_was([]), "Take it out: write the records that you want to a file, and name that."),
    "data.strict": (_if_was(False), "Take it out: records with an empty question or answer are passed over and "
                                    "counted."),
    "devices.*.efficiency": (_if_was(None), _MEASURED),
    "faults.*.share": (_if_was(None), "Instead, a fault for each step:  faults: [{kind: kill, step: 3}, {kind: kill, "
                                      "step: 9}]"),
    "fuse": (_read_fuse, "Take it out: with  generation: {batch_rows: 1}  nothing is fused."),
    "groups.share_gpus": (_always, "Take it out: ranks of different groups may share a GPU."),
    "groups.trainers": (_if_was({}), "Instead, by a node of the role:  layouts: {critic: {first: N}}  , where N is the "
                                     "first of its ranks among those that train"),
    "links.*.efficiency": (_if_was(None), _MEASURED),
    **{f"links.{distance}": (_if_was(None), "Take it out.") for distance in ("zone", "region", "world")},
    "links.inside": (_if_was(None), "Instead, for each kind of machine:  machines: {NAME: {…, inside: {gb_s: …}}}"),
    "links.*": (_if_was(None), ""),  # as a run's folder had each that was not given
    "log.*.mlflow.experiment": (_if_was("distflow"), "Instead:  export MLFLOW_EXPERIMENT_NAME=…"),
    "log.*.mlflow.uri": (_if_was(None), "Instead:  export MLFLOW_TRACKING_URI=…"),
    "log.*.wandb.entity": (_if_was(None), "Instead:  export WANDB_ENTITY=…"),
    "log.*.wandb.group": (_if_was(None), "Instead:  export WANDB_RUN_GROUP=…"),
    "log.*.wandb.tags": (_if_was([]), "Instead:  export WANDB_TAGS=…"),
    "machines.*.efficiency": (_if_was(None), _MEASURED),
    "machines.*.host_gb_s": (_if_was(25.0), "Take it out: devices are taken to load from host memory at 25 GB/s."),
    "name": (_read_name, ""),
    "on_new_weights": (_if_was("continue"), "Take it out: unfinished rows continue with new weights."),
    "paths": (_read_paths, "Instead, by the names of two places:  links: {EAST-WEST: {gb_s: …}}"),
    "paths.*.efficiency": (_if_was(None), _MEASURED),
    "ranks": (_if_was(None), "Instead:  --ranks N  , or  ranks: N  in the run file."),
    "robust.detectors.gradient_vanishes": (lambda action, _: {"policy_stuck": action}, "Instead:  policy_stuck"),
    "robust.detectors.weight_decay": (lambda action, _: {"unusual_setting": action}, "Instead:  unusual_setting"),
    "robust.neighbour": (_LOCAL, "Instead:  snapshots: local"),
    "robust.peer_replica": (_LOCAL, "Instead:  snapshots: local"),
    "robust.restart": (_said({"task": {"restarts": 0}, "role": {}}), "Instead, of `task`:  restarts: 0"),
    "roles.*.compile": (_if_was(False), "Take it out: on an H100 it trained 5% slower."),
    "roles.*.generation.batch_invariant": (_if_was(False), "Instead, for vLLM:  export VLLM_BATCH_INVARIANT=1"),
    "roles.*.generation.quantization": (_if_was("none"), "Take it out: rollouts sample with the trainer's dtype."),
    "roles.*.lora.rslora": (_read_rslora, "Instead:  alpha: A  , where A is the alpha of before times √rank"),
    "roles.*.model.experts": (_if_was(None), "Take it out: a tiny qwen3_moe has 8 experts."),
    "roles.*.model.experts_per_token": (_if_was(None), "Take it out: of a tiny qwen3_moe 2 experts compute a token."),
    "roles.*.model.head_dim": (_read_head_dim, "The width of a head of a tiny model is  hidden / heads . Change  hidden"
                                               "  or  heads"),
    "roles.*.model.max_positions": (_if_was(256), "Take it out: a tiny model takes rows of 1,024 tokens."),
    "switch_at": (_if_was(0.5), "Take it out: ranks that do both begin to train at half of a step's prompts."),
    "timeline": (_always, "Take it out: it is always written."),
    "trajectories": (_always, "Take it out."),
    "training_api.max_body_mib": (_always, "Take it out: there is no limit to set."),
    "validation.group": (_if_was("rollout"), "Take it out: ranks that sample answer, where there are any."),
    "validation.max_new_tokens": (_if_was(None), "Take it out: the longest answer is that of `generation`."),
    "validation.min_p": (_if_was(None), _DRAWS),
    "validation.stop_at": (_if_was(None), "Instead, end without a new best mean:  validation: {patience: 3}"),
    "validation.top_k": (_if_was(None), _DRAWS),
}
"""By the path that a key had, `*` for any name: what says the same today, and what to write instead."""


def instead_of(path: tuple[Any, ...]) -> str | None:
    """Return what to write instead of a removed key; None of a key that never was."""
    older = _older(path)
    return older[1] if older else None


def read_older_keys(data: Any, path: tuple[Any, ...] = ()) -> None:
    """Say in a file what its older keys say as it is said today, and take out those that say nothing. `path`: of `data`
    in the file."""
    named: list[tuple[Any, Any]] = [*data.items()] if isinstance(data, dict) else \
        [*enumerate(data)] if isinstance(data, list) else []
    for name, value in named:
        read_older_keys(value, (*path, name))
        older = _older((*path, name))
        today = older[0](value, data) if older and isinstance(data, dict) else None
        if today is None:
            continue
        del data[name]
        for keys, said in today.items():
            *outer, key = keys.split(".", 1)
            holder: Any = data
            for each in outer:
                holder[each] = holder[each] if isinstance(holder.get(each), dict) else {}
                holder = holder[each]
            holder.setdefault(key, said)


def _older(path: tuple[Any, ...]) -> tuple[Reading, str] | None:
    name = ".".join(map(str, path))
    return next((older for pattern, older in OLDER_KEYS.items() if fnmatchcase(name, pattern)), None)
