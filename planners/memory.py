"""What one rank's memory must hold. Formulas after Rajbhandari et al. 2020 (ZeRO, §3 and §5), in bytes.

Training in mixed precision with float32 master weights and Adam: 4 bytes weight, 4 gradient, 8 optimizer, all
sharded over the data-parallel ranks, and one unsharded copy in the forward dtype while a step computes.
"""

from __future__ import annotations

from distflow.schema.errors import Mistake
from distflow.schema.plan import Tenant
from distflow.schema.spec import Shape, Spec

GIB = 1024**3


def estimate(spec: Spec, roles: list[str], generating: set[str], dp: int) -> tuple[Tenant, ...]:
    """The tenants of each rank, largest first."""
    tenants: list[Tenant] = []
    for role in roles:
        shape = _shape(spec, role)
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
    what = (f"a rank needs {total / GIB:.2f} GiB and has {limit:.2f}. The largest tenant is {largest.name} with "
            f"{largest.bytes / GIB:.2f} GiB ({largest.formula})")
    return [Mistake(what, None, _remedy(largest))]


def _remedy(largest: Tenant) -> str:
    if "activations" in largest.name:
        return "Lower roles.ROLE.micro_batch_tokens."
    if "cache" in largest.name:
        return "Lower roles.ROLE.generation.batch_rows or max_new_tokens."
    return "Use more ranks (the training state is divided between them), or a smaller model."


def _shape(spec: Spec, role: str) -> Shape | None:
    while role not in spec.shapes and role in spec.dag.roles and spec.dag.roles[role].copy_of:
        role = spec.dag.roles[role].copy_of  # type: ignore[assignment]
    return spec.shapes.get(role)


def _role_tenants(spec: Spec, role: str, shape: Shape, generates: bool, dp: int) -> list[Tenant]:
    settings = spec.run.roles.get(role) or spec.run.roles.get(spec.dag.roles[role].copy_of or "")
    width = 2 if settings and settings.dtype == "bfloat16" else 4
    n = shape.parameters
    trained = spec.dag.roles[role].trained
    state = 16 if trained else 4
    tenants = [Tenant(f"{role}: {'training state' if trained else 'weights'}", n * state // dp, f"{n:,} × {state} B / dp {dp}"),
               Tenant(f"{role}: weights while computing", n * width, f"{n:,} × {width} B")]
    if settings:
        tokens = settings.micro_batch_tokens
        per_token = shape.layers * 34 * shape.hidden + 3 * 4 * shape.vocabulary
        tenants.append(Tenant(f"{role}: activations", tokens * per_token,
                              f"{tokens:,} tokens × ({shape.layers} layers × 34 × {shape.hidden} + 12 × {shape.vocabulary}) B"))
    if generates and settings:
        length = settings.generation.max_new_tokens + spec.run.data.max_prompt_tokens
        rows = settings.generation.batch_rows
        cache = rows * length * shape.layers * shape.kv_width * 2 * width
        tenants += [Tenant(f"{role}: rollout weights", n * width, f"{n:,} × {width} B"),
                    Tenant(f"{role}: rollout cache", cache, f"{rows} rows × {length} tokens × {shape.layers} layers × "
                                                            f"{2 * shape.kv_width} × {width} B")]
    return tenants
