"""distflow: reinforcement-learning post-training of language models with no controller process.

The public names; each is loaded when it is first used, so that `import distflow` costs nothing.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; `_HOMES` says the same to Python
    from distflow.api_client import CallRefused, StepLost, training_client
    from distflow.contracts.decorators import Turn, environment, loss, node, reward
    from distflow.data.batch import Batch, Ragged
    from distflow.data.dataloader import source_weight
    from distflow.errors import DistflowError
    from distflow.recovery.detectors import Alert, detector
    from distflow.recovery.hooks import hook
    from distflow.run_handle import RunFailed, RunHandle, load, run
    from distflow.telemetry.metrics import metric

__version__ = "0.1.0"

_HOMES = {
    "node": "distflow.contracts.decorators",
    "reward": "distflow.contracts.decorators",
    "loss": "distflow.contracts.decorators",
    "metric": "distflow.telemetry.metrics",
    "source_weight": "distflow.data.dataloader",
    "environment": "distflow.contracts.decorators",
    "hook": "distflow.recovery.hooks",
    "detector": "distflow.recovery.detectors",
    "Alert": "distflow.recovery.detectors",
    "Turn": "distflow.contracts.decorators",
    "DistflowError": "distflow.errors",
    "Batch": "distflow.data.batch",
    "Ragged": "distflow.data.batch",
    "run": "distflow.run_handle",
    "load": "distflow.run_handle",
    "RunHandle": "distflow.run_handle",
    "RunFailed": "distflow.run_handle",
    "training_client": "distflow.api_client",
    "StepLost": "distflow.api_client",
    "CallRefused": "distflow.api_client",
}
_RENAMED = {"Alarm": "Alert"}  # old public names, which still work, with a warning that names the new one
__all__ = ["Alert", "Batch", "CallRefused", "DistflowError", "Ragged", "RunFailed", "RunHandle", "StepLost", "Turn",
           "__version__", "detector", "environment", "hook", "load", "loss", "metric", "node", "reward", "run",
           "source_weight", "training_client"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"distflow.{name} is now called distflow.{_RENAMED[name]}", FutureWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'distflow' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
