"""System calls that a sandboxed program may not make: a seccomp filter, written out in the kernel's BPF."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from workers.jail import kernel

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""Bit of the numbers of x86_64's second table of calls, which would pass by the filter."""
_ALWAYS = {"x86_64": (101, 310, 311, 425, 272, 308, 165, 166, 155, 321, 298, 323, 250, 248, 249, 319),
           "aarch64": (117, 270, 271, 425, 97, 268, 40, 39, 41, 280, 241, 282, 219, 217, 218, 279)}
"""ptrace, process_vm_readv and _writev, io_uring_setup (sockets without `socket`), unshare, setns, mount, umount2,
pivot_root, bpf, perf_event_open, userfaultfd, keyctl, add_key, request_key, memfd_create (memory without limit)."""
_BOTH = (428, 429, 430, 442)
"""open_tree, move_mount, fsopen, mount_setattr: the same number everywhere."""
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_SIGNALS = {"x86_64": (62, 200, 129, 297, 141, 203, 144), "aarch64": (129, 130, 138, 240, 140, 122, 119)}
"""kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, setpriority, sched_setaffinity, sched_setscheduler."""
_PIDFDS = (424, 434, 438)
"""pidfd_send_signal, pidfd_open, pidfd_getfd."""
_ONE_SELF = {"x86_64": {234: True, 302: False}, "aarch64": {131: True, 261: False}}
"""tgkill, whose first argument must be the program itself, and prlimit64, whose must be 0, which means itself."""
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW*: cgroup, uts, ipc, user, pid, net and mount."""

Instruction = tuple[int, int, int, int]


def confine(network: bool, alone: bool) -> None:
    """Refuse calls, from now on and to all that this process becomes and starts.

    Args:
        network: sockets are allowed.
        alone: no namespace keeps the process from others of its user, so signals to them must be refused too.
    """
    program = _program(network, os.getpid() if alone else None)
    packed = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    pointer = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.create_string_buffer(pointer, len(pointer)))


def _program(network: bool, self_id: int | None) -> list[Instruction]:
    """The filter; `self_id` is the process that may signal itself, None where signals are free."""
    machine = kernel.machine()
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), _end(_KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), _end(_KILL)]
    refused = [*_ALWAYS[machine], *_BOTH, *([] if network else [_SOCKET[machine]])]
    refused += [] if self_id is None else [*_SIGNALS[machine], *_PIDFDS]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), _end(_REFUSE | errno.EPERM)]
    lines += [(_EQUAL, 0, 1, _CLONE3), _end(_REFUSE | errno.ENOSYS)]  # its flags cannot be seen; libc takes clone then
    lines += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT),
              (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _end(_REFUSE | errno.EPERM), (_LOAD, 0, 0, _NUMBER)]
    for number, own in _ONE_SELF[machine].items() if self_id is not None else ():
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, self_id if own else 0),
                  _end(_REFUSE | errno.EPERM), _end(_ALLOW)]
    return [*lines, _end(_ALLOW)]


def _end(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)
