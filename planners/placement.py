"""Where each node runs. Sync mode: all ranks form one group, and a node uses all of them unless the run says less."""

from __future__ import annotations

from distflow.schema.errors import Mistake, did_you_mean
from distflow.schema.plan import Layout
from distflow.schema.spec import Spec


def place(spec: Spec, ranks: int) -> tuple[dict[str, Layout], list[Mistake]]:
    """The layout of each node, and the layouts that `ranks` cannot host."""
    layouts, mistakes, source = {}, [], spec.run_source
    for name in spec.run.layouts:
        if name not in spec.dag.nodes:
            what = f"`layouts` names `{name}`, which is not a node of DAG `{spec.dag.name}`"
            where = source.spot(("layouts", name), key=True)
            mistakes.append(Mistake(what, where, did_you_mean(name, spec.dag.nodes)))
    for name, node in spec.dag.nodes.items():
        wanted = spec.run.layouts[name].dp if name in spec.run.layouts else None
        dp = wanted or ranks
        if dp > ranks:
            what = f"node `{name}` wants dp {dp}, but there {'is' if ranks == 1 else 'are'} only {ranks} rank{'s' * (ranks > 1)}"
            hint = f"Instead:  torchrun --nproc-per-node {dp} …   or   layouts: {{{name}: {{dp: {ranks}}}}}"
            mistakes.append(Mistake(what, source.spot(("layouts", name, "dp")), hint))
        elif dp < ranks and node.type == "MODEL_TRAIN":
            what = (f"node `{name}` trains on {dp} of {ranks} ranks; in sync mode a trained role is sharded over all "
                    "ranks, so its MODEL_TRAIN nodes run on all of them")
            mistakes.append(Mistake(what, source.spot(("layouts", name, "dp")), f"Leave `{name}` out of `layouts`."))
        layouts[name] = Layout(min(dp, ranks))
    return layouts, mistakes
