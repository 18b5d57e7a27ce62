"""From whom to pull: relays before the trainer, whoever is free before whoever serves another (RobustRL §5.2.1)."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from distflow.weights.directory import Entry


def ordered(entries: Mapping[str, Entry], key: str, me: str, mine: int, lacking: Collection[int]) -> list[Entry]:
    """The holders of a version, those to ask first first.

    A relay that is still pulling is as good as one that has everything, if it is ahead of us: its chunks come as fast
    as ours could. So pullers that begin together form one row behind the trainer, whose bytes go out once. Relays that
    pull from us, directly or not, come last: they have nothing that we lack, unless our own source has been lost.

    Args:
        entries: all that live.
        mine: chunks that are here.
        lacking: trainer ranks of whose part something is not here.
    """
    def rank(entry: Entry) -> tuple[int, int, float]:
        held = entry.of(key)
        if entry.rank >= 0:
            return (2, entry.rank, 0.0)
        if entry.serving not in ("", me) or pulls_from(entry, me, entries):
            return (3, 0, random.random())
        if held.have >= held.awaited:
            return (0, 0, random.random())
        return (1 if entry.source and held.have >= mine else 3, -held.have, random.random())

    return sorted((entry for entry in entries.values() if entry.of(key) is not None and
                   (entry.rank < 0 or entry.rank in lacking)), key=rank)


def pulls_from(entry: Entry, me: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a holder gets its chunks from us, directly or by way of others."""
    passed: set[str] = set()
    while entry.source and entry.who not in passed:
        if entry.source == me:
            return True
        passed.add(entry.who)
        entry = entries.get(entry.source, entry)
    return False


def can_be_had(entries: Mapping[str, Entry], key: str, ranks: Collection[int]) -> bool:
    """Whether living holders have all of a version as far as the board shows: a relay everything, or the trainer's
    `ranks` their parts."""
    holders = [(entry, held) for entry in entries.values() if (held := entry.of(key)) is not None]
    return any(entry.rank < 0 and held.entire and held.have >= held.awaited for entry, held in holders) or \
        {entry.rank for entry, _ in holders} >= set(ranks)
