"""Estimates the memory of a rank, in bytes, and refuses plans that cannot fit.

Weights, gradients and optimizer after Rajbhandari et al. 2020 (ZeRO, §3 and §5): training in mixed precision with
float32 master weights and Adam takes 4 bytes weight, 4 gradient, 8 optimizer for each parameter, all sharded over the
data-parallel ranks. While it computes, FSDP gathers a layer and the next one in the forward dtype, with what is outside
of layers (a small model as a whole; of one with up to `KEPT_WHOLE` parameters layers stay so), and has as many whole
float32 gradients until they are reduced (Zhao et al. 2023, §3.3); those of a small model become shards after the last
activations, so that the two are never there together. Activations are what transformers' layers keep for the backward
pass (`activation_bytes`; in half precision on a GPU, which takes a quarter less than on a CPU), attention scores not
among them; the float32 logits, their softmax and its gradient (in half precision, by kernels, the logits alone) come on
top (of a value head, the one number of each token). A role that is not trained keeps those of one layer, and its
weights in the forward dtype, or in float32 where they follow another role's. A rank that trains computes one task at a
time: of the memory that a task frees at its end (`_OF_A_TASK`) that of the largest task counts. One that only samples
has all of it at once. On a CPU rows may be padded to 1.25 times their tokens, which is not counted. Of a trained role,
parameters that `freeze` names have neither gradient nor state; their float32 weights are sharded. With low-rank
adapters (Hu et al. 2021) only they are trained. Their model is frozen, in the forward dtype, its norms keep no input to
be scaled, and it lies once on a rank whose rollout shares it (transformers'); a role that copies it shares it too.

`dtype: auto` is counted as the dtype in the model's config.json, and where `Spec.on_cpus` says so as float32.

Tensor and pipeline parallelism divide weights, their states and the cache by their sizes (norms, which each rank has
whole, are a few in ten thousand), tensor parallelism also the activations within attention and feed-forward layers, and
context parallelism the tokens of activations. Megatron divides experts by `ep` and not by tp. Its distributed optimizer
divides only Adam's state and the master weights, and not gradients, by the number of ranks that have the same weights.
A stage keeps activations of a micro-batch for itself and each later stage (Narayanan et al. 2021, §2.2). Of recomputed
layers only the inputs are kept, and of a large vocabulary FSDP makes the logits of `LOGITS_AT_ONCE` / vocabulary tokens
at a time (on a CPU fewer). They are counted of all tokens of a micro-batch, which is cut by tokens: rows of short
prompts are nearly all answer. Offloaded states count for nothing. A role that swaps (MindSpeed RL §3.2) has either what
it trains with or what it samples with, and a frozen one its weights while it computes.

vLLM and SGLang page their cache (Kwon et al. 2023): they take `generation.memory_share` of a GPU for weights and cache
together, and rows that find no page wait. So they do not need a cache of all rows at their longest, and where
`memory_gib` is not known only their weights are counted.

The cache of a rollout (transformers) has the rows that a rank samples at a time: `generation.batch_rows`, or those of a
step or a validation on that rank where they are fewer.

A rollout that validates while it samples has a second cache (transformers), as its answers are sampled at another
temperature.

The dock's samples and the snapshots lie in host memory, which `memory_gib` says nothing of: they are shown and not
added. A run whose snapshots exceed its machine's memory ends before the first one.

Where some ranks have no rows of a role, and so no model of it, that of the rank that needs most is estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from distflow.config.models import adapted, base_of
from distflow.config.run import Generation, RoleRun
from distflow.config.sizes import Shape
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, Location
from distflow.plan import SAMPLING, TRAINING, Layout, MemoryItem, Transfer
from planners.transfers import routing_bytes

GIB = 1024**3
_TRAINING_STATE = 16
_GRADIENT = 4
_MASTER = 4  # bytes of a weight in float32
LOGITS = 3 * 4  # bytes: float32 logits, their softmax and its gradient
_HALF_LOGITS = {True: 2 * 2, False: 2 + 4 + 2}
"""In half precision by kernels, if trained: the logits, of which gradients take the place, and room for others; else
those that the likeliest tokens are sought among, in float32 too."""
LOGITS_AT_ONCE = 2**28
SMALL = 64_000_000  # parameters up to which FSDP gathers a model as a whole
KEPT_WHOLE = 1_000_000_000  # parameters up to which it keeps a model's layers gathered within a step
_HALVES = ("bfloat16", "float16")
PAGED = ("vllm", "sglang")
"""Rollout engines with a paged cache, within a share of the GPU."""
_SAMPLING_WEIGHTS = (": rollout weights", ": rollout engine")
"""Suffixes of memory items' names."""
_OF_A_TASK = ("activations", "swapped weights", "weights while computing", "gradients counted twice", "rollout cache",
              "rollout choices")
