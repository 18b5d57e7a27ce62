"""What moves between layouts: 2 → 1 → 2 data-parallel shares."""

from __future__ import annotations

from planning import DIAMOND, LEARN, LEARN_JOINED, node

from distflow.plan import SOURCE, Layout

NODES = {**DIAMOND, "learn": LEARN_JOINED}


def edges(plan) -> dict[tuple[str, str], tuple]:
    return {(edge.producer, task.node): (edge.kind, edge.columns, edge.bytes_per_step)
            for task in plan.tasks for edge in task.transfers}


def test_one_layout_moves_nothing(plan_of):
    assert {kind for kind, _, _ in edges(plan_of(NODES)).values()} == {"local"}
    assert {size for _, _, size in edges(plan_of(NODES)).values()} == {0}


def test_two_to_one_to_two(plan_of):
    roles = {"actor": {"model": {"architecture": "qwen3"}, "generation": {"max_new_tokens": 50}}}
    plan = plan_of(NODES, layouts={"join": {"dp": 1}}, roles=roles)
    rows, copies, longest = 10, 2, 50
    assert edges(plan) == {
        (SOURCE, "sample"): ("local", ("prompts",), 0),
        ("sample", "left"): ("local", ("samples",), 0),
        ("sample", "right"): ("local", ("samples",), 0),
        ("left", "join"): ("all_to_all", ("left",), rows * copies * 4),
        ("right", "join"): ("all_to_all", ("right",), rows * copies * 4 * longest),
        (SOURCE, "join"): ("all_to_all", ("questions",), rows * 4 * 30),
        (SOURCE, "learn"): ("local", ("targets",), 0),
        ("join", "learn"): ("all_to_all", ("joined",), rows * copies * 4),
    }
    assert {task.node: task.layout for task in plan.tasks} == {
        "sample": Layout(2), "left": Layout(2), "right": Layout(2), "join": Layout(1), "learn": Layout(2)}


def test_edges_inside_the_smaller_layout_are_local(plan_of):
    plan = plan_of(NODES, layouts={name: {"dp": 1} for name in ("left", "right", "join")})
    kinds = {edge: kind for edge, (kind, _, _) in edges(plan).items()}
    assert kinds["left", "join"] == kinds["right", "join"] == "local"
    assert kinds["sample", "left"] == kinds["sample", "right"] == kinds["join", "learn"] == "all_to_all"


def test_the_source_is_read_in_the_layout_of_its_first_reader(plan_of):
    early = {"learn": {**LEARN, "dependencies": ["stamp"]}, "stamp": node("stamp")}
    plan = plan_of(early, layouts={"stamp": {"dp": 1}})
    assert plan.source == Layout(1)
    assert edges(plan)[SOURCE, "learn"] == ("all_to_all", ("targets",), 10 * 8 * 20)
