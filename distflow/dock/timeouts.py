"""What a wait waited for: which rows, which columns, who owes them, and what that process is doing now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from distflow.dock.index import ConsumerIndex, GrantedLease
from distflow.dock.selection import DockLayout
from distflow.dock.shard_state import ShardState
from distflow.dock.storage import SHOWN
from distflow.rpc.connection import Connection

Report = dict[str, Any]


def shortage(desk: ShardState, controller: ConsumerIndex, request: dict[str, Any], now: float) -> tuple[str, Report]:
    """Why a request for rows got none, as far as the controller knows."""
    lacking: dict[tuple[str, ...], list[int]] = {}
    for row in controller.rows.values():
        missing = tuple(sorted(controller.reads - row.columns))
        if missing and not row.held:
            lacking.setdefault(missing, []).append(row.id)
    report = {
        "consumer": controller.consumer.name, "waited": request["wait"], "wanted": request["least"],
        "ready": len(controller.ready), "known": len(controller.rows), "committed": len(controller.done),
        "lacking": [[list(columns), ids[:SHOWN], len(ids)] for columns, ids in lacking.items()],
        "held": [[len(granted.rows), _holder(desk, granted, now)] for granted in controller.leases.values()],
        "cut_off": [f"{outbox.address[0]}:{outbox.address[1]}: {outbox.trouble}"
                    for outbox in desk.outboxes.values() if outbox.trouble]}
    return f"`{controller.consumer.name}` waited {request['wait']:g} s for rows", report


def crowd(desk: ShardState, rows: int, nbytes: int, waited: float) -> str:
    """Why there is no room: which consumers have not committed what."""
    house = desk.warehouse
    owing = {consumer.name: 0 for consumer in desk.met().consumers}
    for kept in house.rows.values():
        for name in owing.keys() - kept.consumed:
            owing[name] += 1
    slow = ", ".join(f"`{name}` has yet to commit {count}" for name, count in owing.items() if count)
    return (f"warehouse {house.number} has no room for {rows} rows of {nbytes} bytes, and none came in {waited:g} s. "
            f"It holds {len(house.rows)} of {house.max_rows} rows and {house.nbytes} of {house.max_bytes} bytes. "
            f"Of its rows {slow or 'none is waited for'}")


def fates(desk: ShardState, controller: ConsumerIndex, ids: Iterable[int], now: float) -> list[str]:
    """What has become of rows at the consumer that owes something for them, one line for rows of one fate."""
    found: dict[str, list[int]] = {}
    for number in ids:
        row = controller.rows.get(number)
        if number in controller.done:
            fate = "were committed without it"
        elif row is None:
            fate = "have not arrived in any warehouse that it hears from"
        elif row.held:
            fate = f"are leased by {_holder(desk, controller.leases[row.lease], now)}"
        elif number in controller.ready:
            fate = "are ready, and nobody has leased them"
        else:
            fate = f"lack {', '.join(sorted(controller.reads - row.columns))} themselves"
        found.setdefault(fate, []).append(number)
    return [f"rows {numbers} {fate}" for fate, numbers in found.items()]


def _holder(desk: ShardState, granted: GrantedLease, now: float) -> str:
    person = desk.persons.get(granted.last)
    who = person.who if person else "a process that is gone"
    doing = f", which {now - person.told:.1f} s ago was {person.doing}" if person and person.doing else ""
    return f"{who} for {now - granted.since:.1f} s{doing}"


def explain(message: str, report: Report, layout: DockLayout, ask: Callable[[str, list[int]], list[str]]) -> str:
    """The whole message: what one controller reported, and what `ask(consumer, ids)` finds at those that owe it."""
    lines = [f"{message}: it wants at least {report['wanted']}; {report['ready']} are ready, {report['known']} known, "
             f"{report['committed']} committed."]
    owed: Report = {}
    for columns, ids, count in report["lacking"]:
        lines.append(f"  {count} rows lack {', '.join(columns)}: {ids}{' …' if count > len(ids) else ''}")
        for column in columns:
            writers = layout.writers(column)
            for writer in writers:
                owed[writer.name] = ask(writer.name, ids)
                lines += [f"    `{writer.name}` owes `{column}`: {fate}" for fate in owed[writer.name]]
            if not writers:
                lines.append(f"    no consumer says that it writes `{column}`; whoever puts the rows owes it")
    lines += [f"  {count} rows are leased by {holder}" for count, holder in report["held"]]
    if not report["known"]:
        lines.append("  no row has come that it has not committed: nothing was put, or it was lost")
        for producer in report.get("producers", []):
            lines.append(f"    connected: {producer}")
    elif report["ready"] and not report["lacking"]:
        lines.append("  the rows that are ready do not satisfy its rules, or are too few")
    lines += [f"  out of reach: {place}" for place in report["cut_off"]]
    report["owed"] = owed
    return "\n".join(lines)


def status(desk: ShardState, lines: list[Connection], now: float) -> Report:
    """All figures of a process: what it holds, what went through it, who is connected."""
    house = desk.warehouse
    return {
        "number": house.number, "rows": len(house.rows), "bytes": house.nbytes, "counts": asdict(house.counts),
        "received": desk.received + sum(line.received for line in lines),
        "sent": desk.sent + sum(line.sent for line in lines),
        "controllers": {name: {"ready": len(each.ready), "known": len(each.rows), "committed": len(each.done),
                               "kept": sum(map(len, each.kept.values())), "leases": len(each.leases),
                               "returned": each.returned, "refused": each.refused, "discarded": each.discarded}
                        for name, each in desk.controllers.items()},
        "persons": [[person.who, person.doing, now - person.told]
                    for session, person in desk.persons.items() if person.lines and session],
        "cut_off": [f"{outbox.address[0]}:{outbox.address[1]}: {outbox.trouble}"
                    for outbox in desk.outboxes.values() if outbox.trouble]}
