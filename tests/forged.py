"""Addresses of memory as an attacker would announce them: whoever opens one has no proof of what may be opened."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from distflow.rpc.shared_memory import MemoryAddress

_SIZE = 1 << 20
_OPENING = "import sys; file = open(sys.argv[1], 'r+b'); print(file.fileno(), flush=True); sys.stdin.read()"


def _memory(name: str, size: int = _SIZE, seals: int = fcntl.F_SEAL_SHRINK) -> tuple[int, int]:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, os.fstat(descriptor).st_ino


@pytest.fixture
def forged(tmp_path):
    """`forged(name)`: addresses of what is not the memory of that name. None of it may have changed at the end."""
    victim, opened = tmp_path / "of another process", list[int]()
    victim.write_bytes(bytes(_SIZE))
    other = subprocess.Popen([sys.executable, "-c", _OPENING, victim], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def make(name: str) -> list[MemoryAddress]:
        here, (reader, writer) = os.getpid(), os.pipe()
        stranger, loose, small = _memory("distflow-rows-0123"), _memory(name, seals=0), _memory(name, 4096)
        right, _ = _memory(name)
        opened.extend([reader, writer, stranger[0], loose[0], small[0], right])
        return [MemoryAddress(other.pid, int(other.stdout.readline()), victim.stat().st_ino, _SIZE),
                MemoryAddress(here, writer, os.fstat(writer).st_ino, _SIZE),
                *(MemoryAddress(here, *each, _SIZE) for each in (stranger, loose, small)),
                MemoryAddress(here, right, 1, _SIZE)]

    yield make
    other.communicate()
    assert victim.read_bytes() == bytes(_SIZE)
    for descriptor in opened:
        assert os.fstat(descriptor).st_size in (0, 4096) or os.pread(descriptor, _SIZE, 0) == bytes(_SIZE)
        os.close(descriptor)
