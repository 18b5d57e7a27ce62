"""The addresses of `forged.py`."""

from forged import forged

__all__ = ["forged"]
