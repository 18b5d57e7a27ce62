"""Modules of rewards, as users write them."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.schema import registry
from workers.rewards import scoring


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module and import it; returns its name, which no other test has. What it registers goes afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "REWARDS", registry.REWARDS)
    before = dict(registry.REWARDS)

    def write(text: str) -> str:
        name = f"rewards_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        registry.load_module(name)
        return name

    yield write
    for pool in scoring._pools.values():  # their processes look for modules where this test has put its own
        pool.close()
    registry.REWARDS.clear()
    registry.REWARDS.update(before)
