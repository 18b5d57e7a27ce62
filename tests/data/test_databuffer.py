"""Rows between layouts, on real ranks: each arrives once, whole, beside its own, in every order of moves."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from stores import client
from walk import Builder, Walk, check_run, contents

from benchmarks.group import peak_over
from distflow.data.batch import Batch, Ragged, decode_text, encode_text, to_list
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import gather
from distflow.data.redistribute import LONG_RUN, ROUND_BYTES
from distflow.errors import ColumnError, RankMissing
from distflow.plan import Layout, Plan
from distflow.recovery.rank_status import RankStatus
from distflow.telemetry import heartbeat
from distflow.telemetry.metrics import Metrics

ONE, TWO, LAST = Layout(1), Layout(2), Layout(1, 1)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_two_one_two_with_groups(batch):
    """The shape of GRPO with a central reward: out to one rank and back, groups of three together."""
    plan = (Builder(2, TWO)
            .node("rollout", "r_prompt", "r_response t_completion i_pixels", TWO, repeats=3)
            .node("reward", "t_completion r_prompt t_question", "d_reward", ONE)
            .node("advantage", "d_reward r_response", "d_advantage", ONE)
            .node("update", "r_prompt r_response d_advantage d_reward i_pixels", "", TWO)).plan()
    results = check_run(plan, batch)
    for _, metrics, exchanges in results:
        # reward: completions, prompts and questions; advantage: responses; update: advantage, reward.
        assert exchanges == [5, 5]
        assert all(step["data/bytes_sent"] > 0 for step in metrics)


def test_one_rank_moves_nothing():
    plan = (Builder(1, ONE).node("a", "r_prompt", "r_a", ONE, repeats=2).node("b", "r_a r_prompt", "", ONE)).plan()
    _, metrics, exchanges = check_run(plan, 3)[0]
    assert exchanges == [0, 0]
    assert "data/bytes_sent" not in metrics[0]


def test_a_column_with_two_readers_moves_once():
    """Of `second`'s columns, one is there already; only the other moves."""
    plan = (Builder(2, ONE)
            .node("a", "r_prompt", "r_a t_a", ONE)
            .node("first", "r_a", "d_first", TWO)
            .node("second", "r_a t_a d_first", "d_second", TWO)
            .node("third", "t_a r_a", "d_third", TWO)).plan()
    for _, _, exchanges in check_run(plan, 5):
        assert exchanges == [2, 2]


def at_once(plan: Plan) -> list[str]:
    """Run a step of a plan in which ranks 0-1 and 2-3 have a node each behind `a`, and meet within these nodes."""
    rank, seen = dist.get_rank(), []
    walker, store = Walk(plan, 4), dist.distributed_c10d._get_default_store()
    walker.buffer.start(walker.draw())
    for task in plan.tasks:
        inputs = walker.buffer.take(task)
        walker.check(task, inputs)
        if task.node != "a" and len(inputs):
            store.set(f"{rank} is in its node", "")
            store.wait([f"{other} is in its node" for other in range(4)], timedelta(seconds=30))
            seen.append(task.node)
        ids = inputs.ids
        walker.buffer.put(task, {name: contents(name, 0, ids.tolist()) for name in task.writes if len(ids)}, ids)
    return seen


def test_nodes_on_ranks_of_their_own_run_at_the_same_time():
    """Both read what the first node writes. Each rank leaves its node when all four are in theirs."""
    first, last = Layout(2), Layout(2, 2)
    plan = (Builder(4, first).node("a", "r_prompt", "r_a d_a", last)
            .node("critic", "r_a d_a r_prompt", "", last).node("update", "d_a", "", first)).plan()
    assert run_ranks(4, at_once, plan) == [["update"], ["update"], ["critic"], ["critic"]]


