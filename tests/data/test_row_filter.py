"""Rows that leave a step, and steps that draw again: on real ranks, against a model of plain sets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from walk import Builder, keeps, walk

from distflow.data.batch import Batch
from distflow.data.databuffer import Databuffer
from distflow.errors import ColumnError
from distflow.plan import KEEP, Layout, Lineage, Plan, RowLineage, Task
from distflow.telemetry.metrics import Metrics

ONE, TWO = Layout(1), Layout(2)


class Reckoning:
    """Return the rows that each task of a plan must see, in order; those of all ranks, one set for each fan."""

    def __init__(self, plan: Plan, batch: int):
        self.plan, self.batch, self.lineage = plan, batch, RowLineage(plan.tasks, plan.source)
        self.position, self.seen = 0, []

    def run_step(self, step: int) -> None:
        tasks = self.plan.tasks
        first = next((number for number, task in enumerate(tasks, start=1) if task.draws > 1), 0)
        rows, draws = self.draw(tasks[:first], step), 1
        while first and len(rows[()]) < self.batch and draws < tasks[first - 1].draws:
            more, draws = self.draw(tasks[:first], step), draws + 1
            rows = {fan: rows[fan] | more[fan] for fan in rows}
        rows = self.only(rows, set(sorted(rows[()])[: self.batch]), ())
        self.go(tasks[first:], rows, step)

    def draw(self, tasks: Sequence[Task], step: int) -> dict[Lineage, set[int]]:
        rows = {(): set(range(self.position, self.position + self.batch))}
        self.position += self.batch
        return self.go(tasks, rows, step)

    def go(self, tasks: Sequence[Task], rows: dict[Lineage, set[int]], step: int) -> dict[Lineage, set[int]]:
        for task in tasks:
            self.seen.append((step, task.node, sorted(rows[task.fan])))
            out = {row * task.repeats + copy for row in rows[task.fan] for copy in range(task.repeats)}
            rows = {**rows, task.out_fan: out}
            if KEEP in task.writes:
                rows = self.only(rows, {row for row in out if keeps(step, row)}, task.out_fan)
        return rows

    def only(self, rows: dict[Lineage, set[int]], kept: set[int], at: Lineage) -> dict[Lineage, set[int]]:
        def root(row: int, fan: Lineage, level: int) -> int:
            return row // self.lineage.times(fan[level:])

        result = {}
        for fan, ids in rows.items():
            level = sum(1 for depth in range(min(len(fan), len(at))) if fan[: depth + 1] == at[: depth + 1])
            roots = {root(row, at, level) for row in kept}
            result[fan] = {row for row in ids if root(row, fan, level) in roots}
        return result


def check(plan: Plan, batch: int, steps: int = 2, machines: str = "") -> list[tuple]:
    """The rows that all ranks saw of each task, together, are the expected ones."""
    results = run_ranks(plan.ranks, walk, plan, batch, steps, machines)
    reckoning = Reckoning(plan, batch)
    for step in range(steps):
        reckoning.run_step(step)
    tasks = {task.node: task for task in plan.tasks}
    for number, (step, node, rows) in enumerate(reckoning.seen):
        held = [seen[number] for rank, (seen, *_) in enumerate(results) if tasks[node].layout.leads(rank)]
        assert {(when, name) for when, name, _ in held} == {(step, node)}
        assert sorted(row for *_, ids in held for row in ids) == rows, (step, node)
    assert all(len(seen) == len(reckoning.seen) for seen, *_ in results)
    return results


def grpo(draws: int, reward: Layout, update: Layout) -> Plan:
    return (Builder(2, TWO)
            .node("rollout", "r_prompt", "r_response t_completion", TWO, repeats=3)
            .node("reward", "t_completion t_question", "d_reward keep", reward)
            .node("filter", "d_reward", "keep", reward, together=True, draws=draws)
            .node("reference", "r_prompt r_response", "r_logprobs", update)
            .node("update", "r_prompt r_response d_reward r_logprobs t_question", "", update, together=True)).plan()


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(("reward", "update"), [(ONE, TWO), (Layout(1, 1), TWO)])
def test_rows_are_dropped_and_drawn_again(draws, reward, update):
    for batch in (1, 4):
        check(grpo(draws, reward, update), batch)


def test_what_was_drawn_is_counted():
    (_, metrics, _), _ = check(grpo(2, ONE, TWO), 7, steps=4)
    assert {step["filter/filter/draws"] for step in metrics} == {1, 2}
    assert all(step["filter/reward/dropped"] > 0 == step["filter/filter/prompts_short"] for step in metrics)


@st.composite
def plans(draw) -> Plan:
    """Any chain of nodes in any layouts of three ranks; some drop rows, and one may draw again."""
    layout = st.sampled_from([Layout(dp, first) for dp in range(1, 4) for first in range(3) if first + dp <= 3])
    builder, again = Builder(3, draw(layout), "r_x t_x d_x"), draw(st.integers(0, 3))
    for number in range(draw(st.integers(again + 1, 5))):
        lineage = {column: builder.fan(producer) for column, producer in builder.writers.items() if column != KEEP}
        fan = draw(st.sampled_from(sorted(set(lineage.values()))))
        fitting = [column for column, other in lineage.items() if fan[: len(other)] == other]
        reads = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3, unique=True))
        writes = [f"{kind}_{number}" for kind in draw(st.lists(st.sampled_from("rdt"), min_size=1, max_size=2))]
        drops = number == again or draw(st.booleans())
        builder.node(f"n{number}", " ".join(reads), " ".join([*dict.fromkeys(writes), *[KEEP] * drops]), draw(layout),
                     draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans()), 3 if number == again else 1)
    return builder.plan()


@pytest.mark.run
@settings(max_examples=60)
@given(plans(), st.integers(1, 5), st.sampled_from(["", "", "aab", "aba", "abc"]))
def test_any_plan_that_drops_and_draws(plan, batch, machines):
    check(plan, batch, machines=machines)


@pytest.mark.usefixtures("alone")
def test_rows_that_others_have_computed_are_dropped_when_all_are_there():
    """Two nodes of another group say each which rows stay; a third knows nothing of it."""
    plan = (Builder(1, ONE).node("a", "r_prompt", "d_a keep", ONE).node("b", "r_prompt", "d_b keep", ONE)
            .node("c", "r_prompt", "d_c", ONE).node("all", "d_a d_b d_c", "", ONE)).plan()
    buffer, ids = Databuffer(plan, 0, Metrics()), torch.arange(6)
    buffer.start(Batch(ids, {"r_prompt": ids}))
    *others, last = plan.tasks
    keeps_of = {"a": ids % 2 == 0, "b": ids % 3 == 0}
    buffer.receive((task, {name: keeps_of[task.node] if name == KEEP else ids for name in task.writes}, ids)
                   for task in others)
    assert buffer.take(last).ids.tolist() == [0]


@pytest.mark.parametrize("keep", [torch.ones(2), torch.ones(2, 2, dtype=torch.bool)])
@pytest.mark.usefixtures("alone")
def test_databuffer_refuses_a_keep_that_is_no_bool_a_row(keep):
    plan = Builder(1, ONE).node("a", "r_prompt", "keep", ONE).plan()
    buffer = Databuffer(plan, 0, Metrics())
    buffer.start(Batch(torch.arange(2)))
    with pytest.raises(ColumnError, match=r"node `a` wrote column `keep`.*one bool a row"):
        buffer.put(plan.tasks[0], {KEEP: keep}, torch.arange(2))
