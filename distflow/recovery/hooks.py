"""Calls users' functions when a worker starts, fails or leaves.

    @hook(role="rollout", when="before_restart")
    def page_me(moment):
        post(f"{moment.group} has failed in step {moment.failure.step}: {moment.failure.what}")

A hook is a function of a `HookContext`. `on_failure` and `on_leave` run in a helper process of the supervisor, which is
killed after a few seconds; the others run in the worker, where their error is the worker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from distflow.errors import InvalidInput, did_you_mean
from distflow.plan import INFERENCE, ROLLOUT, TRAINER
from distflow.recovery.restarts import Failure

When = Literal["on_failure", "on_leave", "before_restart", "after_restart", "on_join"]
"""on_failure: a worker has ended or hangs. on_leave: a worker has ended without a failure: its work is done, it is
scaled down, or another one replaces it. before_restart: a worker of a later attempt starts. after_restart: it is ready.
on_join: the first worker, or one that is scaled up again, is ready."""
_BY_SUPERVISOR: tuple[When, ...] = ("on_failure", "on_leave")


@dataclass(frozen=True)
class HookContext:
    """What a hook is called with. group: name of the restart group; attempt: how often the group has started again;
    failure: its last one, if there was one."""

    group: str
    rank: int
    attempt: int
    failure: Failure | None


Hook = Callable[[HookContext], None]
H = TypeVar("H", bound=Hook)
HOOKS: dict[str, list[tuple[str | None, Hook]]] = {when: [] for when in get_args(When)}


def hook(*, when: When, role: str | None = None) -> Callable[[H], H]:
    """Register a hook; `role`: `trainer`, `rollout`, `inference`, or None for all. Raises InvalidInput: no such moment
    or role."""
    if when not in HOOKS:
        raise InvalidInput(f"@hook(when={when!r}): there is no such moment. {did_you_mean(when, HOOKS)}")
    if role not in (None, TRAINER, ROLLOUT, INFERENCE):
        raise InvalidInput(f"@hook(role={role!r}): give `trainer`, `rollout` or `inference`, or leave it out for all")

    def register(function: H) -> H:
        HOOKS[when].append((role, function))
        return function

    return register


def call(when: When, group: str, moment: HookContext) -> None:
    """Call the hooks that are registered for a moment and group, in the order of their registration."""
    for role, function in HOOKS[when]:
        if role in (None, group):
            function(moment)


def registered_mask() -> int:
    """Return a bit mask, not 0, of registered hooks that the supervisor calls; valid once DAG modules are loaded."""
    return 1 + sum(2 << index for index, when in enumerate(_BY_SUPERVISOR) if HOOKS[when])


def may_exist(when: When, mask: int) -> bool:
    """Return whether hooks of a moment may be registered, by a worker's mask; 0: the worker ended early."""
    return not mask or bool(mask & 2 << _BY_SUPERVISOR.index(when))
