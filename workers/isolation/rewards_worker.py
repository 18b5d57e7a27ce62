"""Runs in a child process of rewards (`workers.isolation.rewards_pool`): calls reward functions.

    rank → child   a call: {call, key, name, module, settings, secrets, timeout, positional, names, row, samples}
                   secrets: environment variables that the settings name; samples: None, or the length of a row of lists
    child → rank   {call, loaded} once the function's module is imported, then {call, values, metrics} or, if no call of
                   it can succeed, {call, impossible}
                   values: of each sample a number or [reason, trace]; metrics: [[name, sum, count], …]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from distflow.contracts.decorators import REWARDS, load_module
from distflow.errors import DistflowError
from distflow.telemetry.metrics import Metrics, recording
from distflow.telemetry.processes import descendants, kill_descendants
from distflow.telemetry.screen import printable
from workers.isolation.child import Answer, Handler, Message
from workers.isolation.user_code import guarded

_BURST, _REFILL = 20, 30.0  # lines that a reward may print at once, and seconds until it may print one more
_LONGEST_LINE = 1000  # characters
_TRACE = 4000  # characters of a traceback that are sent, counted from its end
LARGEST = 3.4028234663852886e38  # the largest float32, the type of rewards
NO_VALUE = "returned None, not a finite number"
"""Reason of a failure; among several rewards None means that this one is not for the sample, as TRL has it."""
Function = Callable[..., Any]


class CallFailure(Exception):
    """A call that returned no finite number."""


class WrongLength(DistflowError):
    """A list of another length than there are samples: whose its numbers are is not known, and for one sample alone it
    may seem right."""


class ConsoleOutput(io.TextIOBase):
    """What rewards print: whole lines behind the reward's name, as many as a screen and a disk can take.

    A reward may print `_BURST` lines at once and one more each `_REFILL` seconds; how many were left out is said when
    the next one is shown. What other programs print, or C libraries, does not come here.
    """

    def __init__(self, stream: Any):
        self.stream, self.reward, self.pending = stream, "", ""
        self.allowances: dict[str, tuple[float, float]] = {}  # lines that a reward may print, and when that was so
        self.left_out: Counter[str] = Counter()

    def write(self, text: str) -> int:
        *lines, self.pending = re.split(r"\r\n|[\r\n]", self.pending + text)
        for line in lines:
            self._show(line)
        self.pending = self.pending[-_LONGEST_LINE:]
        return len(text)

    def begin(self, reward: str) -> None:
        if self.pending:
            self.write("\n")
        self.reward = reward

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Leave the stream as it is: the encoding and buffers that a module asks for are those of all rewards."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def _show(self, line: str) -> None:
        now = time.monotonic()
        lines, since = self.allowances.get(self.reward, (_BURST, now))
        lines = min(_BURST, lines + (now - since) / _REFILL)
        self.allowances[self.reward] = max(0.0, lines - 1 if lines >= 1 else lines), now
        if lines < 1:
            self.left_out[self.reward] += 1
            return
        more = self.left_out.pop(self.reward, 0)
        note = f" (… {more} more lines left out)" if more else " (… more is left out)" if lines < 2 else ""
        self.stream.write(f"[reward {self.reward}] {printable(line)[:_LONGEST_LINE]}{note}\n")
        self.stream.flush()


class RewardHandler(Handler):

    def __init__(self) -> None:
        self.outputs: list[ConsoleOutput] = []
        self.loaded: dict[tuple[str, str], Function] = {}
        self.secrets: dict[str, str] = {}
        self.kept: set[int] = set()  # processes that modules have started while being imported, which may stay
        self.waiting = 0  # coroutines under way

    def answer(self, call: Message, send: Callable[[Message], None]) -> Answer:
        for name in self.secrets.keys() - call["secrets"].keys():
            os.environ.pop(name, None)
        self.secrets = call["secrets"]
        os.environ |= self.secrets
        self._capture_output(call["name"])
        try:
            function = self._function(call, send)
        except DistflowError as error:
            return {"impossible": str(error)}
        if inspect.iscoroutinefunction(function):
            return self._wait(function, call)
        with _answering(call, BaseException) as answer:
            value = _call(function, call, call["row"])
            if killed := self._kill_leftovers():
                raise CallFailure(f"left {killed} processes running, which were ended; what is to stay must be started "
                                  "while the module is imported")
            answer["values"] = _values(value, call["samples"])
        return answer

    async def _wait(self, function: Function, call: Message) -> Message:
        self.waiting += 1
        with _answering(call, Exception) as answer:
            value = await asyncio.wait_for(_call(function, call, call["row"]), call["timeout"])
            answer["values"] = _values(value, call["samples"])
        self.waiting -= 1
        if not self.waiting:
            self._kill_leftovers()
        return answer

    def _function(self, call: Message, send: Callable[[Message], None]) -> Function:
        name, key = call["name"], (call["module"], call["name"])
        if key not in self.loaded:
            load_module(call["module"])
            if name not in REWARDS:
                raise DistflowError(f"reward `{name}` is not there when module `{call['module']}` is imported alone. "
                                    "Define it at the top of a module, and import no module that needs the run.")
            self.loaded[key] = REWARDS[name]
            self.kept = descendants(os.getpid())
            send({"call": call["call"], "loaded": True})
        return self.loaded[key]

    def _capture_output(self, reward: str) -> None:
        if not self.outputs:
            self.outputs = [ConsoleOutput(sys.stdout), ConsoleOutput(sys.stderr)]
            sys.stdout, sys.stderr = self.outputs
        for output in self.outputs:
            output.begin(reward)

    def _kill_leftovers(self) -> int:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 0  # the usual case: no child at all
        killed = kill_descendants(os.getpid(), self.kept)
        for process in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return len(killed)


@contextlib.contextmanager
def _answering(call: Message, kind: type[BaseException]) -> Iterator[Message]:
    """Yield the answer of a call to be filled in; an exception of `kind` fills in why its samples have failed."""
    answer: Message = {}
    reported = Metrics()

    def failed(error: BaseException) -> None:
        timed_out = isinstance(error, TimeoutError) and not str(error)
        reason = f"took longer than {call['timeout']:g} s" if timed_out else _reason(error)
        trace = "" if isinstance(error, CallFailure) else traceback.format_exc()[-_TRACE:]
        answer.update(values=[[reason, trace]] * (call["samples"] or 1), metrics=[])

    try:
        with guarded(failed, kind, but=DistflowError), recording(reported):
            yield answer
            answer["metrics"] = reported.means()
    except DistflowError as error:
        answer["impossible"] = str(error)


def call_in_rank(function: Function, call: Message, row: list[Any]) -> float | str | None:
    """Call a reward in this process; return its number, the reason for a failure, or None if it returned None."""
    reasons: list[str] = []
    with guarded(lambda error: reasons.append(_reason(error)), but=DistflowError):
        value = _call(function, call, row)
        return None if value is None else _number(value)
    return reasons[0]


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CallFailure) else f"raised {type(error).__name__}: {str(error)[:300]}"


def _call(function: Function, call: Message, row: list[Any]) -> Any:
    positional = call["positional"]
    return function(*row[:positional], **dict(zip(call["names"], row[positional:])), **call["settings"])


def _values(value: Any, samples: int | None) -> list[float | list[str]]:
    if samples is None:
        return [_number(value)]
    values = value.reshape(-1).tolist() if hasattr(value, "tolist") else value
    values = list(values) if isinstance(values, Iterator) else values
    if not isinstance(values, list | tuple):
        raise CallFailure(f"returned {repr(value)[:200]}, not a list with a number for each sample")
    if len(values) != samples:
        raise WrongLength(f"it returned a list of {len(values)} for {samples} samples, where it must return a list of "
                          f"{samples} numbers")
    return [_number_or_failure(each) for each in values]


def _number_or_failure(value: Any) -> float | list[str]:
    try:
        return _number(value)
    except CallFailure as error:
        return [str(error), ""]


def _number(value: Any) -> float:
    """Return a reward as a float, of a mapping its `score` (verl); raise CallFailure if it is no number, or not finite
    as float32."""
    value = value["score"] if isinstance(value, dict) and "score" in value else value
    try:
        number = None if isinstance(value, str | bytes | None) else float(getattr(value, "item", lambda: value)())
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises RuntimeError for a tensor of many
        number = None
    if value is None:
        raise CallFailure(NO_VALUE)
    if number is None or not abs(number) <= LARGEST:
        raise CallFailure(f"returned {repr(value)[:200]}, not a finite number")
    return number
