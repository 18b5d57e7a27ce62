"""Collectives on bytes between the ranks of a group: all-to-all and all-gather.

These use gloo's connections, and they carry no token: gloo takes whoever connects for the rank that it claims to be,
and sends in the clear. It learns the ranks' addresses from torchrun's store, which has no password either. Whoever
reaches these ports can read rows and weights, and change them; and since torch's own checkpointing sends pickles
through the group, perhaps run code. gloo has a transport with TLS, but the wheels of torch are built without it
("unsupported gloo device"). So a run of several machines belongs on a network that only they reach, or in a tunnel
between them; `GLOO_SOCKET_IFNAME` chooses gloo's interface. On one machine it is `lo` unless it is set, and `distflow
run` has the store there too; torchrun itself lets its store listen on all interfaces, whatever its settings.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group as default_group

from distflow.errors import RankMissing

_MIN_SIZE = 4096
_COLLECTIVE, _LATE, _ENDED = ("gloo", "nccl", "c10d", "store"), ("timed out", "timeout"), (
    "closed by peer", "reset by peer", "broken pipe", "connection refused", "remote process exited")
"""Phrases in the message of a collective that failed because of another rank; its type is RuntimeError at best."""


def exchange(outgoing: Tensor, sizes: list[int], received: Tensor, arriving: list[int],
             group: dist.ProcessGroup | None = None) -> None:
    """Send the next `sizes[i]` bytes of `outgoing` ([bytes] uint8) to rank `i` of the group, and put the `arriving[i]`
    bytes from rank `i` into `received`, one rank's after the other's. One collective. Raises `RankMissing`, as all
    here."""
    with peer_errors():
        (group or default_group()).alltoall_base(received, outgoing, arriving, sizes).wait()


def send_each(outgoing: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]],
              group: dist.ProcessGroup | None = None) -> None:
    """Send tensors to ranks of the group, and receive others in place. Between two ranks they have the same order and
    sizes at both ends."""
    group = group or default_group()
    with peer_errors():
        works = [group.recv([tensor], rank, 0) for rank, tensor in received]
        works += [group.send([tensor], rank, 0) for rank, tensor in outgoing]
        for work in works:
            work.wait()


_payload_size: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Bytes for each rank's payload in a group's next gather; the same on all its ranks."""


def gather(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return all payloads by rank: metadata of any length; one collective if about as long as last time, else two."""
    group = group or default_group()
    if group.size() == 1:
        return [payload]
    size_limit = _payload_size.get(group, _MIN_SIZE)
    parts = _gathered(len(payload).to_bytes(8, "little") + payload[: size_limit - 8], size_limit, group)
    sizes = [int.from_bytes(part[:8], "little") for part in parts]
    longest = max(sizes) + 8
    if longest > size_limit:
        rest = _gathered(payload[size_limit - 8 :], longest - size_limit, group)
        parts = [part + more for part, more in zip(parts, rest)]
    _payload_size[group] = max(_MIN_SIZE, longest + longest // 4)
    return [part[8 : 8 + size] for part, size in zip(parts, sizes)]


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value on every rank, in rank order: whatever msgpack knows."""
    return [unpack(raw) for raw in gather(pack(value), group)]


def pack(value: Any) -> bytes:
    return msgpack.packb(value) or b""


def unpack(raw: bytes) -> Any:
    return msgpack.unpackb(raw, strict_map_key=False)


def _gathered(payload: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    mine = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty(size, dtype=torch.uint8) for _ in range(group.size())]
    with peer_errors():
        group.allgather([everyone], [mine]).wait()
    return [part.numpy().tobytes() for part in everyone]


def barrier(group: dist.ProcessGroup | None = None) -> None:
    with peer_errors():
        (group or default_group()).allreduce([torch.zeros(1)]).wait()


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Turn errors of collectives into RankMissing; let others pass."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        late = any(phrase in text for phrase in _LATE)
        if not any(word in text for word in _COLLECTIVE) or not (late or any(phrase in text for phrase in _ENDED)):
            raise
        what = "a rank did not come within the wait limit" if late else "a rank ended while others waited for it"
        raise RankMissing(f"{what} ({str(error).splitlines()[0]})") from error
