"""Explanations of timeouts: missing rows and columns, the consumers that write them, and what those do now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from distflow.dock.index import SHOWN, ConsumerIndex, GrantedLease
from distflow.dock.selection import DockLayout
from distflow.dock.shard_state import ShardState
from distflow.rpc.connection import Connection

Report = dict[str, Any]


def shortage(state: ShardState, index: ConsumerIndex, request: dict[str, Any], now: float) -> tuple[str, Report]:
    """Return the message and the report of a lease request that timed out, as far as the index knows."""
    missing: dict[tuple[str, ...], list[int]] = {}
    slots = index.rows.all()
    for slot in slots[(index.rows["held"][slots] == 0) & ~index.rows.is_complete(slots)].tolist():
        columns = tuple(sorted(index.rows.reads - index.rows.columns_of(slot)))
        missing.setdefault(columns, []).append(int(index.rows["ids"][slot]))
    report = {
        "consumer": index.consumer.name, "waited": request["wait"], "wanted": request["least"],
        "ready": len(index.ready), "known": len(index.rows), "committed": len(index.done),
        "missing": [[list(columns), ids[:SHOWN], len(ids)] for columns, ids in missing.items()],
        "leased": [[len(granted.ids), _holder(state, granted, now)] for granted in index.leases.values()],
        "unreachable": _unreachable(state)}
    return f"`{index.consumer.name}` waited {request['wait']:g} s for rows", report


def describe_rows(state: ShardState, index: ConsumerIndex, ids: Iterable[int], now: float) -> list[str]:
    """Return the state of rows at the consumer that writes their missing columns, a line for all rows of one state."""
    found: dict[str, list[int]] = {}
    for number in ids:
        slot, rows = index.rows.slots.get(number), index.rows
        if number in index.done:
            description = "were committed without it"
        elif slot is None:
            description = "have not arrived in any shard that its index hears from"
        elif rows["held"][slot]:
            description = f"are leased by {_holder(state, index.leases[int(rows['lease'][slot])], now)}"
        elif rows["ready"][slot]:
            description = f"are ready, {_why_not_leased(state, index)}"
        else:
            description = f"lack {', '.join(sorted(rows.reads - rows.columns_of(slot)))} themselves"
        found.setdefault(description, []).append(number)
    return [f"rows {numbers} {description}" for description, numbers in found.items()]


def _why_not_leased(state: ShardState, index: ConsumerIndex) -> str:
    if not index.lacks_room():
        return "and no process has leased them"
    return (f"but the dock stores {state.room.bytes} of {state.room.limit:.0f} bytes (`dock_gib` in the run file), and "
            f"{index.n_leased} rows are under way: others must leave it first")


def _holder(state: ShardState, granted: GrantedLease, now: float) -> str:
    client = state.clients.get(granted.last)
    who = client.who if client else "a process that has ended"
    activity = f", which {now - client.active_at:.1f} s ago was {client.activity}" if client and client.activity else ""
    return f"{who} for {now - granted.since:.1f} s{activity}"


def explain(message: str, report: Report, layout: DockLayout, ask: Callable[[str, list[int]], list[str]]) -> str:
    """Return the whole message: the index's report, and what `ask(consumer, ids)` finds at those that write it."""
    lines = [f"{message}: it wants at least {report['wanted']}; {report['ready']} are ready, {report['known']} known, "
             f"{report['committed']} committed."]
    for columns, ids, count in report["missing"]:
        lines.append(f"  {count} rows lack {', '.join(columns)}: {ids}{' …' if count > len(ids) else ''}")
        for column in columns:
            writers = [consumer for consumer in layout.consumers if column in consumer.writes]
            for writer in writers:
                lines += [f"    `{writer.name}` writes `{column}`: {state}" for state in ask(writer.name, ids)]
            if not writers:
                lines.append(f"    no consumer says that it writes `{column}`; whoever puts the rows must add it")
    lines += [f"  {count} rows are leased by {holder}" for count, holder in report["leased"]]
    if not report["known"]:
        lines.append("  no row has come that it has not committed: nothing was put, or it was lost")
        for producer in report.get("producers", []):
            lines.append(f"    connected: {producer}")
    elif report["ready"] and not report["missing"]:
        lines.append("  the rows that are ready are of other steps, of incomplete groups, or too few")
    lines += [f"  unreachable: {address}" for address in report["unreachable"]]
    return "\n".join(lines)


def status(state: ShardState, connections: list[Connection], now: float) -> Report:
    """Return the figures of a process: what it holds, what went through it, and its clients."""
    storage = state.storage
    return {
        "rows": len(storage.rows), "bytes": storage.nbytes, "marked": storage.marked(),
        "heap": storage.heap.taken(),  # with room that was promised, and rows that are being read
        "received": state.received + sum(each.received for each in connections),
        "sent": state.sent + sum(each.sent for each in connections),
        "indexes": {name: {"ready": len(each.ready), "known": len(each.rows), "committed": len(each.done),
                           "leases": len(each.leases), "leased": each.n_leased}
                    for name, each in state.indexes.items()},
        "clients": [[client.who, client.activity, now - client.active_at]
                    for session, client in state.clients.items() if client.connections and session]}


def _unreachable(state: ShardState) -> list[str]:
    return [f"{outbox.address[0]}:{outbox.address[1]}: {outbox.failure}"
            for outbox in state.outboxes.values() if outbox.failure]
