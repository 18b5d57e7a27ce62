"""The one place where what users have written may fail as it likes: a reward, an environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


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
