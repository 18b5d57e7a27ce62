"""Stacks of processes that crash, and of those that are asked where they stand, do not get mixed up."""

from __future__ import annotations

import os
import signal

import pytest

from distflow.telemetry.processes import Child, spawn
from distflow.telemetry.stack_file import StackFile, location_in


def stand(ready: int) -> None:
    os.write(ready, b".")
    while True:
        signal.pause()


def crash(*_: object) -> None:
    os.abort()


@pytest.fixture
def stack():
    made = StackFile()
    yield made
    made.close()


@pytest.fixture
def standing(stack):
    """Start a process that stands in `stand`, and crashes in `crash` when it gets SIGUSR1."""
    started: list[Child] = []

    def start() -> Child:
        readable, writable = os.pipe()

        def work() -> None:
            stack.enable()
            signal.signal(signal.SIGUSR1, crash)
            stand(writable)

        started.append(spawn(work))
        os.close(writable)
        assert os.read(readable, 1) == b"."
        os.close(readable)
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_a_request_leaves_nothing_behind_that_looks_like_a_crash(stack, standing):
    process = standing()
    assert location_in(stack.dump_main(process)).endswith("in stand")
    assert "in stand" in stack.dump(process)
    assert stack.read() == ""
    process.signal(signal.SIGUSR1)
    assert process.poll(60.0) == -signal.SIGABRT
    assert location_in(stack.read()).endswith("in crash")


def test_a_request_that_comes_after_a_crash_does_not_erase_its_stack(stack, standing):
    process = standing()
    process.signal(signal.SIGUSR1)
    assert process.poll(60.0) == -signal.SIGABRT
    assert stack.dump_main(process) == ""
    assert location_in(stack.read()).endswith("in crash")
