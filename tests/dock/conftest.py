"""The dock of `docks.py`."""

from docks import dock, token

__all__ = ["dock", "token"]
