"""Decorators by which users register node functions, rewards, losses and environments; each registry is a dict."""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, overload

from pydantic import AfterValidator, Field

from distflow.errors import Diagnostic, InvalidInput, Location, is_users, shown

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Word:
    """Name of a kind of settings, in the annotations of shipped functions: the checks of settings go by it."""

    name: str


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a regular expression: {error}\nIn YAML, put it in single quotes.") from None
    return text


LOSS = r"^\w+(\.\w+)*:\w+$"
"""Form of the name of a user's loss."""
Reward = Annotated[Any, Word("Reward")]
"""Recipe of rewards: see `distflow.contracts.rewards`."""
Regex = Annotated[str, AfterValidator(_compiles), Word("Regex")]
Loss = Annotated[str, Field(pattern=LOSS), Word("Loss")]
"""Function under `@loss`, as `MODULE:FUNCTION`."""
Environment = Annotated[str, Word("Environment")]
Agent = Annotated[str, Word("Agent")]
"""Command: see `distflow.contracts.agents`."""
Template = Annotated[str, Word("Template")]
"""Text with columns in braces: see `distflow.contracts.templates`."""

NODES: dict[str, Callable[..., Any]] = {}
REWARDS: dict[str, Callable[..., Any]] = {}
ENVIRONMENTS: dict[str, type] = {}
_IMPORT_FAILS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError,
                 RuntimeError, ArithmeticError, AssertionError, SystemExit)
"""Exceptions by which importing a module with a mistake fails."""


@dataclass(frozen=True)
class NodeMarks:
    """Arguments of `@node`: what a contract needs beyond the signature."""

    writes: tuple[str, ...] = ()  # columns that it returns, in order; `{role}` stands for the node's
    type: str = "COMPUTE"  # MODEL_INFERENCE, MODEL_TRAIN or COMPUTE
    keep_together: str | None = None  # column whose equal values stay on one rank
    repeats: str | None = None  # setting with the number of rows that it returns for each row that it gets
    refills: str | None = None
    """For a function that writes `keep`: setting with the most draws of prompts until a batch of them is kept."""
    default_for: tuple[str, ...] = ()  # roles whose nodes of this type run it when they name no function
    requires: dict[str, str] = field(default_factory=dict)
    """Setting → optional column that must be there when the setting is not zero."""
    belongs_to: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Setting → (another setting, the value with which it must be given, and with no other)."""
    only_with: dict[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    """Setting → (another setting, the values with which alone it may be given)."""
    refuses: dict[str, dict[Any, str]] = field(default_factory=dict)
    """Setting → value that its annotation leaves out → why, and what to write instead."""
    head: str | None = "lm"  # head that the role of a model function must have: "lm" or "value"; None for any
    samples: bool | None = None
    """Whether the engine of a model function must be ready to sample; default: if it repeats rows."""
    row_wise: bool = False
    """A model function's result for a row depends on that row alone, so that it may run while others are sampled."""
    tokenizer_only: bool = False
    """A model function needs no weights of its role, so that it may make prompts on ranks that only sample."""

    def __post_init__(self) -> None:
        for name in ("writes", "default_for"):
            value = getattr(self, name)
            object.__setattr__(self, name, _tuple(value))


def node(
    *,
    writes: str | tuple[str, ...] = (),
    type: str = "COMPUTE",  # noqa: A002 - the word of the DAG
    keep_together: str | None = None,
    repeats: str | None = None,
    refills: str | None = None,
    default_for: str | tuple[str, ...] = (),
    requires: dict[str, str] | None = None,
    belongs_to: dict[str, tuple[str, Any]] | None = None,
    only_with: dict[str, tuple[str, tuple[Any, ...]]] | None = None,
    refuses: dict[str, dict[Any, str]] | None = None,
    head: str | None = "lm",
    samples: bool | None = None,
    row_wise: bool = False,
    tokenizer_only: bool = False,
) -> Callable[[F], F]:
    """Make a function usable as `function:` of a node; its signature is its contract.

    Positional parameters are the columns that it reads (optional with a default), keyword-only ones the settings of
    `with:`. A model function's first parameter is its role's engine. Arguments: see `NodeMarks`; plain values.
    """
    marks = NodeMarks(_tuple(writes), type, keep_together, repeats, refills, _tuple(default_for), requires or {},
                      belongs_to or {}, only_with or {}, refuses or {}, head, samples, row_wise, tokenizer_only)

    def register(function: F) -> F:
        function.__distflow_node__ = marks
        return _register(NODES, function)

    return register


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True)
class RewardMarks:
    timeout: float = 10.0
    retries: int = 1
    concurrency: int = 16
    in_rank: bool = False
    shortcut: Callable[..., float | None] | None = None
    check: Callable[..., str] | None = None
    reference: Callable[..., str | None] | None = None


@overload
def reward(function: F, /) -> F: ...


@overload
def reward(*, timeout: float = 10.0, retries: int = 1, concurrency: int = 16, in_rank: bool = False,
           shortcut: Callable[..., float | None] | None = None, check: Callable[..., str] | None = None,
           reference: Callable[..., str | None] | None = None) -> Callable[[F], F]: ...


