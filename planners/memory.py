"""What one rank's memory must hold, in bytes.

Weights, gradients and optimizer after Rajbhandari et al. 2020 (ZeRO, §3 and §5): training in mixed precision with
float32 master weights and Adam takes 4 bytes weight, 4 gradient, 8 optimizer for each parameter, all sharded over the
data-parallel ranks, and one unsharded copy in the forward dtype while a step computes. Activations after Korthikanti
et al. 2022 (§4.1): 34 bytes for each token, layer and hidden element at 2 bytes a value, attention scores not kept;
the float32 logits, their softmax and its gradient come on top (of a value head, the one number of each token). A role
that is not trained keeps those of one layer.

With low-rank adapters (Hu et al. 2021) only they are trained. Their model is frozen, in the forward dtype, and lies
once on a rank whose rollout shares it; a role that copies it shares it too.

`dtype: auto` is counted as what the model's config.json says that its weights are, for want of knowing the device.
"""

from __future__ import annotations

from distflow.schema.errors import Mistake, Spot
from distflow.schema.lora import adapted, base_of
from distflow.schema.plan import Tenant
from distflow.schema.spec import Shape, Spec

GIB = 1024**3
_TRAINING_STATE = 16
_ACTIVATIONS = 17
_LOGITS = 3 * 4
_HALVES = ("bfloat16", "float16")


def estimate(spec: Spec, roles: list[str], generating: set[str], dp: int) -> tuple[Tenant, ...]:
    """The tenants of each rank, largest first."""
    tenants: list[Tenant] = []
    for role in roles:
        shape = spec.shape_of(role)
        if shape:
            tenants += _role_tenants(spec, role, shape, role in generating, dp)
    return tuple(sorted(tenants, key=lambda tenant: (-tenant.bytes, tenant.name)))


def refuse_overflow(spec: Spec, tenants: tuple[Tenant, ...]) -> list[Mistake]:
    """A mistake if the tenants do not fit the cluster's ranks; names the largest."""
    limit = spec.cluster.memory_gib
    total = sum(tenant.bytes for tenant in tenants)
    if limit is None or not tenants or total <= limit * GIB:
        return []
    largest = tenants[0]
    what = (f"a rank needs {_gib(total)} and has {limit:g} GiB. The largest tenant is `{largest.name}` with "
            f"{_gib(largest.bytes)} = {largest.formula}")
    where = spec.cluster_source.spot(("memory_gib",)) if spec.cluster_source else Spot("cluster")
    return [Mistake(what, where, _remedy(largest))]


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 1024**2:.2f} MiB"


def _remedy(largest: Tenant) -> str:
    role, _, kind = largest.name.partition(": ")
    if kind == "activations":
        return f"Lower  roles.{role}.micro_batch_tokens"
    if kind == "rollout cache":
        return f"Lower  roles.{role}.generation.batch_rows  or  roles.{role}.generation.max_new_tokens"
    if kind in ("training state", "weights"):
        return "Use more ranks, which divide it, or a smaller model."
    return "Use a smaller model, or  dtype: bfloat16"


def _role_tenants(spec: Spec, role: str, shape: Shape, generates: bool, dp: int) -> list[Tenant]:
    settings = spec.settings_of(role)
    if settings is None:
        return []
    valued = spec.dag.roles[role].head == "value"
    shape, outputs = (shape.with_value_head(), 1) if valued else (shape, shape.vocabulary)
    width = 2 if (shape.dtype if settings.dtype == "auto" else settings.dtype) in _HALVES else 4
    shared = not generates and base_of(spec, role) is not None
    if adapted(spec, role):
        tenants = _adapted_weights(spec, role, shape, generates, dp, width)
    else:
        tenants = [] if shared else _weights(spec, role, shape, generates, dp, width)
    tokens, kept = settings.micro_batch_tokens, shape.layers if spec.dag.roles[role].trained else 1
    per_layer = _ACTIVATIONS * width * shape.hidden
    tenants.append(Tenant(f"{role}: activations", tokens * (kept * per_layer + _LOGITS * outputs),
                          f"{tokens:,} tokens × ({kept} layer{'s' * (kept > 1)} × {per_layer:,} + {_LOGITS} × "
                          f"{outputs:,}) B"))
    if generates:
        length = settings.generation.max_new_tokens + spec.run.data.max_prompt_tokens
        rows = settings.generation.batch_rows
        per_token = 2 * shape.kv_width * width
        tenants.append(Tenant(f"{role}: rollout cache", rows * length * shape.layers * per_token,
                              f"{rows:,} rows × {length:,} tokens × {shape.layers} layers × {per_token:,} B"))
    return tenants


def _weights(spec: Spec, role: str, shape: Shape, generates: bool, dp: int, width: int) -> list[Tenant]:
    n, trained = shape.parameters, spec.dag.roles[role].trained
    state, held = _TRAINING_STATE if trained else 4, "training state" if trained else "weights"
    whole = f"{n:,} × {width} B"
    tenants = [Tenant(f"{role}: {held}", -(-n * state // dp), f"{n:,} × {state} B / dp {dp}"),
               Tenant(f"{role}: weights while computing", n * width, whole)]
    return tenants + [Tenant(f"{role}: rollout weights", n * width, whole)] * generates


def _adapted_weights(spec: Spec, role: str, shape: Shape, generates: bool, dp: int, width: int) -> list[Tenant]:
    n = shape.parameters
    count = next((spec.adapters[name] for name in spec.lineage(role) if name in spec.adapters), 0)
    tenants = [Tenant(f"{role}: training state", -(-count * _TRAINING_STATE // dp),
                      f"{count:,} of adapters × {_TRAINING_STATE} B / dp {dp}"),
               Tenant(f"{role}: weights while computing", (n + count) * width,
                      f"({n:,} + {count:,} of adapters) × {width} B")]
    if generates:  # training computes with the rollout's own base
        return [*tenants, Tenant(f"{role}: rollout adapters", count * width, f"{count:,} × {width} B")]
    return [*tenants, Tenant(f"{role}: weights", -(-n * width // dp), f"{n:,} × {width} B / dp {dp}")]
