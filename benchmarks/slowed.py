"""Ranks that are slowed: each in a control group of its own with a quota of processor time, enforced by the kernel.

Linux as root only. A rank with the quota 0.5 computes for half of every period and stands still for the rest of it,
with all the processes that it starts; so it is as slow as a device of half the speed, whatever it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.control_group import control_group, joining

_PERIOD = 100_000
"""Microseconds: much less than a node takes, and so much that caches are warm for most of it."""
_AHEAD = 256
"""How much more of a busy machine a rank gets than another process, so that what else runs there disturbs little."""


class NoQuota(Exception):
    """This system lets us limit no processor time."""


class Slowed:
    """Ranks whose processor time can be limited. `join` goes before the command of every rank, under torchrun with
    `--no-python`: it joins the group of its RANK."""

    def __init__(self, groups: Sequence[Path]):
        self.groups = groups
        self.join = joining(str(groups[0]).removesuffix("0") + "$RANK")

    def begin(self, quotas: Sequence[float]) -> None:
        """Limit each rank to so much of one core from now on."""
        for group, quota in zip(self.groups, quotas):
            _limit(group, quota)


@contextlib.contextmanager
def ranks(count: int) -> Iterator[Slowed]:
    """Groups for so many ranks, gone at the end.

    Raises:
        NoQuota: says why there can be none.
    """
    with contextlib.ExitStack() as stack:
        try:
            groups = [stack.enter_context(control_group("cpu", str(rank))) for rank in range(count)]
            for group in groups:
                _limit(group, 1.0)
        except OSError as error:
            raise NoQuota(f"no control group for processor time can be made here: {error}. It needs root, and cgroups "
                          "that may be written") from None
        yield Slowed(groups)


def _limit(group: Path, quota: float) -> None:
    busy = int(_PERIOD * quota)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{busy} {_PERIOD}")
        (group / "cpu.weight").write_text("10000")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
    (group / "cpu.cfs_quota_us").write_text(str(busy))
    (group / "cpu.shares").write_text(str(1024 * _AHEAD))