"""Kinds of memory items that are there while a task of their role runs."""
_STATE = 4  # bytes of an element of a state, which models keep in float32
Layouts = dict[tuple[str, bool], Layout]
"""Layout of the model of each engine, by role and whether it is the one that samples."""
Rows = Mapping[str, int]
"""Rows that a rank samples at a time, by role."""


class ParameterBytes(NamedTuple):
    """Bytes of a parameter: `whole` on every share, `divided` among the data-parallel shares, and `gathered` while a
    share computes with it, with its gradient. `distflow plan` and the solvers for mixed hardware count with these
    alike."""

    whole: float
    divided: float
    gathered: float = 0

    def with_frozen(self, frozen: int, parameters: int) -> ParameterBytes:
        """Return the mean of a trained model's parameters, of which `freeze` names `frozen`: those are float32 weights
        alone, and where the model is gathered as a whole they have no gradient there."""
        share = frozen / parameters
        idle = share if parameters <= SMALL else 0
        return ParameterBytes(self.whole, self.divided - share * (_TRAINING_STATE - _MASTER),
                              self.gathered - idle * _GRADIENT)

    def with_adapters(self, adapter: ParameterBytes, share: float) -> ParameterBytes:
        """Return the mean of a model's parameters with `share` times as many parameters of adapters."""
        return ParameterBytes(*(own + share * more for own, more in zip(self, adapter)))


def parameter_bytes(engine: str, width: int, trained: bool, follows: bool = False) -> ParameterBytes:
    """Return what an engine keeps of a model whose forward pass has numbers of `width` bytes. `follows`: weights that
    are not trained and change all the same, in float32."""
    if follows and not trained:
        return ParameterBytes(0, _MASTER, width)
    if engine == "megatron":
        return ParameterBytes(width + 4, 8 + 4 * (width == 2)) if trained else ParameterBytes(width, 0)
    return ParameterBytes(0, _TRAINING_STATE, width + _GRADIENT) if trained else ParameterBytes(0, width, width)


def adapted_bytes(width: int, undivided: bool) -> tuple[ParameterBytes, ParameterBytes]:
    """Return what FSDP2 keeps of a frozen model's parameter, which lies whole on each share (`undivided`) or is divided
    and gathered, and of a parameter of its adapters, which are trained."""
    frozen = ParameterBytes(width, 0) if undivided else parameter_bytes("fsdp", width, trained=False)
    return frozen, parameter_bytes("fsdp", width, trained=True)


