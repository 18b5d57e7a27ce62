"""Shipped reward functions. Nothing here loads torch."""

from __future__ import annotations


def behind_thoughts(text: str) -> str | None:
    """Return what follows a model's thoughts; None where these open the text, or what follows others, and are cut off.
    """
    said = text.rpartition("</think>")[2]
    return None if said.lstrip().startswith("<think>") else said
