"""New weights for an engine that samples, pulled while it samples."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from distflow.robust import pulse
from distflow.weights.assembled import Weights
from distflow.weights.errors import WeightsLate
from distflow.weights.pull import Puller

_MOMENT = 0.05
"""Seconds between two looks at the board."""
_PATIENCE = 5.0
"""Seconds of pulling after which the thread looks whether it is over."""


class Updates:
    """Pulls each new version in a thread of its own."""

    def __init__(self, puller: Puller, version: int):
        """`version`: of the weights that the engine has."""
        self.puller, self.version = puller, version
        self.fresh: Weights | None = None
        self.changed = threading.Condition()
        self.over = False
        self.pool = ThreadPoolExecutor(1, "weights")
        self.job = self.pool.submit(self._pull)

    def arrived(self) -> Weights | None:
        """Weights that have come. No others are pulled until they are loaded, or dropped.

        Raises what has ended the thread.
        """
        if self.job.done():
            self.job.result()
        return self.fresh

    def loaded(self) -> None:
        """The engine has them."""
        self.version = self.fresh.version
        self.drop()

    def drop(self) -> None:
        """Pull the newest again: another rank of the engine has others than these."""
        with self.changed:
            self.fresh = None
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.pool.shutdown()
        self.puller.close()

    def _pull(self) -> None:
        while not self.over:
            if self.puller.newest() > self.version:
                pulse.current().happens("pulling")
                with contextlib.suppress(WeightsLate):  # it goes on where it stood
                    weights = self.puller.pull(seconds=_PATIENCE)
                    with self.changed:
                        self.fresh = weights
                        self.changed.wait_for(lambda: self.fresh is None or self.over)
            with self.changed:
                self.changed.wait_for(lambda: self.over, timeout=_MOMENT)
