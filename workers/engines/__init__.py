"""The libraries that compute: each engine is one file, behind the interface of `trainer` or of `rollout`."""

import importlib

from distflow.config.models import Engine


def engine_class(engine: Engine) -> type:
    """The class of an engine; its library is imported only now."""
    module, _, name = engine.home.partition(":")
    return getattr(importlib.import_module(module), name)
