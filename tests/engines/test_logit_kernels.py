"""The Triton kernels of logits do what plain PyTorch does. Here Triton interprets them; tests/gpu compiles them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")


def test_tokens_scores_and_gradients_are_those_of_plain_passes():
    """With less than a block of a kernel, and more than two; one token at a place and several."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parents[2])])
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False,
                          env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 16 + 24
    for case, differences in found.items():
        assert max(differences) < (1e-5 if "float32" in case or "samples" in case else 0.01), (case, differences)
