"""vLLM engines with split models start one after the other on a machine without GPUs; vLLM itself is not needed to see
it."""

from __future__ import annotations

import fcntl
import os

import pytest
from ranks import run_ranks

from distflow.errors import EngineError
from workers.engines.vllm import start


@pytest.fixture
def turn():
    """What the first rank of an engine that starts has locked."""
    place = os.open("/dev/shm", os.O_RDONLY)
    yield place
    os.close(place)


def take_turn(timeout: float) -> str:
    start._TURN_TIMEOUT, before = timeout, start._TURN_TIMEOUT
    try:
        with start._one_start_at_a_time("cpu", 2):
            return "started"
    except EngineError as error:
        return str(error)
    finally:
        start._TURN_TIMEOUT = before


def test_one_that_hangs_is_named_on_all_ranks_and_the_next_one_starts(turn):
    fcntl.flock(turn, fcntl.LOCK_EX)
    told = run_ranks(2, take_turn, 0.1)
    assert told[0] == told[1]
    assert f"process {os.getpid()}, which may hang" in told[0]
    fcntl.flock(turn, fcntl.LOCK_UN)
    assert run_ranks(2, take_turn, 60.0) == ["started", "started"]
    assert run_ranks(2, take_turn, 60.0) == ["started", "started"], "a turn comes to its end"
