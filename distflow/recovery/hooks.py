"""What users want done when a worker begins, fails or leaves.

    @hook(role="rollout", when="before_restart")
    def tell_the_pager(moment):
        post(f"{moment.unit} has failed in step {moment.failure.step}: {moment.failure.what}")

A hook is a function of a `HookContext`. `on_failure` and `on_leave` are called beside the seat, in a process of its
own that is ended after a while; the others in the worker itself, where an error is one of the worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from distflow.errors import InvalidInput, did_you_mean
from distflow.recovery.restarts import Failure

When = Literal["on_failure", "on_leave", "before_restart", "after_restart", "on_join"]
"""on_failure: a worker has ended or hangs. on_leave: one has ended that has not failed: its work is done, it rests, or
another one takes its place. before_restart: a new one has begun. after_restart: it is ready. on_join: so is the first
one, or one that comes back."""
_BY_SEAT: tuple[When, ...] = ("on_failure", "on_leave")


@dataclass(frozen=True)
class HookContext:
    """When a hook is called. life: how often the unit has started again; failure: its last one, if there was one."""

    unit: str
    rank: int
    life: int
    failure: Failure | None


Hook = Callable[[HookContext], None]
HOOKS: dict[str, list[tuple[str | None, Hook]]] = {when: [] for when in get_args(When)}


def hook(*, when: When, role: str | None = None) -> Callable[[Hook], Hook]:
    """Register a function to be called; `role`: `trainer`, `rollout`, or None for both.

    Raises:
        InvalidInput: there is no such moment or role.
    """
    if when not in HOOKS:
        raise InvalidInput(f"@hook(when={when!r}): there is no such moment. {did_you_mean(when, HOOKS)}")
    if role not in (None, "trainer", "rollout"):
        raise InvalidInput(f"@hook(role={role!r}): give `trainer` or `rollout`, or leave it out for both")

    def register(function: Hook) -> Hook:
        HOOKS[when].append((role, function))
        return function

    return register


def call(when: When, group: str, moment: HookContext) -> None:
    """Call those that are registered for this moment and group, in the order of their registration."""
    for role, function in HOOKS[when]:
        if role in (None, group):
            function(moment)


def page() -> int:
    """For a worker's page, once the DAG's modules are loaded: which hooks of those that its seat calls there are."""
    return 1 + sum(2 << place for place, when in enumerate(_BY_SEAT) if HOOKS[when])


def may_be(when: When, page: int) -> bool:
    """Whether there are hooks of this moment, as the page says. A worker that ended early has said nothing: there may
    be."""
    return not page or bool(page & 2 << _BY_SEAT.index(when))
