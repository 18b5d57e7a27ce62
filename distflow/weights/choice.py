"""From whom to pull: relays before the trainer, whoever is free before whoever serves another (RobustRL §5.2.1)."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from distflow.weights.directory import Entry


def ordered(entries: Mapping[str, Entry], key: str, me: str, mine: int, lacking: Collection[int]) -> list[Entry]:
    """The holders of a version, those to ask first first.

    A relay that is still pulling is as good as one that has everything, if it is ahead of us: its chunks come as fast
    as ours could. So pullers that begin together form one row behind the trainer, whose bytes go out once. Relays that
    nothing flows to, or only what comes from us, are asked last: they may have what another that was lost had.

    Args:
        entries: all that live.
        mine: chunks that are here.
        lacking: trainer ranks of whose part something is not here.
    """
    def rank(entry: Entry) -> tuple[int, int, float]:
        held = entry.of(key)
        if entry.rank >= 0:
            return (2, entry.rank, 0.0)
        if entry.serving not in ("", me) or not is_fed(entry, key, me, entries):
            return (3, -held.have, random.random())
        if held.have >= held.awaited:
            return (0, 0, random.random())
        return (1 if held.have >= mine else 3, -held.have, random.random())

    return sorted((entry for entry in entries.values() if entry.of(key) is not None and
                   (entry.rank < 0 or entry.rank in lacking)), key=rank)


def is_fed(entry: Entry, key: str, me: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a holder has all that it will have, or gets it from one of which this is true, and not from us."""
    served = {other.serving: other for other in entries.values() if other.serving}
    passed = {me}
    while entry.who not in passed:
        held = entry.of(key)
        if held is None or entry.rank >= 0 or held.have >= held.awaited:
            return held is not None
        passed.add(entry.who)
        above = entries.get(entry.source) if entry.source != me else None
        entry = above or served.get(entry.who, entry)
    return False


def can_be_had(entries: Mapping[str, Entry], key: str, ranks: Collection[int]) -> bool:
    """Whether living holders have all of a version as far as the board shows: a relay everything, or the trainer's
    `ranks` their parts."""
    holders = [(entry, held) for entry in entries.values() if (held := entry.of(key)) is not None]
    return any(entry.rank < 0 and held.entire and held.have >= held.awaited for entry, held in holders) or \
        {entry.rank for entry, _ in holders} >= set(ranks)
