"""Seccomp filter (in BPF) of the system calls that a sandboxed program may not make."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from workers.isolation.sandbox import kernel

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_INDEX = {"x86_64": 0, "aarch64": 1}
_X32 = 0x40000000  # bit of call numbers in x86_64's x32 table, which would bypass the filter
Numbers = dict[str, tuple[int | None, int | None]]  # call numbers on x86_64 and aarch64
_ALWAYS: Numbers = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218)}
"""io_uring can open sockets."""
_MEMORY: Numbers = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262)}
"""Calls that take memory outside the address space, which no resource limit covers. IPC objects also outlive the
program and can be guessed by other programs of the user. The limit on open files bounds pipes and pairs of sockets."""
_SOCKET: Numbers = {"socket": (41, 198)}
_OTHERS: Numbers = {
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239)}
"""Calls that affect other processes of the same user."""
_FILES: Numbers = {
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)}
"""Calls that change files without opening them, which Landlock or its first versions do not restrict."""
_OWNED = {"x86_64": {72: (8, 15), 16: (0x8901, 0x8902)}, "aarch64": {25: (8, 15), 29: (0x8901, 0x8902)}}
"""fcntl and ioctl by second argument: these make the kernel signal another process when a file is ready."""
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_ONE_SELF = {"x86_64": {234: True, 302: False}, "aarch64": {131: True, 261: False}}
"""tgkill, whose first argument must be the program itself, and prlimit64, whose first argument must be 0 (itself)."""
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: cgroup, uts, ipc, user, pid, net and mount

Instruction = tuple[int, int, int, int]


def confine(network: bool, alone: bool) -> None:
    """Install the filter for this process and descendants. `alone`: refuse calls that reach others as well."""
    program = _program(network, os.getpid() if alone else None)
    packed = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    pointer = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.create_string_buffer(pointer, len(pointer)))


def _program(network: bool, self_id: int | None) -> list[Instruction]:
    """Return the filter; `self_id` is the process that may signal itself, None if signals are not restricted."""
    machine = kernel.machine()
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), _end(_KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), _end(_KILL)]
    refused = _ALWAYS | _MEMORY | ({} if network else _SOCKET) | ({} if self_id is None else _OTHERS | _FILES)
    for number in filter(None, (numbers[_INDEX[machine]] for numbers in refused.values())):
        lines += [(_EQUAL, 0, 1, number), _end(_REFUSE | errno.EPERM)]
    lines += [(_EQUAL, 0, 1, _CLONE3), _end(_REFUSE | errno.ENOSYS)]  # its flags are unreadable; libc falls back
    lines += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT),
              (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _end(_REFUSE | errno.EPERM), (_LOAD, 0, 0, _NUMBER)]
    for number, own in _ONE_SELF[machine].items() if self_id is not None else ():
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, self_id if own else 0),
                  _end(_REFUSE | errno.EPERM), _end(_ALLOW)]
    for number, (one, other) in _OWNED[machine].items() if self_id is not None else ():
        lines += [(_EQUAL, 0, 5, number), (_LOAD, 0, 0, _SECOND_ARGUMENT), (_EQUAL, 1, 0, one), (_EQUAL, 0, 1, other),
                  _end(_REFUSE | errno.EPERM), _end(_ALLOW)]
    return [*lines, _end(_ALLOW)]


def _end(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)
