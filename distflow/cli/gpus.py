"""How many GPUs this machine offers, asked without torch: help and validation answer at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

_SECONDS = 20.0
"""In which a driver that is being loaded has answered."""


def gpu_count(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the number of NVIDIA GPUs that processes started here may use; 0 if there are none.

    CUDA_VISIBLE_DEVICES limits them, as in torch: what stands behind the first entry that names no GPU counts nothing.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        unusable = [index for index, each in enumerate(named) if not re.match(r"\s*(\d+|GPU-|MIG-)", each)]
        return min([len(named), *unusable])
    program = shutil.which("nvidia-smi")
    if program:
        try:  # it sees what a container may use; the driver's folder may show all of the host
            said = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return 0
        return len(re.findall("^GPU ", said.stdout, re.MULTILINE))
    return len(list(driver.iterdir())) if driver.is_dir() else 0