@st.composite
def plans(draw) -> Plan:
    """Any chain of nodes in any layouts of four ranks; each reads some columns whose rows can be matched."""
    even = [Layout(dp, first, tp) for tp in (1, 2) for dp in range(1, 5) for first in range(4) if first + dp * tp <= 4]
    uneven = [replace(layout, rows=rows) for layout in even
              for rows in ((3, 1), (0, 1), (1, 2, 5), (1, 0, 0), (4, 3, 0, 1)) if len(rows) == layout.dp]
    layout = st.sampled_from(even + uneven)
    builder = Builder(4, draw(layout), "r_x t_x d_x n_x")
    for number in range(draw(st.integers(1, 5))):
        lineage = {column: builder.fan(producer) for column, producer in builder.writers.items()}
        fan = draw(st.sampled_from(sorted(set(lineage.values()))))
        fitting = [column for column, other in lineage.items() if fan[: len(other)] == other]
        reads = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3, unique=True))
        kinds = draw(st.lists(st.sampled_from("rdtinm"), max_size=2, unique=True))
        builder.node(f"n{number}", " ".join(reads), " ".join(f"{kind}_{number}" for kind in kinds), draw(layout),
                     draw(st.sampled_from([1, 1, 2, 3])), draw(st.booleans()))
    return builder.plan()


@pytest.mark.run
@settings(max_examples=60)
@given(plans(), st.integers(1, 7), st.sampled_from(["", "", "aabb", "abab", "abcd", "----", "aa--"]),
       st.sampled_from([(1, LONG_RUN), (40, LONG_RUN), (ROUND_BYTES, 1), (ROUND_BYTES, 24), (1, 24)]))
def test_any_plan_on_four_ranks_of_any_machines(plan, batch, machines, sizes):
    check_run(plan, batch, machines=machines, sizes=sizes)


def memory_of_a_move(plan: Plan, reverse: bool) -> int:
    """The bytes by which a rank's memory grows at most while 32 MiB go from rank 0 to rank 1, on another machine."""
    rank, walker = dist.get_rank(), Walk(plan, 1)
    ids, column = torch.arange(8192 if rank == 0 else 0), {"d_x": torch.ones(8192, 1024)} if rank == 0 else {}
    with mock.patch.dict(os.environ, DISTFLOW_MACHINE=f"machine {rank}"):
        walker.buffer.start(Batch(ids.flip(0) if reverse else ids, column))
        return peak_over(lambda: walker.buffer.take(plan.tasks[0]))


@pytest.mark.parametrize(("reverse", "most"), [(False, 7), (True, 12)])
def test_rows_for_other_machines_are_in_memory_twice_a_few_at_a_time_or_not_at_all(reverse, most):
    plan = Builder(2, ONE, "d_x").node("a", "d_x", "", LAST).plan()
    sender, receiver = run_ranks(2, memory_of_a_move, plan, reverse)
    assert sender < most * 2**20
    assert 30 * 2**20 < receiver < (32 + most) * 2**20


def balanced(plan: Plan) -> tuple[list[int], dict[str, float]]:
    """One step of eight prompts with 8, 7 … 1 tokens, all on rank 0 at first: who has which, and the metrics."""
    walker, rank = Walk(plan, 8), dist.get_rank()
    ids = torch.arange(8 if rank == 0 else 0)
    tokens = Ragged.from_rows([torch.zeros(8 - row, dtype=torch.int64) for row in ids.tolist()])
    walker.buffer.start(Batch(ids, {"r_prompt": tokens, "d_size": ids.double()} if rank == 0 else {}))
    for task in plan.tasks:
        inputs = walker.buffer.take(task)
        walker.buffer.put(task, {}, inputs.ids)
    return inputs.ids.tolist(), walker.metrics.collect(gather)


@pytest.mark.parametrize("first", ["r_prompt", "d_size"])
def test_rows_are_shared_out_by_tokens(first):
    """Even if a column without tokens is the first to move: what tasks of the layout will read counts."""
    plan = (Builder(2, ONE, "r_prompt d_size").node("a", first, "", TWO).node("b", "r_prompt d_size", "", TWO)).plan()
    (here, metrics), (there, _) = run_ranks(2, balanced, plan)
    assert sorted(here + there) == list(range(8))
    assert sum(9 - row for row in here) == sum(9 - row for row in there) == 22
    assert metrics["data/imbalance"] == pytest.approx(1.0)


