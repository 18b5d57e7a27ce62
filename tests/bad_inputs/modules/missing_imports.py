"""It stands on a package that is not installed, and on a module beside it that is not there."""

import json
from importlib import metadata

import no_such_package.deep

from distflow import node

try:
    import may_be_missing
except ImportError:
    may_be_missing = None


@node(writes="rewards")
def longest(completions: list[str]) -> "Tensor":
    """Parsed only."""
    import only_when_called

    return only_when_called, no_such_package, json, metadata
