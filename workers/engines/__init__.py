"""Engines: one file or folder per library, behind the interfaces `trainer.Trainer` and `rollout.Rollout`."""

import importlib

from distflow.config.models import Engine


def engine_class(engine: Engine) -> type:
    """Import an engine's library and return its class."""
    module, _, name = engine.home.partition(":")
    return getattr(importlib.import_module(module), name)