def types_on_an_empty_rank() -> None:
    plan = Builder(2, ONE, "i_x t_x d_x").node("a", "i_x t_x d_x", "", TWO).plan()
    walker = Walk(plan, 1)
    walker.buffer.start(walker.draw())
    inputs = walker.buffer.take(plan.tasks[0])
    assert len(inputs) == 1 - dist.get_rank()
    assert inputs["i_x"].values.dtype == torch.float16
    assert inputs["i_x"].values.shape[1:] == (3,)
    assert inputs["d_x"].dtype == torch.float64
    assert decode_text(inputs["t_x"]) == decode_text(contents("t_x", 0, [0][: len(inputs)]))


def test_a_rank_without_rows_knows_the_types():
    run_ranks(2, types_on_an_empty_rank)


def take_after_a_loss(plan: Plan, node: str, lost: str) -> str:
    """Run up to `node`, with `lost` ("NODE ids" or "NODE columns") missing; return this rank's error."""
    walker, (loser, what) = Walk(plan, 4), lost.split()
    walker.buffer.start(walker.draw())
    for task in plan.tasks:
        try:
            inputs = walker.buffer.take(task)
        except ColumnError as error:
            assert task.node == node
            return str(error)
        ids = inputs.repeat(task.repeats).ids
        ids = ids[task.repeats :] if (task.node, what) == (loser, "ids") else ids
        names = () if (task.node, what) == (loser, "columns") else task.writes
        walker.buffer.put(task, {name: contents(name, 0, ids.tolist()) for name in names}, ids)
        if task.node == node:
            return ""
    return ""


@pytest.mark.parametrize(("repeated", "together", "lost", "expected"), [
    (False, False, "there ids",
     ["", "node `join` on rank 1 lacks rows [0] of columns d_there, which node `there` has not written"]),
    (True, True, "rollout ids", ["", "node `join` on rank 1 has rows [0] of columns r_prompt from node `source`, but "
                                     "its other inputs lack them"]),
    (True, False, "rollout ids", ["rows [0] lost all 2 rows that a node made of each; no rank has one"] * 2),
    (False, False, "there columns", ["node `there` has 4 rows on rank 0, but not their column d_there; it has none"]),
])
def test_databuffer_names_missing_rows_and_columns(repeated, together, lost, expected):
    ranks = len(expected)
    plan = Builder(ranks, ONE)
    if repeated:
        plan = plan.node("rollout", "r_prompt", "r_reply", ONE, repeats=2)
    else:
        plan = plan.node("here", "r_prompt", "d_here", ONE).node("there", "d_here", "d_there", ONE)
    plan = plan.node("join", "r_prompt r_reply" if repeated else "d_here d_there", "", LAST if ranks == 2 else ONE,
                     together=together).plan()
    assert run_ranks(ranks, take_after_a_loss, plan, "join", lost) == expected


def wait_in_vain(plan: Plan) -> str:
    """Let rank 2 announce that it computes and never take; return the error of the others."""
    store = dist.distributed_c10d._get_default_store()
    underlying = store
    while isinstance(underlying, dist.PrefixStore):
        underlying = underlying.underlying_store
    presence = RankStatus(client(underlying.port).below("who waits"), dist.get_rank(), 3)
    buffer = Databuffer(plan, dist.get_rank(), Metrics(), limit=2.0)
    buffer.redistributor.host_group  # noqa: B018 - all ranks make it
    buffer.start(Batch(torch.arange(0)))
    heartbeat.current().begin(4)
    presence.set("computing node `a`" if dist.get_rank() == 2 else "waiting for node `b`")
    if dist.get_rank() == 2:
        store.wait(["gave up 0", "gave up 1"])
        return ""
    buffer.put(plan.tasks[0], {}, torch.arange(0))
    with pytest.raises(RankMissing) as caught:
        buffer.take(plan.tasks[1])
    store.set(f"gave up {dist.get_rank()}", "")
    return f"{caught.value}\n{presence.missing()}"


