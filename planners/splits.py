"""Checks whether a model can be split as a layout requests: by its engine, and by its heads, layers and experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distflow.config.models import ROLLOUTS, TRAINERS
from distflow.config.sizes import Shape
from distflow.config.spec import Spec
from distflow.errors import Diagnostic


def check_split(spec: Spec, node: str, engine: tuple[str, bool], split: dict[str, int],
                layers: Sequence[int] = ()) -> list[Diagnostic]:
    """Return why an engine's model cannot be split so, with so many `layers` in each stage (empty: equally many)."""
    role, samples = engine
    settings, shape = spec.settings_of(role), spec.shape_of(role)
    if settings is None:
        return []
    key, name = ("rollout", settings.rollout) if samples else ("engine", settings.engine)
    cannot = (ROLLOUTS if samples else TRAINERS)[name].cannot
    asked = {size: count for size, count in split.items() if count > 1}
    mistakes = []
    for size, count in asked.items():
        where = spec.run_source.location(("layouts", node, size))
        if why := cannot.get(size) or (cannot.get(f"{size} on CPUs") if spec.on_cpus else None):
            what = f"node `{node}` wants {size} {count} of `{key}: {name}`, which it cannot do: {why}"
            mistakes.append(Diagnostic(what, where, f"Leave `{size}` out."))
        elif shape and size == "pp" and layers:
            mistakes += _odd_stages(spec, node, shape, count, layers)
        elif shape:
            mistakes += [Diagnostic(f"node `{node}` wants {size} {count}, but {what}", where, hint)
                         for what, hint in _misfits(shape, role, size, count, name)]
    if samples and split["ep"] not in (1, split["tp"]) and not mistakes:
        what = (f"node `{node}` wants ep {split['ep']} and tp {split['tp']} of `{key}: {name}`, which divides experts "
                "over the ranks of one engine")
        return [Diagnostic(what, spec.run_source.location(("layouts", node, "ep")), f"Instead:  ep: {split['tp']}")]
    return mistakes if samples else [*mistakes, *_together(spec, node, role, asked)]


def _odd_stages(spec: Spec, node: str, shape: Shape, stages: int, layers: Sequence[int]) -> Iterator[Diagnostic]:
    if len(layers) != stages or sum(layers) != shape.layers:
        fair = [shape.layers // stages + (stage < shape.layers % stages) for stage in range(stages)]
        yield Diagnostic(f"node `{node}` says {sum(layers)} layers in {len(layers)} stages, and has {shape.layers} in "
                         f"{stages} (pp)", spec.run_source.location(("layouts", node, "layers")),
                         f"As in  layers: {fair}")


def _together(spec: Spec, node: str, role: str, asked: dict[str, int]) -> Iterator[Diagnostic]:
    settings, seeing = spec.run.roles.get(role), spec.run.data.images is not None
    if settings is None:
        return
    cutting = {size: count for size, count in asked.items() if size in ("tp", "cp")}
    for key, wished, sizes, why in (
            ("lora", settings.lora, asked, "adapters are trained whole"),
            ("images", seeing, cutting, "the part of a model that sees is not split"),
            ("routing_replay", settings.generation.routing_replay and settings.engine == "fsdp", {"cp"} & asked.keys(),
             "fsdp replays experts for whole rows")):
        if wished and sizes:
            own = key in type(settings).model_fields
            where = spec.run_source.location(("roles", role, key) if own else ("layouts", node), key=own)
            yield Diagnostic(f"role `{role}` has `{key}`, and node `{node}` splits its model: {why}", where,
                             f"Leave  {', '.join(sizes)}  of `{node}` out" + (f", or `{key}`." if own else "."))


def _misfits(shape: Shape, role: str, size: str, count: int, engine: str) -> Iterator[tuple[str, str]]:
    wide = [("units in its feed-forward layers", shape.widening)] if shape.widening else []
    experts = [("experts", shape.experts)] if shape.experts and engine == "fsdp" else []
    parts = {"tp": [("attention heads", shape.heads), ("key-value heads", shape.kv_heads), *wide, *experts],
             "pp": [("layers", shape.layers)], "ep": [("experts", shape.experts)], "cp": []}[size]
    for what, number in parts:
        if not number:
            yield f"the model of role `{role}` has no {what}", f"Leave `{size}` out."
        elif number % count:
            most = min(other for _, other in parts)
            fitting = [str(part) for part in range(1, most + 1) if not any(other % part for _, other in parts)]
            yield (f"the model of role `{role}` has {number} {what}, which {count} does not divide",
                   f"One of  {size}: {', '.join(fitting)}")
            return
