"""What users register: node functions and rewards. A registry is a dict and a decorator."""

from __future__ import annotations

import importlib
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distflow.schema.errors import InvalidInput, Mistake, Spot, shown

F = TypeVar("F", bound=Callable[..., Any])
Reward = str
"""The annotation of a setting that names a reward."""

NODES: dict[str, Callable[..., Any]] = {}
REWARDS: dict[str, Callable[..., Any]] = {}
_IMPORT_FAILS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError,
                 RuntimeError, ArithmeticError, AssertionError)
"""What a mistake in a module raises when it is imported."""


@dataclass(frozen=True)
class Marks:
    """What `@node` says of a function beyond its signature."""

    writes: tuple[str, ...] = ()
    """Columns that it returns, in order; `{role}` stands for the node's role."""
    type: str = "COMPUTE"
    """MODEL_INFERENCE, MODEL_TRAIN or COMPUTE."""
    keep_together: str | None = None
    """Column whose equal values must not be split between ranks."""
    repeats: str | None = None
    """Setting that says how many rows it returns for each row that it gets."""
    refills: str | None = None
    """For a function that writes `keep`: setting that says how often a step may draw prompts, the first time included,
    until as many as its batch has are kept."""
    default_for: tuple[str, ...] = ()
    """Roles whose nodes of this type run it when they name no function."""
    requires: dict[str, str] = field(default_factory=dict)
    """Setting → optional column that must be there when the setting is not zero."""
    bounds: dict[str, str] = field(default_factory=dict)
    """Setting → what its number must meet, as `{"clip": ">= 0", "top_p": "> 0, <= 1"}`; None is let through."""
    belongs_to: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Setting → (another setting, its value): it must be given with that value and with no other, as
    `{"fixed_length": ("aggregate", "fixed_length_sum")}`."""
    only_with: dict[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Setting → (another setting, its values): it may be given with those and with no other, as
    `{"clip": ("loss", ("ppo", "gspo"))}`."""
    refuses: dict[str, dict[Any, str]] = field(default_factory=dict)
    """Setting → value that its annotation leaves out → why, and what to write instead."""
    head: str | None = "lm"
    """For a model function, what its role must have: "lm" or "value"; None if it works with any."""
    samples: bool | None = None
    """For a model function, whether its role must be ready to sample; those that repeat rows are taken to."""

    def __post_init__(self) -> None:
        for name in ("writes", "default_for"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))


def node(
    *,
    writes: str | tuple[str, ...] = (),
    type: str = "COMPUTE",  # noqa: A002 - the word of the DAG
    keep_together: str | None = None,
    repeats: str | None = None,
    refills: str | None = None,
    default_for: str | tuple[str, ...] = (),
    requires: dict[str, str] | None = None,
    bounds: dict[str, str] | None = None,
    belongs_to: dict[str, tuple[str, Any]] | None = None,
    only_with: dict[str, tuple[str, tuple[Any, ...]]] | None = None,
    refuses: dict[str, dict[Any, str]] | None = None,
    head: str | None = "lm",
    samples: bool | None = None,
) -> Callable[[F], F]:
    """Make a function usable as `function:` of a node; its signature is its contract.

    Positional parameters are the columns that it reads (optional if they have a default), keyword-only ones the
    settings of `with:`. A model function's first parameter is its role's engine.

    Args: those of `Marks`, a single name standing for a tuple of one.

    All of them are written as plain values, so that they are known without importing the module.
    """
    marks = Marks(writes, type, keep_together, repeats, refills, default_for,  # type: ignore[arg-type]
                  requires or {}, bounds or {}, belongs_to or {}, only_with or {}, refuses or {}, head, samples)

    def register(function: F) -> F:
        function.__distflow_node__ = marks  # type: ignore[attr-defined]
        return _register(NODES, function)

    return register


def reward(function: F) -> F:
    """Make `function(completion, answer) -> float` usable as `reward:` of a `score` node, by its name."""
    return _register(REWARDS, function)


def _register(registry: dict[str, Callable[..., Any]], function: F) -> F:
    """Raises InvalidInput if another module has registered a function of the same name."""
    other = registry.get(function.__name__)
    if other is not None and other.__module__ != function.__module__:
        raise InvalidInput(f"`{function.__name__}` of module `{function.__module__}` has the name of a function of "
                           f"module `{other.__module__}`. Give it another.")
    registry[function.__name__] = function
    return function


def load_module(name: str, hint: str = "") -> types.ModuleType:
    """Import a module of node functions, which registers them.

    Raises:
        InvalidInput: the import fails; names the line that raised, and `hint` says why it was imported.
    """
    try:
        return importlib.import_module(name)
    except _IMPORT_FAILS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where: Spot | None = Spot(shown(frame.filename), frame.lineno or 0, 1, 0, frame.line or "")
        if isinstance(error, SyntaxError):
            text = (error.text or "").rstrip()
            where = Spot(shown(error.filename or name), error.lineno or 0, error.offset or 0, 1, text)
        elif frame.filename.startswith("<frozen"):  # the import system itself: the module was not found
            where = None
        what = f"module `{name}` fails when it is imported: {type(error).__name__}: {error}"
        raise InvalidInput(Mistake(what, where, hint)) from error