def gathered_at_once(shape: Shape) -> int:
    """Return how many parameters FSDP gathers at once: a small model's all, else two layers and what is outside."""
    outside = (shape.looked_up or shape.vocabulary * shape.hidden) + shape.vocabulary_head
    layers = 2 * -(-max(shape.parameters - outside, 0) // shape.layers)
    return shape.parameters if shape.parameters <= SMALL else min(shape.parameters, layers + outside)


def stay_gathered(parameters: int, at_once: int) -> int:
    """Return how many parameters FSDP keeps gathered within a step, beside the `at_once` that it computes with."""
    return parameters - at_once if parameters <= KEPT_WHOLE else 0


def bytes_per_logit(engine: str, width: int, trained: bool) -> int:
    """Return the bytes that one logit takes on a GPU while log-probabilities and gradients are computed."""
    return _HALF_LOGITS[trained] if engine == "fsdp" and width < 4 else LOGITS


def activation_bytes(shape: Shape, width: int, frozen: bool = False, fused: bool = False, tp: int = 1) -> int:
    """Return the bytes that a layer keeps of each token for the backward pass: of both norms their input in float32,
    what they scale (unless `frozen`) and their output, and of those of heads the first two; queries, keys and values,
    what attention gives, twice; of the feed-forward layer the gate before and after its activation, the other half, and
    the product. `fused`: in half precision by the kernels that FSDP's models have on a GPU. Of norms these keep the
    input and the output as they are, of those of heads the input, and attention keeps what it gives once. `tp` ranks
    divide all but the norms of a layer."""
    fused, scaled = fused and width < 4, width * (not frozen)
    norms = 2 * shape.hidden * (width + (width if fused else 4 + scaled))
    heads = shape.head_norms * (shape.query_width + shape.kv_width) * (width if fused else 4 + scaled)
    within = width * ((2 if fused else 3) * shape.query_width + 2 * shape.kv_width + 4 * shape.active_widening)
    return norms + (heads + within) // tp


def of_each_kind(spec: Spec, roles: list[str], generating: set[str], layouts: Layouts, rows: Rows,
                 ranks: int) -> list[tuple[MemoryItem, ...]]:
    """Return the memory items of each kind of rank, of `ranks` that train: those whose share of an engine's layout has
    0 rows have nothing of it."""
    there = {engine: {*layouts[engine].active_ranks} for engine in product(roles, (False, True))}
    held = dict.fromkeys(tuple(engine for engine in there if rank in there[engine]) for rank in range(ranks))
    found = []
    for own in held:
        trained, sampled = ({role for role, samples in own if samples == wanted} for wanted in (False, True))
        sampled &= generating
        found.append(estimate(spec, [role for role in roles if role in trained | sampled], sampled, layouts, rows,
                              alone=sampled - trained))
    return found


def estimate(spec: Spec, roles: list[str], generating: set[str], layouts: Layouts, rows: Rows,
             training: bool = True, validated: str | None = None,
             alone: Collection[str] = ()) -> tuple[MemoryItem, ...]:
    """Return the memory items of each rank, largest first. `training`: whether roles have the engine that trains, but
    for those that sample `alone`; else ranks sample, and at the same time infer with roles that do not. `validated`:
    the role that they validate then."""
    items: list[MemoryItem] = []
    for role in roles:
        shape, settings = spec.shape_of(role), spec.settings_of(role)
        if shape and settings and training and role not in alone:
            items += _role_items(spec, role, settings, shape, rows[role] if role in generating else 0, layouts)
        elif shape and settings and role not in generating:
            own = _role_items(spec, role, settings, shape, 0, layouts)
            items += [replace(item, phase=item.phase and SAMPLING) for item in own]
        elif shape and settings:
            tp, width = layouts[role, True].tp, _width(spec, shape, settings)
            items += _phased(_rollout(spec, role, settings, shape, tp, width, False, rows[role]))
            items += _validation(spec, role, settings, shape, tp, width) if role == validated else []
    return tuple(sorted(items, key=lambda item: (-item.bytes, item.name)))


def of_dock(spec: Spec, moves: Iterable[Transfer]) -> tuple[MemoryItem, ...]:
    """Return what the samples between the groups take of the host memory of each machine."""
    step, limit = sum(move.bytes_per_step for move in moves), int(spec.run.dock_gib * GIB)
    formula = f"dock_gib {spec.run.dock_gib:g}; a step's samples at their longest are {_gib(step)}, over all machines"
    return (MemoryItem("dock: samples", limit, formula),)


def of_snapshots(spec: Spec, kinds: Iterable[tuple[MemoryItem, ...]]) -> tuple[MemoryItem, ...]:
    """Return what the copies of the training state after the last two steps take of host memory, for each rank of the
    kind that keeps most; `kinds`: the memory items of each."""
    found = map(_snapshots, kinds) if spec.run.robust.snapshots else ()
    return max(found, key=lambda items: sum(item.bytes for item in items), default=())


def _snapshots(items: Iterable[MemoryItem]) -> tuple[MemoryItem, ...]:
    kept = {item.name: item.bytes * 3 // 4 if item.name.endswith(": training state") else item.bytes for item in items
            if item.name.endswith((": training state", ": following weights"))}
    what = {": training state": "the training state less its gradients", ": following weights": "weights that follow"}
    return tuple(MemoryItem(f"{name.partition(':')[0]}: snapshots, each rank", 2 * size,
                            f"2 × {_gib(size)}, {what[name[name.index(':') :]]}") for name, size in kept.items())


def needed(items: Iterable[MemoryItem]) -> int:
    """Return the bytes of a rank at its fullest: what is always there, with what its largest task adds, and of each
    other role that swaps the larger of its phases."""
    always, phases = 0, dict[str, Counter[str]]()
    tasks: Counter[tuple[str, str]] = Counter()
    for item in items:
        role, _, kind = item.name.partition(": ")
        if kind in _OF_A_TASK:
            tasks[role, item.phase] += item.bytes
        elif item.phase:
            phases.setdefault(role, Counter())[item.phase] += item.bytes
        else:
            always += item.bytes
    if all(phase == SAMPLING for _, phase in tasks):  # in threads of their own
        return always + sum(tasks.values()) + sum(max(sizes.values()) for sizes in phases.values())
    return always + max(size + sum(sizes[phase] if name == role else max(sizes.values())
                                   for name, sizes in phases.items()) for (role, phase), size in tasks.items())


def refuse_overflow(spec: Spec, items: tuple[MemoryItem, ...]) -> list[Diagnostic]:
    """Return a mistake if memory items do not fit a rank, and one for each engine whose weights exceed its share."""
    limit = spec.cluster.memory_gib
    total = needed(items)
    if limit is None or not items:
        return []
    mistakes = [*_beyond_share(spec, items, limit)]
    if total <= limit * GIB:
        return mistakes
    largest = items[0]
    what = (f"a rank needs {_gib(total)} and has {limit:g} GiB. The largest memory item is `{largest.name}` with "
            f"{_gib(largest.bytes)} = {largest.formula}")
    where = spec.cluster_source.location(("memory_gib",)) if spec.cluster_source else Location("cluster")
    return [*mistakes, Diagnostic(what, where, _remedy(spec, items, limit * GIB))]


def _beyond_share(spec: Spec, items: Iterable[MemoryItem], limit: float) -> Iterator[Diagnostic]:
    for weights in items:
        role, _, kind = weights.name.partition(": ")
        settings = spec.settings_of(role)
        if kind != "rollout weights" or settings is None or settings.rollout not in PAGED:
            continue
        what = (f"the `{weights.name}` are {_gib(weights.bytes)} = {weights.formula}, and `rollout: "
                f"{settings.rollout}` may take {settings.generation.memory_share:g} of {limit:g} GiB "
                f"(roles.{role}.generation.memory_share)")
        where = spec.run_source.location(("roles", role, "generation", "memory_share"))
        larger = f"Raise  roles.{role}.generation.memory_share  , or s" if weights.bytes < limit * GIB else "S"
        yield Diagnostic(what, where, f"{larger}plit the model over more ranks:  layouts: {{NODE: {{tp: N}}}}")


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 1024**2:.2f} MiB"


