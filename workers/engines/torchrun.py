"""torchrun's environment variables, which the processes of an engine must not inherit."""

from __future__ import annotations

import os

_BEGINNINGS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def torchrun_says() -> dict[str, str]:
    """Return the environment variables that make a process a member of torchrun's group."""
    return {name: value for name, value in os.environ.items() if name.startswith(_BEGINNINGS)}
