"""Shipped environments."""

from __future__ import annotations

from workers.isolation.rewards import behind_thoughts


def final_answer(text: str) -> str | None:
    """Return what stands behind the last `####` of what a turn says behind its thoughts; None if there is none."""
    _, mark, answer = (behind_thoughts(text) or "").rpartition("####")
    return answer.strip() if mark else None