def _remedy(spec: Spec, items: tuple[MemoryItem, ...], limit: float) -> str:
    for role in {item.name.partition(":")[0] for item in items if item.name.endswith(_SAMPLING_WEIGHTS)}:
        phased = tuple(_in_phase(item) if item.name.startswith(f"{role}:") else item for item in items)
        if spec.dag.roles[role].trained and needed(phased) <= limit < needed(items):
            return f"Let it have one engine's memory at a time:  roles.{role}.swap: true"
    role, _, kind = items[0].name.partition(": ")
    if kind == "weights while computing":
        return "Split the model:  layouts: {NODE: {tp: N}}"
    if kind == "activations":
        return f"Lower  roles.{role}.micro_batch_tokens"
    if kind in ("rollout cache", "validation cache"):
        return f"Lower  roles.{role}.generation.batch_rows  or  roles.{role}.generation.max_new_tokens"
    if kind == "rollout engine":
        return f"Lower  roles.{role}.generation.memory_share"
    if kind in ("training state", "following weights", "frozen weights", "swapped weights", "weights"):
        return "Use more ranks, which divide it, or a smaller model."
    return "Use a smaller model, or  dtype: bfloat16"


def _phased(items: Iterable[MemoryItem]) -> list[MemoryItem]:
    return [_in_phase(item) if item.name.partition(": ")[2] in _OF_A_TASK else item for item in items]


