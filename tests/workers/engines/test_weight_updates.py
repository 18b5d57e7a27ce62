"""Weights that come while an engine samples: which of them are news, and what is said where none come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from weights.movers import Mover

from distflow.store.tcp import TCPStoreClient
from distflow.weights.directory import Directory, SourceEntry
from distflow.weights.manifest import ManifestDigest, PublishedVersion
from distflow.weights.puller import Puller
from workers.engines import weight_updates
from workers.engines.weight_updates import WeightUpdates

TOKEN, LIMIT = secrets.token_bytes(32), 60.0


@pytest.fixture
def late(monkeypatch):
    """The events that say so."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(weight_updates, "record", lambda kind, **facts: found.append(facts))
    monkeypatch.setattr(weight_updates, "_RETRY_INTERVAL", 0.05)
    monkeypatch.setattr(weight_updates, "_PULL_TIMEOUT", 0.1)
    return found


@pytest.fixture
def pulled(store, late):
    made = WeightUpdates(Puller(store.below("run"), TOKEN, "rollout 0"), 0)
    pull, made.tried = made.puller.pull, 0

    def counted(**given: Any) -> Any:
        made.tried += 1
        return pull(**given)

    made.puller.pull = counted
    yield made
    made.close()


def until(found: Callable[[], Any]) -> Any:
    """What there is in the end."""
    end = time.monotonic() + LIMIT
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def publisher(store: TCPStoreClient, version: int) -> Mover:
    made = Mover("publisher", store.port, TOKEN, rank=0, ranks=1)
    made.ask("publish", version=version, mib=1)
    return made


def test_a_trainer_that_starts_anew_may_use_a_number_again(store, pulled):
    """What it publishes then is not what the engine has."""
    keys = set()
    for version in (5, 5, 6):
        trainer = publisher(store, version)
        weights = until(pulled.pulled_weights)
        assert weights.version == version
        keys.add(weights.key)
        pulled.mark_loaded()
        trainer.kill()
    assert len(keys) == 3


def lose(store: TCPStoreClient) -> None:
    """A second version was published, and everybody who had it has died."""
    directory = Directory(store.below("run"), SourceEntry("somebody", ("127.0.0.1", 1)))
    directory.begin_attempt("of a dead trainer")
    assert directory.announce_version(PublishedVersion(2, "of a dead trainer", (ManifestDigest("0" * 32, 1 << 20, 4),)))


def test_weights_that_are_here_are_no_news_while_nobody_has_the_newest(store, pulled, late):
    trainer = publisher(store, 1)
    until(pulled.pulled_weights)
    pulled.mark_loaded()
    trainer.kill()
    lose(store)
    tried = pulled.tried
    until(lambda: pulled.tried > tried + 3)
    assert pulled.pulled_weights() is None
    assert late == [{"who": "rollout 0", "version": 2,
                     "why": "no process that lives has all of it: the trainer may have died"}]
    again = publisher(store, 2)
    assert until(pulled.pulled_weights).version == 2
    again.kill()


def test_what_does_not_come_is_told_once(store, pulled, late):
    lose(store)
    until(lambda: pulled.tried > 3)
    (said,) = late
    assert said["version"] == 2
    assert "no version of the weights could be pulled" in said["why"]


def test_closing_does_not_wait_for_weights_that_do_not_come(store, pulled, late, monkeypatch):
    """A worker that fails would otherwise report it only after the pull's time-out."""
    monkeypatch.setattr(weight_updates, "_PULL_TIMEOUT", LIMIT)
    lose(store)
    until(lambda: pulled.tried)
    began = time.monotonic()
    pulled.close()
    assert time.monotonic() - began < LIMIT / 4
    assert late == [] or late[0]["version"] == 2
