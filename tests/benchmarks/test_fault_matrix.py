"""What the matrix of faults finds wrong with a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fault_matrix import differences

CALM = [{"step": step, "seconds": 1.0, "loss": 0.5, "response/fingerprint": step * 7} for step in (1, 2, 3)]


def run(folder: Path, lines: list[dict], weights: bytes = b"weights") -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "model/model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(("lines", "weights", "expected"), [
    (CALM, b"weights", []),
    (CALM, b"others", ["the weights differ"]),
    (CALM[:2], b"weights", ["a step is missing, or was counted twice"]),
    ([*CALM, CALM[2]], b"weights", ["a step is missing, or was counted twice"]),
    ([*CALM[:2], CALM[2] | {"response/fingerprint": 1}], b"weights", ["step 3 has other samples"]),
    ([*CALM[:2], CALM[2] | {"loss": 0.50000001}], b"weights", ["step 3 has another loss"]),
    ([*CALM[:2], CALM[2] | {"loss": float("nan")}], b"weights", ["step 3 has another loss"])])
def test_runs_that_differ(tmp_path, lines, weights, expected):
    calm, stormy = run(tmp_path / "calm", CALM), run(tmp_path / "stormy", lines, weights)
    assert differences(calm, stormy) == expected