def _in_phase(item: MemoryItem) -> MemoryItem:
    return replace(item, phase=SAMPLING if ": rollout" in item.name else TRAINING)


def _width(spec: Spec, shape: Shape, settings: RoleRun) -> int:
    automatic = "float32" if spec.on_cpus else shape.dtype
    return 2 if (automatic if settings.dtype == "auto" else settings.dtype) in _HALVES else 4


def _role_items(spec: Spec, role: str, settings: RoleRun, shape: Shape, rows: int,
                layouts: Layouts) -> list[MemoryItem]:
    """Return the items of a role that samples `rows` rows at a time, 0: that does not."""
    generates = rows > 0
    valued, trained = spec.dag.roles[role].head == "value", spec.dag.roles[role].trained
    shape = shape.with_value_head() if valued else shape
    outputs = shape.labels or shape.vocabulary
    width = _width(spec, shape, settings)
    own, sampling = layouts[role, False], layouts[role, True]
    own = replace(own, dp=len(own.active_shares), rows=())
    shared = not generates and base_of(spec, role) is not None
    has_adapters = adapted(spec, role) is not None
    shares = has_adapters and settings.rollout not in PAGED
    if has_adapters:
        items = _adapted_weights(spec, role, shape, shares and generates, own.dp * own.cp, width)
    else:
        items = [] if shared else _weights(spec, role, settings, shape, own, width)
    items.append(_activations(role, settings, shape, trained, own, width, outputs, has_adapters))
    if generates:
        items += _rollout(spec, role, settings, shape, sampling.tp, width, shares, rows)
    elif settings.swap and not settings.offload:
        items = [replace(item, name=f"{role}: swapped weights") if item.name == f"{role}: weights" else item
                 for item in items]
    swaps = settings.swap and generates and trained
    return [_in_phase(item) for item in items] if swaps else _phased(items)