def reward(function: F | None = None, *, timeout: float = 10.0, retries: int = 1, concurrency: int = 16,
           in_rank: bool = False, shortcut: Callable[..., float | None] | None = None,
           check: Callable[..., str] | None = None, reference: Callable[..., str | None] | None = None) -> Any:
    """Make a function usable as `reward:` of a `score` node, by its name; as `@reward` or `@reward(timeout=60)`.

    Its positional parameters say what it gets. `completion`, `answer`, `question` and `response` (its tokens) are those
    of one sample, of which it returns the reward, a finite number. `completions`, `answers`, `questions` and
    `responses` are lists with those of all samples of a rank, for which it returns a list of numbers. Any other one
    names a column of the dataset (`data.columns`) or of a node upstream. Keyword-only parameters are settings, given
    as `reward: {NAME: {SETTING: VALUE}}`. It may be `async`.

    It runs in a process of its own. A call that raises, takes too long, ends its process or returns anything but finite
    numbers is repeated, and then its sample leaves the step. A DistflowError says that no call can succeed, and ends
    the run; a list of another length than there are samples ends it too.

    Args:
        timeout: seconds for one call; for a function of lists, for all its samples.
        retries: further calls for a sample whose call has failed.
        concurrency: calls of an async function that wait at the same time, in one process.
        in_rank: call it once, in the rank itself: only for what cannot hang. Not for lists and async functions.
        shortcut: called first, in the rank; what it returns is the reward unless it is None. It must not hang either.
        check: called with the settings of a recipe when the run is validated; says what is wrong, else "". The module
            is imported for it.
        reference: returns the completion that must earn full pay for a record, or None where none is known. Preflight
            calls it with the columns and settings that its parameters name, positional and keyword-only as those of a
            reward; `opening` is the text with which the chat template begins the answer. It raises ValueError where no
            completion of the record can be judged.
    """
    marks = RewardMarks(timeout, retries, concurrency, in_rank, shortcut, check, reference)

    def register(function: F) -> F:
        function.__distflow_reward__ = marks
        return _register(REWARDS, function)

    return register if function is None else register(function)


def loss(function: F) -> F:
    """Make a function usable as `loss: MODULE:FUNCTION` of a `policy_update` node.

    Its positional parameters say what it gets; each is a tensor with one value for each trained token of a micro-batch:

        logprobs        of the sampled tokens under the model that is trained; gradients flow here alone
        old_logprobs    the same under the model that the step started from, or that sampled
        advantages      what each token is worth
        lengths         [rows] int64: how many of these tokens each row has, one row after the other

    `logprobs` is needed, the others may be left out. Keyword-only parameters are settings, from `loss_settings:`. It
    returns the loss of each token, in the shape of `logprobs`, which may depend on the other tokens of its row, but not
    on other rows: `aggregate:` says how tokens count, and nothing depends on micro-batches and ranks.
    """
    function.__distflow_loss__ = True
    return function


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to a turn of the model: what it shows (the model does not read that of the last turn),
    whether that was the last, and its reward, which is added to those of the trajectory's other turns."""

    observation: str = ""
    done: bool = False
    reward: float = 0.0


@overload
def environment(kind: C, /) -> C: ...


@overload
def environment(*, safe: bool = False, together: int = 512, stateless: bool = False) -> Callable[[C], C]: ...


def environment(kind: C | None = None, *, safe: bool = False, together: int = 512, stateless: bool = False) -> Any:
    """Make a class usable as `environment:` of a `converse` node, by its name; each trajectory has an instance.

    `__init__`'s positional parameters are columns of text (`question` and `answer` are those of the data), its
    keyword-only ones the settings of `environment_settings:`. `step(text)`, which may be `async`, gets what the model
    said in its turn and returns a `Turn`. All of it runs in a process of its own. Where the environment begins, as in a
    game, `start()`, which may be `async`, returns a text that is put behind the question before the first turn. It is
    called in an instance of its own, once for all rows of a prompt: it depends on columns and settings alone.

    A conversation whose process or machine is lost goes on in a new instance, which repeats the steps so far and must
    answer them as before; else it goes on from the first answer that differs. With methods `snapshot()`, which returns
    numbers, texts, bytes, lists and dicts, and `restore(state)` it is restored instead.

    Args:
        safe: the same steps give the same in a new instance, and change nothing elsewhere: a step whose process ended
            is tried again. Else the trajectory is left out.
        together: steps of safe ones that a process has under way at a time, if `step` is a coroutine. Give fewer where
            a step computes, for its time limit runs from its beginning.
        stateless: an answer depends on the columns and on the text of its turn alone, so that no steps are repeated.
    """
    def register(kind: C) -> C:
        kind.__distflow_safe__, kind.__distflow_together__, kind.__distflow_stateless__ = safe, together, stateless
        return _register(ENVIRONMENTS, kind)

    return register if kind is None else register(kind)


def _register(registry: dict[str, Any], function: F) -> F:
    other = registry.get(function.__name__)
    if other is not None and other.__module__ != function.__module__:
        raise InvalidInput(f"`{function.__name__}` of module `{function.__module__}` has the name of a function of "
                           f"module `{other.__module__}`. Give it another.")
    registry[function.__name__] = function
    return function


def load_module(name: str, hint: str = "", limit: float = 300.0) -> types.ModuleType:
    """Import a module of node functions, which registers them. Raises InvalidInput with the failing line and `hint`,
    also if it takes longer than `limit` seconds in the main thread."""
    try:
        with _limited(limit):
            return importlib.import_module(name)
    except _IMPORT_FAILS as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        frame = ([each for each in frames if is_users(each.filename)] or frames)[-1]
        where: Location | None = Location(shown(frame.filename), frame.lineno or 0, 1, 0, frame.line or "")
        if isinstance(error, SyntaxError):
            text = (error.text or "").rstrip()
            where = Location(shown(error.filename or name), error.lineno or 0, error.offset or 0, 1, text)
        elif frame.filename.startswith("<frozen"):  # the import system itself: the module was not found
            where = None
        what = f"module `{name}` fails when it is imported: {type(error).__name__}: {error}"
        raise InvalidInput(Diagnostic(what, where, hint)) from error


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer. Signals reach the main thread alone: in others there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it is still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
