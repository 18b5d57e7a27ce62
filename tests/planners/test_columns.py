"""Who reads what from whom, and on which rows."""

from __future__ import annotations

import pytest
from planning import DIAMOND, LEARN, LEARN_JOINED, node

from distflow.contracts.forms import plain_form
from distflow.contracts.functions import built_in
from distflow.errors import InvalidInput
from distflow.plan import SOURCE, Column, Task
from planners.columns import fits


def task(plan, name: str) -> Task:
    (found,) = [each for each in plan.tasks if each.node == name]
    return found


def test_a_diamond_keeps_both_inputs_of_its_join(plan_of):
    join = task(plan_of(DIAMOND), "join")
    assert join.reads == (Column("left", "left", "left", "Tensor"), Column("right", "right", "right", "Ragged"),
                          Column("questions", "questions", SOURCE, "list[str]"))
    assert [(edge.producer, edge.columns, edge.kind) for edge in join.transfers] == [
        ("left", ("left",), "local"), ("right", ("right",), "local"), (SOURCE, ("questions",), "local")]


def test_rows_that_are_repeated_twice(plan_of):
    plan = plan_of({"sample": node("sample", **{"with": {"copies": 4}}), "again": node("resample", "sample"),
                    "left": node("left", "again", reads={"samples": "again"}), "right": node("right", "sample"),
                    "join": node("join", "left", "right")})
    facts = {each.node: (each.repeats, each.fan, each.out_fan) for each in plan.tasks}
    assert facts["sample"] == (4, (), ("sample",))
    assert facts["again"] == (3, ("sample",), ("sample", "again"))
    assert facts["right"] == (1, ("sample",), ("sample",))
    assert facts["join"] == (1, ("sample", "again"), ("sample", "again"))


def test_renames_and_roles_in_names(plan_of):
    nodes = {"sample": node("sample", writes={"samples": "answers_"}),
             "judge": node("judge", "sample", role="critic", reads={"samples": "answers_"}),
             "other": node("judge", "sample", reads={"samples": "answers_"}, writes={"actor_scores": "mine"})}
    plan = plan_of(nodes, {"critic": {"copy_of": "actor"}})
    assert task(plan, "judge").writes == ("critic_scores",)
    assert task(plan, "judge").reads == (Column("samples", "answers_", "sample", "Ragged"),)
    assert task(plan, "other").writes == ("mine",)


def test_of_ordered_writers_the_last_one_upstream_is_read(plan_of):
    nodes = {"one": node("sample"), "two": node("left", "one", writes={"left": "x"}, reads={"samples": "samples"}),
             "three": node("left", "two", writes={"left": "x"}), "right": node("right", "one"),
             "early": node("join", "two", "right", reads={"left": "x"}, writes={"joined": "j1"}),
             "late": node("join", "three", "right", reads={"left": "x"})}
    plan = plan_of(nodes)
    assert task(plan, "early").reads[0].producer == "two"
    assert task(plan, "late").reads[0].producer == "three"


def test_optional_columns_are_read_if_they_are_there(plan_of):
    without = plan_of({"learn": {**LEARN, "function": "learn_joined"}})
    assert [column.name for column in task(without, "learn").reads] == ["targets"]
    behind = plan_of({**DIAMOND, "learn": LEARN_JOINED})
    assert [column.name for column in task(behind, "learn").reads] == ["targets", "joined"]


def test_an_optional_column_that_is_written_but_not_waited_for_is_a_mistake(plan_of):
    nodes = {**DIAMOND, "learn": {**LEARN_JOINED, "dependencies": ["left"]}}
    with pytest.raises(InvalidInput, match="reads column `joined`, which node `join` writes, but does not wait for it"):
        plan_of(nodes)


def test_further_fields_of_the_dataset(plan_of):
    nodes = {**DIAMOND, "join": node("join", "left", "right", reads={"questions": "level"})}
    data = {"train": "data.jsonl", "columns": ["level"]}
    assert task(plan_of(nodes, data=data), "join").reads[2] == Column("questions", "level", SOURCE, "list[str]")


def test_a_node_that_reads_no_column_works_on_the_rows_of_the_dataset(plan_of):
    stamp = task(plan_of({"stamp": node("stamp")}), "stamp")
    assert [(edge.producer, edge.columns) for edge in stamp.transfers] == [(SOURCE, ("group",))]


@pytest.mark.parametrize(("given", "wanted", "right"), [
    ("Tensor", "Tensor", True), ("Tensor", "Ragged", False), ("Ragged", "Tensor | Ragged", True),
    ("list[str]", "Tensor", False), ("Tensor", "Tensor | None", True), ("", "Ragged", True), ("Tensor", "", True),
    ("Tensor", "Something", True), ("Something", "Tensor", True),
])
def test_forms_that_fit(given, wanted, right):
    assert fits(given, wanted) is right


def test_forms_of_built_in_functions_are_known():
    for contract in built_in().values():
        for read in contract.reads:
            assert plain_form(read.form) in ("Tensor", "Ragged", "list[str]", "Tensor | Ragged"), contract.name
        assert len(contract.returns) == len(contract.marks.writes), contract.name
