"""Tracebacks as a user wants to read them: their own frames, and nothing above them."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from distflow.contracts.decorators import load_module
from distflow.telemetry.tracebacks import report_to_torchrun, users_line, users_part
from workers.isolation.user_code import guarded

MODULE = '''
import json

def outer(text):
    return inner(text)

def inner(text):
    return json.loads(text)["a"]
'''


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Return the traceback of the module's `outer` with a text, called by distflow's own code."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_module.py").write_text(MODULE)
    found = []

    def of(text: str) -> str:
        with guarded(lambda error: found.append("".join(traceback.format_exception(error)))):
            from_distflow(load_module("users_module").outer, text)
        return found[-1]

    # A frame that looks like one of ours: compiled under a name inside the package.
    own: dict[str, Any] = {}
    path = Path(load_module.__code__.co_filename)
    exec(compile("def from_distflow(function, text):\n    return function(text)\n", str(path), "exec"), own)
    from_distflow = own["from_distflow"]
    yield of
    sys.modules.pop("users_module", None)


def test_only_the_users_frames_and_the_last_one_stay(trace):
    whole = trace("{}")
    text, left_out = users_part(whole)
    assert "decorators.py" in whole
    assert "decorators.py" not in text
    assert left_out == whole.count('  File "') - text.count('  File "') > 0
    assert [line.strip() for line in text.splitlines() if line.startswith("    ") and "^" not in line][-2:] == [
        "return inner(text)", 'return json.loads(text)["a"]']
    assert text.endswith("KeyError: 'a'\n")
    assert users_line(whole).endswith("users_module.py, line 8, in inner:  return json.loads(text)[\"a\"]")


def test_the_frame_of_a_library_that_raised_stays(trace):
    text, _ = users_part(trace("{"))
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    assert frames[-1].endswith(", in raw_decode")
    assert frames[-2].endswith(", in inner")
    assert ", in inner:  " in users_line(text)


def test_torchrun_gets_the_cause(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_to_torchrun("nobody reads this")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    report_to_torchrun("rank 1 failed in step 3:\nKeyError: 'a'")
    assert json.loads(file.read_text())["message"]["message"].endswith("KeyError: 'a'")
    said = str(ChildFailedError("launch.py", {1: ProcessFailure(1, 77, 1, str(file))}))
    assert "rank 1 failed in step 3:\n  KeyError: 'a'" in said
