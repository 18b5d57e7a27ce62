"""Linux system calls that Python 3.11 lacks. All raise OSError with the name of the call."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
_MNT_DETACH, _AT_RECURSIVE, _AT_FDCWD = 2, 0x8000, -100
_ATTR_READ_ONLY, _ATTR_NO_SETUID = 1, 2
_CAPABILITY_VERSION = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    """Return `x86_64` or `aarch64`; raise OSError on another machine, whose call numbers are not known here."""
    name = platform.machine()
    if name not in _PIVOT_ROOT:
        raise OSError(f"no sandbox on {name}, only on {' and '.join(_PIVOT_ROOT)}")
    return name


def checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def call(name: str, number: int, *arguments: object) -> int:
    return checked(name, _libc.syscall(ctypes.c_long(number), *arguments))


def prctl(option: int, *values: object) -> None:
    rest = [*values, *[ctypes.c_ulong(0)] * (4 - len(values))]
    checked(f"prctl({option})", _libc.prctl(ctypes.c_int(option), *rest))


def unshare(flags: int) -> None:
    checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked(f"mount on {target}", _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def bind_read_only(source: str, target: str) -> None:
    """Bind-mount `source`, with all mounts below it, read-only at `target` (Linux 5.12)."""
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NO_SETUID, 0, 0, 0)
    call(f"mount_setattr on {target}", _MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), os.fsencode(target),
         ctypes.c_uint(_AT_RECURSIVE), attributes, ctypes.c_size_t(ctypes.sizeof(attributes)))


def change_root(folder: str) -> None:
    """Make `folder`, a mount point, the root, and unmount the old one."""
    os.chdir(folder)
    call("pivot_root", _PIVOT_ROOT[machine()], b".", b".")
    checked("umount", _libc.umount2(b".", ctypes.c_int(_MNT_DETACH)))
    os.chdir("/")


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
