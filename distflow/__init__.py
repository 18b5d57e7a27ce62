"""distflow: reinforcement-learning post-training of language models with no controller process.

The public names; each is loaded when it is first used, so that `import distflow` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "node": "distflow.schema.registry",
    "reward": "distflow.schema.registry",
    "loss": "distflow.schema.registry",
    "metric": "distflow.observe.metrics",
    "environment": "distflow.schema.registry",
    "hook": "distflow.robust.hooks",
    "detector": "distflow.robust.detect",
    "scaling": "distflow.robust.scaling",
    "Alarm": "distflow.robust.judges",
    "Turn": "distflow.schema.registry",
    "DistflowError": "distflow.schema.errors",
    "Batch": "distflow.data.batch",
    "Ragged": "distflow.data.batch",
}
__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distflow' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
