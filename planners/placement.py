"""Where each node runs. Sync mode: all ranks form one group, and a node uses all of them unless the run says less."""

from __future__ import annotations

from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.plan import Layout
from distflow.schema.spec import Spec


def place(spec: Spec, ranks: int) -> tuple[dict[str, Layout], list[Mistake]]:
    """The layout of each node, and the layouts that `ranks` cannot host."""
    mistakes, source = _check_ranks(spec, ranks), spec.run_source
    for name in spec.run.layouts:
        if name not in spec.dag.nodes:
            what = f"`layouts` names `{name}`, which is not a node of DAG `{spec.dag.name}`"
            where = source.spot(("layouts", name), key=True)
            mistakes.append(Mistake(what, where, did_you_mean(name, spec.dag.nodes, "Nodes")))
    layouts = {}
    for name, node in spec.dag.nodes.items():
        dp = (spec.run.layouts[name].dp if name in spec.run.layouts else None) or ranks
        where = source.spot(("layouts", name, "dp"))
        if dp > ranks > 0:
            there = "is only 1 rank" if ranks == 1 else f"are only {ranks} ranks"
            hint = f"Start {dp} ranks (--nproc-per-node {dp}), or instead:  layouts: {{{name}: {{dp: {ranks}}}}}"
            mistakes.append(Mistake(f"node `{name}` wants dp {dp}, but there {there}", where, hint))
        elif dp < ranks and node.type == "MODEL_TRAIN":
            what = (f"node `{name}` trains on {dp} of {ranks} ranks; in sync mode a trained role is sharded over all "
                    "ranks, so its MODEL_TRAIN nodes run on all of them")
            mistakes.append(Mistake(what, where, f"Leave `{name}` out of `layouts`."))
        layouts[name] = Layout(min(dp, ranks))
    return layouts, mistakes


def _check_ranks(spec: Spec, ranks: int) -> list[Mistake]:
    if ranks < 1:
        return [Mistake(f"a plan needs at least 1 rank, not {ranks}")]
    has = spec.cluster.ranks
    if has is not None and ranks > has and spec.cluster_source:
        what = f"cluster `{spec.cluster.name}` has {has} rank{'s' * (has > 1)}, and the plan is for {ranks}"
        return [Mistake(what, spec.cluster_source.spot(("ranks",)), f"Start {has}, or plan for another cluster.")]
    return []
