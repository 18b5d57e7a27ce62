"""Problems of shipped DAGs on shipped clusters, with models whose weights are not there."""

from __future__ import annotations

import pytest

from benchmarks.shapes import SHAPES
from distflow.config.load import load
from distflow.config.spec import Spec


@pytest.fixture
def mixed_spec(tmp_path):
    """`mixed_spec(dag, cluster, *overrides, size="4B")`: 64 prompts of up to 512 + 512 tokens."""
    def make(dag: str = "grpo", cluster: str = "h200_a100", *overrides: str, size: str = "4B") -> Spec:
        own = [f"roles.actor.model={SHAPES['Qwen3-' + size].folder(tmp_path)}", "data.batch=64",
               "data.max_prompt_tokens=512", "roles.actor.generation.max_new_tokens=512", *overrides]
        return load(dag, None, own, cluster)

    return make
