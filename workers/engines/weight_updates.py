"""Pulls new weights in a background thread while the engine samples."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from distflow.errors import EngineError
from distflow.telemetry import heartbeat
from distflow.telemetry.events import record
from distflow.weights.chunk_store import Weights
from distflow.weights.errors import WeightsLate
from distflow.weights.fingerprint import fingerprint_of
from distflow.weights.manifest import version_of
from distflow.weights.puller import Puller
from workers.engines.rollout import Rollout

_PULL_TIMEOUT = 5.0  # seconds of pulling after which a version is recorded as late
_RETRY_INTERVAL = 1.0  # seconds until a version without a live source is tried again


class WeightUpdates:
    """Thread that pulls each newer version, once the one before is used or dropped."""

    def __init__(self, puller: Puller, version: int, role: str = ""):
        self.puller, self.version, self.role, self.key = puller, version, role, ""
        self.missed = ""  # key of the version that could not be pulled
        self.pulled: Weights | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.pool = ThreadPoolExecutor(1, "weights")
        self.job = self.pool.submit(self._pull)

    def pulled_weights(self) -> Weights | None:
        """Return the pulled weights, or raise the thread's error. The next pull waits until they are used."""
        if self.job.done():
            self.job.result()
        return self.pulled

    def load_into(self, engine: Rollout) -> None:
        """Load the pulled weights into an engine, which proves that it has them. Collective over its ranks."""
        if (weights := self.pulled) is None:
            raise EngineError("no weights have been pulled")
        engine.load(weights.tensors(), weights.version)
        published = fingerprint_of(weights.values) if weights.values else 0
        engine.prove(self.role, weights.values_in(engine.dtype), published)

    def mark_loaded(self) -> None:
        if self.pulled is not None:
            self.version, self.key = self.pulled.version, self.pulled.key
        self.drop()

    def drop(self) -> None:
        """Discard the weights and pull the newest: another rank of the engine has a different version."""
        with self.changed:
            self.pulled = None
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.puller.stop()
        self.pool.shutdown()
        self.puller.close()

    def _pull(self) -> None:
        while not self.closed:
            newest = self.puller.newest_key()
            if self._is_newer(newest):
                heartbeat.current().notify("pulling")
                self._pull_one(newest)
            else:
                self.puller.wait_for_newer(newest)

    def _is_newer(self, newest: str) -> bool:
        """Return whether to pull the version with this key. A restarted trainer may use a number again. With a lower
        one it is catching up: prompts enqueued before are owed the weights that are here, or newer ones."""
        if not self.key:  # the trainer starts with the same files
            return version_of(newest) > self.version
        return newest != self.key and version_of(newest) >= self.version

    def _pull_one(self, newest: str) -> None:
        try:
            weights = self.puller.pull(seconds=_PULL_TIMEOUT)
        except WeightsLate as error:  # the next pull continues where this one stopped
            if not self.closed:
                self._record_missed(newest, str(error))
            return
        with self.changed:
            if weights.key == self.key:  # the newest complete version is already loaded
                self._record_missed(newest, "no process that lives has all of it: the trainer may have died")
                self.changed.wait_for(lambda: self.closed, timeout=_RETRY_INTERVAL)
                return
            self.pulled = weights
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.pulled is None or self.closed)

    def _record_missed(self, newest: str, why: str) -> None:
        if self.missed != newest:
            self.missed = newest
            record("weights_late", who=self.puller.who, version=version_of(newest), why=why)
