"""What users register: node functions and rewards. A registry is a dict and a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

NODES: dict[str, Callable[..., Any]] = {}
REWARDS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Marks:
    """What `@node` says of a function beyond its signature. See `node`."""

    writes: tuple[str, ...]
    type: str
    keep_together: str | None = None
    repeats: str | None = None
    default_for: tuple[str, ...] = ()
    requires: dict[str, str] = field(default_factory=dict)


def node(
    *,
    writes: str | tuple[str, ...] = (),
    type: str = "COMPUTE",  # noqa: A002 - the word of the DAG
    keep_together: str | None = None,
    repeats: str | None = None,
    default_for: str | tuple[str, ...] = (),
    requires: dict[str, str] | None = None,
) -> Callable[[F], F]:
    """Make a function usable as `function:` of a node; its signature is its contract.

    Positional parameters are the columns that it reads (optional if they have a default), keyword-only ones the
    settings of `with:`. A model function's first parameter is its role's engine.

    Args:
        writes: columns that it returns, in order; `{role}` stands for the node's role.
        type: MODEL_INFERENCE, MODEL_TRAIN or COMPUTE.
        keep_together: column whose equal values must not be split between ranks.
        repeats: setting that says how many rows it returns for each row that it gets.
        default_for: roles whose nodes of this type run it when they name no function.
        requires: setting → optional column that must be there when the setting is not zero.
    """
    marks = Marks(_names(writes), type, keep_together, repeats, _names(default_for), requires or {})

    def register(function: F) -> F:
        function.__distflow_node__ = marks  # type: ignore[attr-defined]
        NODES[function.__name__] = function
        return function

    return register


def reward(function: F) -> F:
    """Make `function(completion, answer) -> float` usable as `reward:` of a `score` node, by its name."""
    REWARDS[function.__name__] = function
    return function


def _names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
