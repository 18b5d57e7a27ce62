"""The one place where what users have written may fail as it likes: a reward, an environment.

How many rows have failed, so that an environment or a reward that never works ends the run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_STEPS = 64
"""Of so many it is known how many rows they have."""
_of_environments: dict[str, FailureStreak] = {}


def failures_of(environment: str) -> FailureStreak:
    return _of_environments.setdefault(environment, FailureStreak())


class FailureStreak:
    """Counts those that have failed since one did not. For many threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lost, self.most = 0, 1
        self.rows: dict[int, int] = {}
        """By step; those of one step may come in several parts, and among those of others."""

    def count(self, step: int, rows: int, failed: int) -> float:
        """Some `rows` of a step are done: how many steps' worth has now failed, without one that did not."""
        with self.lock:
            self.rows[step] = self.rows.pop(step, 0) + rows
            self.most = max(self.most, self.rows[step])
            if len(self.rows) > _STEPS:
                del self.rows[next(iter(self.rows))]
            self.lost = self.lost + failed if failed == rows else 0
            return self.lost / self.most


@contextlib.contextmanager
def contained(failed: Callable[[BaseException], object], kind: type[BaseException] = Exception,
              but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
    """What the block raises ends the block and is handed to `failed`, if it is of this `kind`. The rest goes on up, and
    so does what is meant for the run and not for one sample (`but`)."""
    try:
        yield
    except kind as error:
        if isinstance(error, but):
            raise
        failed(error.with_traceback(error.__traceback__.tb_next))  # as if it were caught where it was raised
