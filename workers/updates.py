"""New weights for an engine that samples, pulled while it samples."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from distflow.weights.assembled import Weights
from distflow.weights.pull import Puller

_MOMENT = 0.05
"""Seconds between two looks at the board."""


class Updates:
    """Pulls each new version in a thread of its own."""

    def __init__(self, puller: Puller, version: int):
        """`version`: of the weights that the engine has."""
        self.puller, self.version = puller, version
        self.fresh: Weights | None = None
        self.changed = threading.Condition()
        self.over = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._pull, name="weights", daemon=True)
        self.thread.start()

    @property
    def newest(self) -> int:
        """The version that the trainer has published last."""
        return max(self.puller.newest(), self.version)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Weights | None]:
        """Weights that have come and were not taken yet; while they are in use, no others are pulled.

        Raises what has ended the thread.
        """
        if self.failure is not None:
            raise self.failure
        yield self.fresh
        if self.fresh is not None:
            with self.changed:
                self.fresh = None
                self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.thread.join()
        self.puller.close()

    def _pull(self) -> None:
        try:
            while not self.over:
                if self.puller.newest() > self.version:
                    weights = self.puller.pull()
                    with self.changed:
                        self.fresh, self.version = weights, weights.version
                        self.changed.wait_for(lambda: self.fresh is None or self.over)
                with self.changed:
                    self.changed.wait_for(lambda: self.over, timeout=_MOMENT)
        except BaseException as error:  # noqa: BLE001 - the thread that samples raises it
            self.failure = error
