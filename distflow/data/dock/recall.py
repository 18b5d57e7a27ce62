"""Commits that can be taken back: a trainer that is set back to an older state asks again for what came after it.

Rows that such a consumer has committed in a step stay in their warehouses until it says that it will never go back
behind it (`settle`), or until there is no room for new ones. Pure, as the controller is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distflow.data.dock.controller import Controller
from distflow.data.dock.errors import DockError
from distflow.data.dock.intervals import Intervals


def check(controller: Controller, step: int) -> None:
    """
    Raises:
        DockError: rows that were committed in a step from `step` on have left, so that it cannot be done again.
    """
    for first, end in controller.steps.ranges:
        if gone := [number for number in range(max(first, step), end) if number not in controller.kept]:
            raise DockError(f"step {gone[0]} of `{controller.consumer.name}` is committed already, and its rows have "
                            f"left: a group that was set back to step {step} cannot do it again. Start everything "
                            "again from the checkpoint (torchrun --max-restarts)")


def take_back(controller: Controller, step: int) -> int:
    """Make the rows of all steps from `step` on ready again; returns how many."""
    back = {row.id: row for number in sorted(controller.kept) if number >= step for row in controller.kept[number]}
    for number in [number for number in controller.kept if number >= step]:
        del controller.kept[number]
        controller.steps.remove(number)
    for row in back.values():
        row.held = False
        controller.done.remove(row.id)
    controller.rows |= back
    controller.ready = back | controller.ready
    return len(back)


def settle(controller: Controller, before: int) -> list[int]:
    """What was and will be committed in steps before this one is not taken back; the rows that may leave."""
    controller.settled = max(controller.settled, before)
    return [row.id for number in sorted(controller.kept) if number < before for row in controller.kept.pop(number)]


def settle_oldest(controller: Controller) -> list[int]:
    """The same for the oldest step that is kept, but not for the newest two: of the last one's state the copies may be
    under way, or turn out torn."""
    return settle(controller, min(controller.kept) + 1) if len(controller.kept) > 2 else []


def lose(controller: Controller, listed: Collection[int], warehouse: int, warehouses: int) -> list[int]:
    """A warehouse has listed all that it holds: steps of which it has lost rows cannot be taken back any more; returns
    their other rows, which may leave."""
    torn = [number for number, rows in controller.kept.items()
            if any(row.id % warehouses == warehouse and row.id not in listed for row in rows)]
    return [row.id for number in torn for row in controller.kept.pop(number)]


def settled(controller: Controller, rows: Iterable[int]) -> list[int]:
    """Those of committed rows that are not kept."""
    kept = {row.id for some in controller.kept.values() for row in some}
    return [row for row in rows if row not in kept]


def settled_ranges(controller: Controller) -> list[tuple[int, int]]:
    """All committed rows that are not kept, as `Intervals.ranges`."""
    result = Intervals(controller.done.ranges)
    for rows in controller.kept.values():
        for row in rows:
            result.remove(row.id)
    return result.ranges
