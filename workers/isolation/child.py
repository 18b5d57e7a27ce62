"""What runs in the processes of a pool (`workers.isolation.pool`), and the messages between both ends.

    rank ── fork server ── child ── whatever its calls start

    main       the fork server: imports what all children need, forks them, measures their memory and kills them
    CallLoop   a child's loop: one call after the other, coroutines together
    Channel    messages on a socket, in msgpack: numbers and texts alone, so that neither side unpickles anything

A fork takes a millisecond where a new interpreter takes hundreds. Each child adopts its orphans, and the fork server
those of a child that has ended: nothing that users' code starts escapes, and the kernel tells both when the rank ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import msgpack

from distflow.telemetry.processes import Child, adopt_orphans, children, die_with, kill_descendants, spawn
from distflow.telemetry.screen import prepare
from distflow.telemetry.stack_file import StackFile, ignore_dumps, location_in
from workers.isolation.sandbox.memory_limit import PollSchedule, SharedMemoryUse, shm_files, unlink_unused
from workers.isolation.user_code import guarded

Message = dict[str, Any]
Answer = Message | Coroutine[Any, Any, Message]
_MAX_LOCATION = 500
_MAX_TEXT = 30_000  # characters of a traceback that are sent, counted from its end


class Channel:
    """One end of a socket with messages. Nothing blocks: `unsent` waits for `flush`."""

    def __init__(self, connection: socket.socket, max_bytes: int = 0):
        connection.setblocking(False)
        self.connection, self.unsent = connection, bytearray()
        self.unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", strict_map_key=False,
                                         max_buffer_size=max_bytes)

    def send(self, message: Message) -> None:
        self.unsent += packed(message)
        self.flush()

    def flush(self) -> None:
        # `receive` notices a lost connection
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived; raise EOFError when the other end is closed."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        self.unpacker.feed(data)
        yield from self.unpacker


def packed(message: Any) -> bytes:
    return msgpack.Packer(unicode_errors="surrogatepass").pack(message)


class Handler:
    def answer(self, call: Message, send: Callable[[Message], None]) -> Answer:
        """Return the answer of a call, or a coroutine that does; `send` sends a message before it."""
        raise NotImplementedError

    def forget(self, key: Any) -> None:
        """Drop what is kept for a key."""


class CallLoop:

    def __init__(self, connection: socket.socket, handler: Handler):
        self.channel, self.handler, self.process = Channel(connection), handler, os.getpid()
        self.calls: deque[Message] = deque()
        self.tasks: set[asyncio.Task] = set()
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        self.loop.add_reader(self.channel.connection, self.loop.stop)
        with contextlib.suppress(EOFError):
            while True:
                self._receive()
                while self.calls:
                    self._begin(self.calls.popleft())
                    self._receive()
                self.loop.run_forever()

    def _receive(self) -> None:
        for message in self.channel.receive():
            if "forget" in message:
                self.calls = deque(call for call in self.calls if call["key"] != message["forget"])
                self.handler.forget(message["forget"])
            else:
                self.calls.append(message)

    def _begin(self, call: Message) -> None:
        """Run a call, outside the event loop: a plain function may have one of its own."""
        answer = self.handler.answer(call, self._send)
        if isinstance(answer, dict):
            self._send({"call": call["call"], **answer})
        else:
            task = self.loop.create_task(self._finish(call, answer))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _finish(self, call: Message, answer: Coroutine[Any, Any, Message]) -> None:
        self._send({"call": call["call"], **await answer})

    def _send(self, message: Message) -> None:
        if os.getpid() != self.process:
            os._exit(0)  # a copy of this process that users' code has forked
        self.channel.send(message)
        if self.channel.unsent:
            self.loop.add_writer(self.channel.connection, self._flush)

    def _flush(self) -> None:
        self.channel.flush()
        if not self.channel.unsent:
            self.loop.remove_writer(self.channel.connection)


def main() -> None:
    """Prepare the handler and report success, then serve; run as `python -c … FD JOB`."""
    connection, job = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    connection.set_inheritable(False)
    die_with(job["rank"])
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's
    ignore_dumps()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how children end
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    prepare()

    def failed(_: BaseException) -> None:
        connection.sendall(packed({"failed": traceback.format_exc()[-_MAX_TEXT:]}))
        sys.exit()

    with guarded(failed, BaseException):
        module, _, name = job["handler"].partition(":")
        handler = getattr(importlib.import_module(module), name)(**job["arguments"])
    connection.sendall(packed({}))
    gc.freeze()
    # No user code runs here any more, so there is time to clean up. A SIGTERM from the rank's death only closes the
    # connection, since an exception could be raised in the midst of the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: connection.shutdown(socket.SHUT_RD))
    die_with(job["rank"], signal.SIGTERM)
    _ForkServer(connection, handler, job["memory"]).serve()


class _ForkServer:
    def __init__(self, connection: socket.socket, handler: Handler, memory: int):
        self.connection, self.handler, self.limit = connection, handler, memory
        self.children: dict[int, tuple[Child, SharedMemoryUse, StackFile]] = {}
        """Those that the rank has not asked to kill."""

    def serve(self) -> None:
        """Serve requests until the rank ends, in whatever way; then kill all children."""
        requests, schedule = select.poll(), PollSchedule()
        requests.register(self.connection, select.POLLIN)
        try:
            while True:
                pause = max(0.0, schedule.due - time.monotonic()) if self.children else None
                if requests.poll(pause and 1000 * pause) and not self._serve_one():
                    return
                if self.children and time.monotonic() >= schedule.due:
                    with schedule.poll():
                        self._check_children()
        except ConnectionError:
            return  # the rank has ended before it took an answer
        finally:
            self._kill([*self.children])
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()

    def _serve_one(self) -> bool:
        """Serve one request; return False at the end of the connection. `fork` with a socket answers the child's id,
        `exit_code` with a child and seconds to wait the code or None, and where it crashed, `location` with a child
        where it stands, `kill` with children nothing."""
        packet, files, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
        if not packet:
            return False
        request, *arguments = msgpack.unpackb(packet)
        if request == "fork":
            self.connection.sendall(packed(self._fork(files[0])))
        elif request == "exit_code":
            child, seconds = arguments
            process, _, stack = self.children[child]
            code = process.poll(seconds)
            self.connection.sendall(packed([code, location_in(stack.read())[:_MAX_LOCATION]]))
        elif request == "location":
            process, _, stack = self.children[arguments[0]]
            self.connection.sendall(packed(location_in(stack.dump_main(process))[:_MAX_LOCATION]))
        else:
            self._kill(arguments)
        return True

    def _fork(self, file: int) -> int:
        limits = {resource.RLIMIT_DATA: self.limit, resource.RLIMIT_CORE: 0}
        stack, earlier = StackFile(), shm_files()
        child = spawn(partial(self._run_child, file, stack), session=True, limits=limits, oom_score=1000)
        os.close(file)
        self.children[child.pid] = child, SharedMemoryUse(child.pid, self.limit, earlier), stack
        return child.pid

    def _run_child(self, file: int, stack: StackFile) -> None:
        stack.enable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # for what users' code starts and ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        adopt_orphans()
        self.connection.close()
        CallLoop(socket.socket(fileno=file), self.handler).run()

    def _check_children(self) -> None:
        """Kill children with too much shared memory, and what ended children have left behind."""
        for pid, (child, memory, _) in self.children.items():
            if child.status is None and memory.exceeded():
                print(f"process {pid} and its descendants have more shared memory than {self.limit / 2**30:g} GiB, "
                      "and are ended", file=sys.stderr, flush=True)
                os.kill(pid, signal.SIGKILL)
        self._kill([])

    def _kill(self, ended: list[int]) -> None:
        """Kill these children and everything that does not descend from a living child, orphans among it."""
        living = {pid for pid, (child, _, _) in self.children.items() if child.poll() is None}.difference(ended)
        killed = [self.children.pop(pid) for pid in ended if pid in self.children]
        for _, memory, _ in killed:
            memory.note_files()
        if children(os.getpid()) - living:
            kill_descendants(os.getpid(), living)
        for child, _, stack in killed:
            child.wait()
            stack.close()
        unlink_unused({path: inode for _, memory, _ in killed for path, inode in memory.leftovers.items()})
        for orphan in children(os.getpid()) - living:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)
