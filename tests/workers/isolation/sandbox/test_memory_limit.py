"""What counts as shared memory of a process."""

import subprocess
import uuid
from pathlib import Path

import pytest

from workers.isolation.sandbox.memory_limit import SharedMemoryUse


@pytest.mark.parametrize(("mode", "exceeded"), [("rb", False), ("r+b", True)], ids=["read", "written"])
def test_a_file_that_is_only_read_is_somebody_elses(mode, exceeded):
    """8 MiB where 4 MiB are allowed."""
    path = Path(f"/dev/shm/distflow-test-{uuid.uuid4().hex}")
    try:
        path.write_bytes(bytes(8 << 20))
        with path.open(mode) as file, subprocess.Popen(["sleep", "600"], stdin=file) as reader:
            found = SharedMemoryUse(reader.pid, 4 << 20).exceeded()
            reader.kill()
        assert found == exceeded
    finally:
        path.unlink()
