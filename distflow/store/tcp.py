"""Client of torch's TCPStore whose every call has a deadline, and the TCPStore itself.

Most calls of torch's client wait for ever where the store's process is stopped or cut off, and signal handlers wait
with them. Each thread that uses a store therefore has torch's client in a helper thread, and waits for that no longer
than the deadline. A call that has timed out stays in progress; those after it wait for their turn until their own
deadline, and are not made then: nothing is done twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from distflow.store.interface import Store, StoreUnavailable

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_ABSENT = "\0absent"  # a value that no key has: COMPARE_SET with it reads a key without waiting for it
_BACKLOG = 4096  # connections that wait to be taken: all ranks come together
_POSTS = 100  # calls in the queue beyond which what is posted is dropped
_LEAST_WAIT = 0.001  # seconds; torch takes less for no limit
_END = 0.1  # seconds that a helper thread has for a call in progress when it is to end
T = TypeVar("T")


class _Helper:
    """Torch's client in a thread of its own, for one thread of one process. `usable`: the connection is not lost."""

    def __init__(self, host: str, port: int, seconds: float):
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.address, self.pid, self.usable = f"{host}:{port}", os.getpid(), True
        try:
            socket.create_connection((host, port), seconds).close()  # torch tries again where there is nothing
        except TimeoutError:
            raise StoreUnavailable(self.address, seconds) from None
        except OSError as error:
            raise StoreUnavailable(self.address, 0.0, str(error), gone=True) from None
        self.queue = SimpleQueue[tuple[Future, Callable[[], object]] | None]()
        thread = threading.Thread(target=_make_calls, args=(self.queue,), name="store", daemon=True)
        weakref.finalize(self, _end, self.queue, thread)
        thread.start()
        self.store = self.call(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False,
                                                timeout=timedelta(seconds=seconds)), seconds)

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """Return the result of a function in the helper thread. Raises StoreUnavailable: there is none in `seconds`."""
        future = Future[T]()
        self.queue.put((future, function))
        try:
            return future.result(seconds)
        except TimeoutError:
            raise StoreUnavailable(self.address, seconds) from None
        except RuntimeError as error:  # torch's DistNetworkError and others
            self.usable = False
            raise StoreUnavailable(self.address, 0.0, str(error), gone=True) from None
        finally:
            future.cancel()


def _make_calls(queue: SimpleQueue[tuple[Future, Callable[[], object]] | None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's to act on
    while call := queue.get():
        future, function = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except RuntimeError as error:
                future.set_exception(error)
        del call, future, function  # or the last call would keep the helper alive, and its connection open


def _end(queue: SimpleQueue, thread: threading.Thread) -> None:
    """Let a helper thread end before the interpreter does: torch's client aborts a process that ends within a call."""
    queue.put(None)
    if thread.ident:
        thread.join(_END)


class TCPStoreClient(Store):
    """Client of the TCPStore at an address. Raises StoreUnavailable: it is not reached within `deadline` seconds."""

    def __init__(self, host: str, port: int, deadline: float):
        super().__init__(f"{host}:{port}", deadline)
        self.host, self.port, self.server = host, port, None
        self.local = threading.local()
        self._helper()

    @classmethod
    def hosting(cls, server: TCPStore, deadline: float) -> TCPStoreClient:
        """Return a client of a TCPStore of this process, which it keeps."""
        client = cls(server.host, server.port, deadline)
        client.server = server
        return client

    def get(self, key: str) -> str | None:
        return self._call(lambda store: _get(store, self.prefix + key))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        return self._call(lambda store: [_get(store, self.prefix + key) or "" for key in keys])

    def put(self, key: str, value: str) -> None:
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, str]) -> None:
        def put(store: TCPStore) -> None:
            for key, value in values.items():
                store.set(self.prefix + key, value)
            store.check([])  # SET has no reply: this one comes once others see the values

        self._call(put)

    def post(self, key: str, value: str) -> None:
        helper, name = self._helper(), self.prefix + key
        if helper.queue.qsize() < _POSTS:
            helper.queue.put((Future(), lambda: helper.store.set(name, value)))

    def put_if(self, key: str, value: str, before: str | None) -> str:
        return self._call(lambda store: store.compare_set(self.prefix + key, before or "", value)).decode()

    def add(self, key: str, number: int = 1) -> int:
        return self._call(lambda store: store.add(self.prefix + key, number))

    def delete(self, *keys: str) -> None:
        self._call(lambda store: [store.delete_key(self.prefix + key) for key in keys])

    def has(self, *keys: str) -> bool:
        return self._call(lambda store: store.check([self.prefix + key for key in keys]))

    def list(self, prefix: str) -> dict[str, str]:
        def read(store: TCPStore) -> dict[str, str]:
            names = [name for name in store.list_keys() if name.startswith(self.prefix + prefix)]
            values = {name.removeprefix(self.prefix): _get(store, name) for name in names}
            return {key: value for key, value in values.items() if value is not None}  # others were deleted meanwhile

        return self._call(read)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        until, names = time.monotonic() + seconds, [self.prefix + key for key in keys]

        def wait(store: TCPStore) -> bool:
            while not store.check(names):  # torch wakes those that wait at each COMPARE_SET of a key, which `get` is
                if (left := until - time.monotonic()) <= 0:
                    return False
                with contextlib.suppress(DistStoreError):  # in time
                    store.wait(names, timedelta(seconds=max(left, _LEAST_WAIT)))
            return True

        from torch.distributed import DistStoreError

        return self._call(wait, seconds)

    def _call(self, function: Callable[[TCPStore], T], wait: float = 0.0) -> T:
        """Return what a function makes of torch's client. `wait`: seconds beyond the deadline."""
        helper = self._helper()
        return helper.call(lambda: function(helper.store), max(0.0, wait) + self.deadline.seconds)

    def _helper(self) -> _Helper:
        helper: _Helper | None = getattr(self.local, "helper", None)
        if helper is None or not helper.usable or helper.pid != os.getpid():
            helper = self.local.helper = _Helper(self.host, self.port, self.deadline.seconds)
        return helper


def _get(store: TCPStore, name: str) -> str | None:
    value = store.compare_set(name, _ABSENT, _ABSENT).decode()
    return None if value == _ABSENT else value


def store_on(host: str) -> TCPStore:
    """Host a TCPStore at an address of the machine; the system chooses the port. Raises OSError: it cannot listen."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - clients do without torch

    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family, backlog=_BACKLOG) as listening:
        port = listening.getsockname()[1]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # its threads inherit that
        try:
            return TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                            master_listen_fd=listening.detach())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