def test_who_is_waited_for_is_named():
    plan = (Builder(3, Layout(3)).node("a", "r_prompt", "r_a d_a", Layout(3), repeats=2)
            .node("b", "r_a d_a", "", ONE)).plan()
    first, second, _ = run_ranks(3, wait_in_vain, plan)
    for rank, text in enumerate((first, second)):
        assert (f"node `b` on rank {rank} waits for columns r_a, d_a of the rows of node `a`, on rank 0 to 2: "
                "rank 2 did") in text
        assert "rank 2 is in step 4, computing node `a`, for " in text.splitlines()[-1]


def test_rows_as_a_person_reads_them():
    """From whatever layouts hold them here; a column whose rows are elsewhere is left out."""
    plan = (Builder(2, TWO).node("rollout", "r_prompt", "t_completion r_tokens n_turns", TWO, repeats=2)
            .node("reward", "t_completion", "d_reward", ONE)).plan()
    rollout, reward = plan.tasks
    buffer = Databuffer(plan, 0, Metrics())
    buffer.start(Batch(torch.arange(3), {"t_question": encode_text(["a", "b", "c"])}))
    ids = torch.arange(6)
    turns = Ragged.from_rows([Ragged.from_rows([torch.tensor([row]), torch.tensor([])]) for row in ids.tolist()])
    buffer.put(rollout, {"t_completion": encode_text("uvwxyz"), "r_tokens": Ragged.from_rows(list(ids[:, None])),
                         "n_turns": turns}, ids)
    names = ("t_question", "t_completion", "r_tokens", "n_turns", "d_reward")
    assert buffer.sample_rows(names, 3) == {"t_question": ["a", "b", "c"], "t_completion": ["u", "w", "y"],
                                            "r_tokens": [[0], [2], [4]], "n_turns": [[[0], []], [[2], []], [[4], []]]}
    buffer.put(reward, {"d_reward": torch.arange(12.0)}, torch.arange(12))
    assert buffer.sample_rows(names, 2)["d_reward"] == [0.0, 3.0]
    buffer.put(reward, {"d_reward": torch.zeros(0)}, torch.arange(0))
    assert set(buffer.sample_rows(names, 2)) == set(names) - {"d_reward"}
    assert buffer.sample_rows(names, 0) == {}


def test_all_rows_are_on_one_rank_each():
    """In the layout of the task that repeated them, whatever a later layout has of them here."""
    plan = (Builder(2, TWO).node("rollout", "r_prompt", "t_completion", TWO, repeats=2)
            .node("reward", "t_completion", "d_reward", ONE)).plan()
    rollout, reward = plan.tasks
    for rank, own in ((0, torch.arange(4)), (1, torch.arange(4, 6))):
        buffer = Databuffer(plan, rank, Metrics())
        buffer.start(Batch(own[:len(own) // 2], {}))
        texts = list("uvwxyz"[own[0]:own[-1] + 1])
        buffer.put(rollout, {"t_completion": encode_text(texts)}, own)
        every = torch.arange(6 if rank == 0 else 0)
        buffer.put(reward, {"d_reward": every.float()}, every)
        rewards = {"d_reward": [0.0, 1.0, 2.0, 3.0]} if rank == 0 else {}
        (node, found), = buffer.all_rows(("t_completion", "d_reward")).items()
        assert node == "rollout"
        assert {name: to_list(column) for name, column in found.items()} == {
            "row": own.tolist(), "t_completion": texts, **rewards}


def test_rows_of_nodes_that_repeat_side_by_side():
    plan = (Builder(1, ONE).node("one", "r_prompt", "t_one", ONE, repeats=2)
            .node("other", "r_prompt", "t_other", ONE, repeats=3)).plan()
    buffer = Databuffer(plan, 0, Metrics())
    buffer.start(Batch(torch.arange(1), {}))
    for task, texts in zip(plan.tasks, ("ab", "cde")):
        buffer.put(task, {f"t_{task.node}": encode_text(texts)}, torch.arange(len(texts)))
    found = buffer.all_rows(("t_one", "t_other"))
    assert {node: {name: to_list(column) for name, column in columns.items()} for node, columns in found.items()} == {
        "one": {"row": [0, 1], "t_one": ["a", "b"]}, "other": {"row": [0, 1, 2], "t_other": ["c", "d", "e"]}}
