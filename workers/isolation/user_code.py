"""Guard around users' code (rewards, environments), and the streak of failures that ends a run where it never works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_MAX_STEPS = 64  # newest steps whose number of rows is kept
_streaks: dict[str, FailureStreak] = {}


def failure_streak_of(environment: str) -> FailureStreak:
    return _streaks.setdefault(environment, FailureStreak())


class FailureStreak:
    """Counts the rows that have failed since the last one that did not. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failed, self.largest = 0, 1
        self.rows: dict[int, int] = {}  # rows by step; the parts of a step may arrive interleaved with other steps

    def count(self, step: int, rows: int, failed: int) -> float:
        """Count `rows` of a step as done; return how many steps' worth of rows in a row have failed."""
        with self.lock:
            self.rows[step] = self.rows.pop(step, 0) + rows
            self.largest = max(self.largest, self.rows[step])
            if len(self.rows) > _MAX_STEPS:
                del self.rows[next(iter(self.rows))]
            self.failed = self.failed + failed if failed == rows else 0
            return self.failed / self.largest


@contextlib.contextmanager
def guarded(failed: Callable[[BaseException], object], kind: type[BaseException] = Exception,
            but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
    """Pass an exception of `kind` from the block to `failed`; let all others through, and those of `but`, which are
    meant for the run and not for one sample."""
    try:
        yield
    except kind as error:
        if isinstance(error, but):
            raise
        failed(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))  # hides this frame
