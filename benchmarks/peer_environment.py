"""A peer's own virtual environment, beside distflow's."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def peer_python(folder: str, requirements: str, install: bool = True) -> Path | None:
    """Return the Python of `folder` in the root, where the packages of `benchmarks/peers/REQUIREMENTS` are.

    It is made when it is missing or the list has changed; without `install` the answer is then None.
    """
    place, wanted = ROOT / folder, ROOT / "benchmarks" / "peers" / requirements
    python, mark = place / "bin" / "python", place / "installed"
    if mark.is_file() and mark.read_text() == wanted.read_text():
        return python
    if not install:
        return None
    print(f"installing {requirements} in {folder}", flush=True)
    venv.create(place, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", wanted]
    subprocess.run(command, check=True)
    mark.write_text(wanted.read_text())
    return python
