"""New weights for an engine that samples, pulled while it samples."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from distflow.telemetry import heartbeat
from distflow.telemetry.events import record
from distflow.weights.chunk_store import Weights
from distflow.weights.errors import WeightsLate
from distflow.weights.manifest import version_of
from distflow.weights.puller import Puller

_MOMENT = 0.05
"""Seconds between two looks at the board."""
_PATIENCE = 5.0
"""Seconds of pulling after which the thread looks whether it is over."""
_AGAIN = 1.0
"""Seconds until a version that nobody has is asked for again."""


class WeightUpdates:
    """Pulls each new version in a thread of its own."""

    def __init__(self, puller: Puller, version: int):
        """`version`: of the weights that the engine has from its files."""
        self.puller, self.version, self.key = puller, version, ""
        self.missed = ""
        """The version that could not be pulled."""
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
        self.version, self.key = self.fresh.version, self.fresh.key
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
            newest = self.puller.newest_key()
            if self._is_news(newest):
                heartbeat.current().happens("pulling")
                self._pull_one(newest)
            with self.changed:
                self.changed.wait_for(lambda: self.over, timeout=_MOMENT)

    def _is_news(self, newest: str) -> bool:
        """A trainer that starts anew may use a number again. With a lower one it has only to catch up: what was ordered
        before is owed the weights that are here, or newer ones."""
        if not self.key:  # those of the files are what the trainer begins with
            return version_of(newest) > self.version
        return newest != self.key and version_of(newest) >= self.version

    def _pull_one(self, newest: str) -> None:
        try:
            weights = self.puller.pull(seconds=_PATIENCE)
        except WeightsLate as error:  # it goes on where it stood
            self._miss(newest, str(error))
            return
        with self.changed:
            if weights.key == self.key:  # those that are here are no news
                self._miss(newest, "no process that lives has all of it: the trainer may have died")
                self.changed.wait_for(lambda: self.over, timeout=_AGAIN)
                return
            self.fresh = weights
            self.changed.wait_for(lambda: self.fresh is None or self.over)

    def _miss(self, newest: str, why: str) -> None:
        if self.missed != newest:
            self.missed = newest
            record("weights_late", who=self.puller.who, version=version_of(newest), why=why)
