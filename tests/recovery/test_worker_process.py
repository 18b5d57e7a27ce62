"""A worker that fails ends at once with an exit report, though its supervisor reads that only afterwards."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import NoReturn

import pytest

from distflow.recovery.worker_process import FAILED, WorkerContext, become_worker, read_exit_report
from distflow.telemetry.processes import spawn
from distflow.telemetry.stack_file import StackFile


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\udcff", "\x00", "\n"])
@pytest.mark.parametrize("count", [100, 10_000, 1_000_000])
def test_an_exit_report_fits_into_the_pipe_whatever_its_characters(character, count):
    def work(_: WorkerContext) -> NoReturn:
        raise ValueError(f"<{character * count}>")

    readable, writable = os.pipe()
    stack = StackFile()
    worker = spawn(partial(become_worker, work, WorkerContext(), writable, stack))
    os.close(writable)
    status = worker.poll(60.0)
    worker.end()
    assert status == FAILED
    report = json.loads(read_exit_report(readable))
    os.close(readable)
    stack.close()
    assert report["what"].startswith(f"ValueError: <{character}")
    assert report["what"].endswith(f"{character}>")
    assert report["details"].startswith("Traceback")
    assert report["details"].endswith(f"{character}>\n")
    assert character * (50 if count == 100 else 1000) in report["what"], "no shorter than it must be"
