"""Restricts a program's file access with Landlock (Linux 5.13), where it has no root of its own."""

from __future__ import annotations

import ctypes
import os
import struct

from workers.isolation.sandbox import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file rights by Landlock version; newer versions add none
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15  # the last two: truncate and ioctl


def version() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""
    try:
        return kernel.call("landlock", _CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def confine(readable: list[str], writable: list[str]) -> None:
    """Restrict this process and its descendants to these paths and all below; raise OSError without Landlock."""
    everything = (1 << _RIGHTS[min(max(version(), 1), 5)]) - 1
    rules = kernel.call("landlock_create_ruleset", _CREATE, struct.pack("=Q", everything), ctypes.c_size_t(8),
                        ctypes.c_uint(0))
    for path in readable:
        _allow(rules, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
    for path in writable:
        _allow(rules, path, everything)
    kernel.call("landlock_restrict_self", _RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    known = (1 << _RIGHTS[min(version(), 5)]) - 1
    rights &= known if os.path.isdir(path) else known & _FILE_RIGHTS
    kernel.call(f"landlock_add_rule for {path}", _ADD, ctypes.c_int(rules), ctypes.c_int(1),
                struct.pack("=Qi", rights, descriptor), ctypes.c_uint(0))
    os.close(descriptor)
