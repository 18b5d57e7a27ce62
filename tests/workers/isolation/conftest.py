"""Modules of rewards, as users write them."""

from __future__ import annotations

import textwrap
import uuid

import pytest

from distflow.contracts import decorators
from workers.isolation import scoring


def end_processes() -> None:
    for pool in scoring._pools.values():
        pool.stop()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module and import it; returns its name, which no other test has. What it registers goes afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    end_processes()  # which look for modules where the test that has started them had put its own
    monkeypatch.setattr(decorators, "REWARDS", decorators.REWARDS)
    before = dict(decorators.REWARDS)

    def write(text: str) -> str:
        name = f"rewards_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        decorators.load_module(name)
        return name

    yield write
    end_processes()
    decorators.REWARDS.clear()
    decorators.REWARDS.update(before)
