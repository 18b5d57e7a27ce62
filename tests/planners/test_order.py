"""Nodes run by depth, one at a time, with as few model switches as depth order allows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import DIAMOND, node

from distflow.config.dag import Dag
from planners.order import serialize


def switches(dag: Dag, order: Iterable[str]) -> int:
    """How often another model has to be made resident; COMPUTE nodes need none."""
    roles = [dag.nodes[name].role for name in order if dag.nodes[name].type != "COMPUTE"]
    return sum(role != before for role, before in zip(roles, ["", *roles]))


@st.composite
def dags(draw) -> Dag:
    nodes, names = {}, [f"n{index}" for index in range(draw(st.integers(1, 7)))]
    for index, name in enumerate(names):
        kind = draw(st.sampled_from(["MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE"]))
        before = draw(st.sets(st.sampled_from(names[:index]), max_size=2)) if index else set()
        nodes[name] = {"role": draw(st.sampled_from("abc")), "type": kind, "dependencies": sorted(before)}
    return Dag.model_validate({"name": "x", "nodes": nodes})


def _graph(dag: Dag) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(dag.nodes)
    graph.add_edges_from((other, name) for name, item in dag.nodes.items() for other in item.dependencies)
    return graph


@settings(max_examples=150)
@given(dags())
def test_no_depth_order_switches_models_less_often(dag):
    graph = _graph(dag)
    order, added = serialize(dag, graph)
    levels = [sorted(level) for level in nx.topological_generations(graph)]
    assert sorted(order) == sorted(dag.nodes)
    assert [sorted(level) for level in _cut(order, map(len, levels))] == levels
    assert list(added) == [pair for level in _cut(order, map(len, levels)) for pair in itertools.pairwise(level)]
    every = itertools.product(*(itertools.permutations(level) for level in levels))
    assert switches(dag, order) == min(switches(dag, itertools.chain(*each)) for each in every)


def _cut(items: list[str], lengths: Iterable[int]) -> list[list[str]]:
    rest = iter(items)
    return [list(itertools.islice(rest, length)) for length in lengths]


def test_equal_depth_is_chained_and_reported(plan_of):
    plan = plan_of(DIAMOND)
    assert [task.node for task in plan.tasks] == ["learn", "sample", "left", "right", "join"]
    assert plan.added == (("learn", "sample"), ("left", "right"))


def test_the_order_of_keys_does_not_matter(plan_of):
    nodes = {**DIAMOND, "critic": node("judge", "sample", role="critic"), "judge": node("judge", "sample")}
    digests, picker = set(), random.Random(0)
    for _ in range(8):
        shuffled = picker.sample(list(nodes), len(nodes))
        entries = {name: dict(picker.sample(list(nodes[name].items()), len(nodes[name]))) for name in shuffled}
        digests.add(plan_of(entries, {"critic": {"copy_of": "actor"}}).digest)
    assert len(digests) == 1
