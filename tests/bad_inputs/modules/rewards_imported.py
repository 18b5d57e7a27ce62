"""Imports a reward from another module."""

from rewards_of_endings import ended

__all__ = ["ended"]