def _rollout(spec: Spec, role: str, settings: RoleRun, shape: Shape, tp: int, width: int,
             shares: bool, rows: int) -> list[MemoryItem]:
    generation, limit = settings.generation, spec.cluster.memory_gib
    weights = [] if shares else [MemoryItem(f"{role}: rollout weights", -(-shape.parameters * width // tp),
                                                  f"{shape.parameters:,} × {width} B{_by(tp=tp)}")]
    if settings.rollout in PAGED:
        share = int(generation.memory_share * (limit or 0) * GIB)
        if limit is None or sum(item.bytes for item in weights) > share:
            return weights
        return [MemoryItem(f"{role}: rollout engine", share,
                           f"memory_share {generation.memory_share:g} × {limit:g} GiB, weights and cache")]
    cache = _cache(f"{role}: rollout cache", spec, settings, generation.max_new_tokens, shape, tp, width, rows)
    return [*weights, cache, *_choices(spec, role, generation, rows)]


def _choices(spec: Spec, role: str, generation: Generation, rows: int) -> list[MemoryItem]:
    """Return the experts that are recorded of the answers under way."""
    prompts, each = spec.run.data.max_prompt_tokens, routing_bytes(spec, role)
    each = each * generation.max_new_tokens // (prompts + generation.max_new_tokens)
    return [MemoryItem(f"{role}: rollout choices", rows * each, f"{_at_once(rows, generation)} × {each:,} B of experts")
            ] if each else []


def _validation(spec: Spec, role: str, settings: RoleRun, shape: Shape, tp: int, width: int) -> list[MemoryItem]:
    """Return the second cache of a rollout that validates while its prompts are sampled: pages are of one for all."""
    if settings.rollout in PAGED or spec.run.validation is None:
        return []
    return [_cache(f"{role}: validation cache", spec, settings, settings.generation.max_new_tokens, shape, tp, width,
                   settings.generation.batch_rows)]


def _cache(name: str, spec: Spec, settings: RoleRun, new_tokens: int, shape: Shape, tp: int, width: int,
           rows: int) -> MemoryItem:
    """Return the cache of `rows` rows at their longest. Slots have room to grow and keep rows whole; a model's own
    cache drops what is behind a window."""
    length = new_tokens + spec.run.data.max_prompt_tokens
    length += 0 if shape.plain else length // 4
    kinds = [(kind, min(length, kind.window) if kind.window and shape.plain else length) for kind in shape.attending]
    each = sum(kind.layers * kind.cached * kept for kind, kept in kinds) * width + _STATE * shape.state
    parts = [f"{kept:,} tokens × {kind.layers} layers × {kind.cached * width:,} B" for kind, kept in kinds]
    parts += [f"{_STATE * shape.state:,} B of state"] if shape.state else []
    of_a_row = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
    return MemoryItem(name, rows * each // tp, f"{_at_once(rows, settings.generation)} × {of_a_row}{_by(tp=tp)}")


def _at_once(rows: int, generation: Generation) -> str:
    """Return how many rows are sampled at a time, and why so few."""
    return f"{rows:,} rows" if rows == generation.batch_rows else \
        f"min(batch_rows {generation.batch_rows:,}, {rows:,} of a step or validation) rows"


def _activations(role: str, settings: RoleRun, shape: Shape, trained: bool, layout: Layout, width: int,
                 outputs: int, frozen: bool) -> MemoryItem:
    tokens, kept = -(-settings.micro_batch_tokens // layout.cp), _largest_stage(shape, layout) if trained else 1
    fused = settings.engine == "fsdp" and layout.tp == 1
    per_layer, inputs = activation_bytes(shape, width, frozen, fused, layout.tp), 0
    if settings.recomputes(shape.parameters) and trained:
        kept, inputs = 1, kept * width * shape.hidden
    logits = tokens * -(-outputs // layout.tp)
    if settings.engine == "fsdp":
        logits = min(logits, max(LOGITS_AT_ONCE, outputs))
    plus = f" + {inputs:,} of inputs" if inputs else ""
    each, stages = bytes_per_logit(settings.engine, width, trained), layout.pp if trained else 1
    times = f"{stages} micro-batches × " if stages > 1 else ""
    return MemoryItem(f"{role}: activations", stages * tokens * (kept * per_layer + inputs) + each * logits,
                      f"{times}{tokens:,} tokens × ({kept} layer{'s' * (kept > 1)} × {per_layer:,}{plus}) B + "
                      f"{logits:,} logits × {each} B")


def _weights(spec: Spec, role: str, settings: RoleRun, shape: Shape, layout: Layout, width: int) -> list[MemoryItem]:
    trained = spec.dag.roles[role].trained
    mine, cut = -(-shape.parameters // layout.tp), _by(tp=layout.tp)
    shares = max(layout.dp * layout.cp // settings.replicas, 1)  # of too few ranks the layout says so
    follows = spec.dag.roles[role].follow is not None
    held = parameter_bytes(settings.engine, width, trained, follows)
    frozen = min(spec.frozen.get(role, 0), shape.parameters) if trained else 0
    name = "training state" if trained else "following weights" if follows else "weights"
    if settings.engine == "megatron":
        return [_of_a_stage(f"{role}: {name}", shape, layout, held)]
    n, small = shape.parameters, shape.parameters <= SMALL
    own, idle, at_once = mine * (n - frozen) // n, frozen if small else 0, gathered_at_once(shape)
    items = [] if settings.offload else [MemoryItem(f"{role}: {name}", int(-(-own * held.divided // shares)),
                                                    f"{n - frozen:,} × {held.divided} B / dp {shares}{cut}")]
    if frozen and not settings.offload:
        items.append(MemoryItem(f"{role}: frozen weights", -(-(mine - own) * _MASTER // shares),
                                f"{frozen:,} × {_MASTER} B / dp {shares}{cut}"))
    less = f" - {idle:,} frozen × {_GRADIENT} B" if idle else ""
    stay = 0 if settings.offload else stay_gathered(n, at_once)
    more = f" + {stay:,} that stay gathered × {width} B" if stay else ""
    items.append(MemoryItem(f"{role}: weights while computing",
                            int(-(-mine * at_once // n) * held.gathered) + mine * stay // n * width
                            - mine * idle // n * _GRADIENT,
                            f"{at_once:,} gathered at once × {held.gathered} B{more}{less}{cut}"))
    if trained and not settings.offload and small:
        items.append(MemoryItem(f"{role}: gradients counted twice", -(own * _GRADIENT // shares),
                                f"-{n - frozen:,} × {_GRADIENT} B / dp {shares}{cut}"))
    return items


def _of_a_stage(name: str, shape: Shape, layout: Layout, held: ParameterBytes) -> MemoryItem:
    """Return what Megatron keeps on a rank of the largest stage. Experts are whole, and as many ranks have the same of
    them as the stage has for each cut."""
    dense, ranks = shape.parameters - shape.expert_parameters, layout.dp * layout.cp * layout.tp
    parts = [(count, axis, ways) for count, axis, ways in (
        (dense, "tp", layout.tp), (shape.expert_parameters, "ep", layout.ep)) if count]
    size = 0.0
    for count, _, ways in parts:
        mine = -(-count * _largest_stage(shape, layout) // (shape.layers * ways))
        size += mine * held.whole - (-mine * held.divided // (ranks // ways))
    formula = " + ".join(f"{count:,}{_by(**{axis: ways, 'pp': layout.pp})} × ({held.whole} B + {held.divided} B"
                         f"{_by(dp=ranks // ways)})" for count, axis, ways in parts)
    return MemoryItem(name, int(size), formula)


def _largest_stage(shape: Shape, layout: Layout) -> int:
    return max(map(len, layout.stages(shape.layers)))


def _by(**sizes: int) -> str:
    return "".join(f" / {name} {size}" for name, size in sizes.items() if size > 1)


def _adapted_weights(spec: Spec, role: str, shape: Shape, shares: bool, dp: int, width: int) -> list[MemoryItem]:
    n = shape.parameters
    count = next((spec.adapters[name] for name in spec.lineage(role) if name in spec.adapters), 0)
    base, adapter = adapted_bytes(width, shares)
    computing = f"{n:,} × {base.gathered} B + " if base.gathered else ""
    items = [MemoryItem(f"{role}: training state", int(-(-count * adapter.divided // dp)),
                        f"{count:,} of adapters × {adapter.divided} B / dp {dp}"),
             MemoryItem(f"{role}: weights while computing", int(n * base.gathered + count * adapter.gathered),
                        f"{computing}{count:,} of adapters × {adapter.gathered} B")]
    if shares:  # training computes with the rollout's own base
        return [*items, MemoryItem(f"{role}: weights", int(n * base.whole),
                                   f"{n:,} × {base.whole} B, shared with the rollout"),
                MemoryItem(f"{role}: rollout adapters", count * width, f"{count:,} × {width} B")]
    return [*items, MemoryItem(f"{role}: weights", int(-(-n * base.divided // dp)),
                               f"{n:,} × {base.divided} B / dp {dp}")]
