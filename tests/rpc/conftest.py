"""The dock of `docks.py`, and the addresses of `forged.py`."""

from docks import dock, token
from forged import forged

__all__ = ["dock", "forged", "token"]
