"""What the board says about weights: the newest version, and who has how much of which one.

Each holder says so in an entry of its own, with a counter that it raises as long as it lives. A reader whose clock sees
a counter stand still for too long takes the holder for dead and wipes its entry; a holder that was only slow writes it
again. Nothing here grows with the model: manifests are served by the holders.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import astuple, dataclass, field, replace

import torch.distributed as dist

from distflow.weights.manifest import PublishedVersion

BEAT, DEAD = 0.5, 3.0
"""Seconds between two signs of life, and without one after which a holder counts as dead."""
_HEADS, _NEWEST, _ABSENT = "heads", "newest", "-"
_KEPT = 3
"""Versions that the board remembers: when nobody has all of the newest any more, the one before may still be had."""
Address = tuple[str, int]


@dataclass(frozen=True)
class HeldChunks:
    """Of one version: chunks that are there, and that will be. entire: what will be is all that was published."""

    version: int
    key: str
    have: int
    awaited: int
    entire: bool = False


@dataclass(frozen=True)
class SourceEntry:
    """A holder as it describes itself.

    rank: that of a trainer rank, which has only its own part; -1 for a rollout. source: from whom it is pulling, and
    serving: who is pulling from it; empty if nobody.
    """

    who: str
    address: Address
    rank: int = -1
    held: tuple[HeldChunks, ...] = ()
    source: str = ""
    serving: str = ""
    beat: int = 0

    def of(self, key: str) -> HeldChunks | None:
        return next((held for held in self.held if held.key == key), None)

    def pack(self) -> str:
        held = [list(astuple(each)) for each in self.held]
        return json.dumps([self.address, self.rank, held, self.source, self.serving, self.beat])

    @classmethod
    def unpack(cls, who: str, text: bytes) -> SourceEntry:
        (host, port), rank, held, source, serving, beat = json.loads(text)
        return cls(who, (host, port), rank, tuple(HeldChunks(*each) for each in held), source, serving, beat)


@dataclass
class _Seen:
    beat: int
    since: float = field(default_factory=time.monotonic)


class Directory:
    """A process's view of the board, and its own entry there.

    It has a connection of its own: whoever waits on `store` does not keep it from saying that it lives.
    """

    def __init__(self, store: dist.Store, entry: SourceEntry, dead: float = DEAD):
        self.store, self.mine, self.dead = dist.PrefixStore("weights", store.clone()), entry, dead
        self.seen: dict[str, _Seen] = {}
        self.last: dict[str, SourceEntry] = {}
        self.read_at = 0.0
        self.lock, self.over = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._beat, name="weights heartbeat", daemon=True)

    def start(self) -> None:
        """Appear on the board, and stay there until `close`."""
        self.tell()
        self.thread.start()

    def tell(self, **changes: object) -> None:
        """Change what this process's entry says; it does nothing if that changes nothing."""
        with self.lock:
            changed = replace(self.mine, **changes)
            if self.over.is_set():  # the last pullers are being hung up on
                return
            if changed != self.mine or not self.mine.beat:
                self.mine = replace(changed, beat=self.mine.beat + 1)
                self.store.set(f"holder/{self.mine.who}", self.mine.pack())

    def note(self, **changes: object) -> None:
        """As `tell`, but readers may learn it with the next sign of life only."""
        with self.lock:
            self.mine = replace(self.mine, **changes)

    def newest(self) -> str:
        """The key of the newest version; empty if there is none."""
        return self.read(_NEWEST)

    def heads(self) -> list[PublishedVersion]:
        """The versions that were published last, the newest first; all of them whole."""
        found = self.read(_HEADS)
        return [PublishedVersion.unpack(text) for text in found.splitlines()]

    def reveal(self, head: PublishedVersion, old: list[PublishedVersion]) -> bool:
        """Make `head` the newest version, unless another one has become that since `old` was read."""
        expected, text = (_lines(heads) for heads in (old, [head, *old][:_KEPT]))
        if self.store.compare_set(_HEADS, expected, text).decode() != text:
            return False
        self.store.set(_NEWEST, head.key)
        return True

    def holders(self, age: float = 0.0) -> dict[str, SourceEntry]:
        """The others that live, by name; as they were up to `age` seconds ago."""
        if time.monotonic() - self.read_at > age:
            self.last, self.read_at = self._holders(), time.monotonic()
        return self.last

    def _holders(self) -> dict[str, SourceEntry]:
        keys = [key for key in self.store.list_keys() if key.startswith("holder/")]
        found: dict[str, SourceEntry] = {}
        now = time.monotonic()
        for key, text in zip(keys, self.store.multi_get(keys) if keys else ()):
            who = key.removeprefix("holder/")
            if not text or who == self.mine.who:
                continue
            entry = SourceEntry.unpack(who, text)
            seen = self.seen.get(who)
            if seen is None or seen.beat != entry.beat:
                self.seen[who] = _Seen(entry.beat)
            elif now - seen.since > self.dead:
                self.forget(who)
                continue
            found[who] = entry
        return found

    def forget(self, who: str) -> None:
        """Wipe an entry. The key stays: a reader between `list_keys` and `multi_get` would wait for it."""
        self.seen.pop(who, None)
        self.store.set(f"holder/{who}", "")

    def read(self, key: str) -> str:
        """A value, empty if there is none; `get` would wait for it."""
        found = self.store.compare_set(key, _ABSENT, _ABSENT).decode()
        return "" if found == _ABSENT else found

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        with contextlib.suppress(dist.DistError), self.lock:
            self.forget(self.mine.who)

    def _beat(self) -> None:
        while not self.over.wait(BEAT):
            try:
                with self.lock:
                    self.mine = replace(self.mine, beat=self.mine.beat + 1)
                    self.store.set(f"holder/{self.mine.who}", self.mine.pack())
            except dist.DistError:
                return  # the board has ended, and with it the run


def _lines(heads: list[PublishedVersion]) -> str:
    return "\n".join(head.pack() for head in heads)
