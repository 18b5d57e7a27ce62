"""Says where a run was computed and by what: its command, host, versions and commit."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from typing import Any

_PACKAGES = ("distflow", "torch", "transformers", "tokenizers", "peft", "math-verify", "vllm", "sglang",
             "megatron-core")


def provenance() -> dict[str, Any]:
    """Return what `summary.json` needs to tell one run from another."""
    return {"command": shlex.join(sys.argv), "host": socket.gethostname(), "versions": _versions(),
            "git_commit": _git_commit()}


def _versions() -> dict[str, str]:
    """Return the version of Python and of each package that is installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """Return the commit of the working directory, with `-dirty` where files differ from it; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
