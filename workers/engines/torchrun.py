"""What torchrun tells a worker, and what an engine that the worker starts must not take for its own."""

from __future__ import annotations

import os

_BEGINNINGS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def torchrun_says() -> dict[str, str]:
    """The variables of the environment that make a process a part of torchrun's group."""
    return {name: value for name, value in os.environ.items() if name.startswith(_BEGINNINGS)}
