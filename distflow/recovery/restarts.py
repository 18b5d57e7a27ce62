"""Which life the ranks of a group are in, as the board says: they die together, and begin the next one together.

No process decides. Whoever sees a worker of the group end writes down why, and proposes the next life; the board takes
the first proposal, and all others follow it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

_SETTLE, _LOOK = 5.0, 0.02
"""Seconds in which the rank that failed first is heard, when another fails because of it."""


@dataclass(frozen=True)
class RestartGroup:
    """Ranks that live and die together: the trainer, one replica of the rollouts, or in mode sync all ranks."""

    name: str
    ranks: range
    group: str
    """`trainer`, `rollout`, or in mode sync `ranks`."""


@dataclass(frozen=True)
class Failure:
    """The end of a worker: `what` in one line, and `details` for who looks for a mistake in a program.

    step: in which it was, from 1; 0 if it had not begun one. finished: steps that this life had done. symptom: it only
    missed another rank. hopeless: it would fail the next time too. silent: for how many seconds it had done nothing
    when that was seen. code: what its seat exits with if no life follows. outside: somebody else has killed or stopped
    it, which says nothing about the program. companion: it was a process that the whole unit needs, and each of its
    seats starts its own one again.
    """

    rank: int
    what: str
    phase: str = "starting"
    step: int = 0
    finished: int = 0
    symptom: bool = False
    hopeless: bool = False
    details: str = ""
    silent: float = 0.0
    code: int = 1
    outside: bool = False
    companion: bool = False
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Attempt:
    """`failures`: why each life before ended. `end`: why there is no life after these; empty while there is one."""

    number: int = 0
    failures: tuple[Failure, ...] = ()
    end: str = ""

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: bytes) -> Attempt:
        fields = json.loads(text)
        return cls(fields["number"], tuple(Failure(**each) for each in fields["failures"]), fields["end"])


class RestartCoordinator:
    """A rank's view of its unit's lives.

    Args:
        store: the board, by a connection of this process.
        budget: how many restarts the unit has; None: it is not started again by itself.
    """

    def __init__(self, store: dist.Store, unit: RestartGroup, rank: int, budget: int | None):
        self.store = dist.PrefixStore(f"lives/{unit.name}", store)
        self.unit, self.rank, self.budget = unit, rank, budget

    def over(self, life: Attempt) -> bool:
        """Whether the next life has begun, or it is known that there is none."""
        return self.store.check([str(life.number + 1)])

    def newest(self) -> Attempt:
        """The last one that has begun."""
        life = Attempt()
        while self.over(life):
            life = self.next(life, None)
        return life

    def before(self, era: int) -> Attempt:
        """The last one that had begun when the first of the unit's ranks came to an era of the machines."""
        number = int(self.store.compare_set(f"before era {era}", "", str(self.newest().number)))
        life = Attempt()
        while life.number < number:
            life = self.next(life, None)
        return life

    def next(self, life: Attempt, failure: Failure | None) -> Attempt:
        """The life after this one: proposed, if this rank has seen a failure, else the one that others have begun."""
        if failure is not None:
            self._fail(life, failure)
        return Attempt.unpack(self.store.get(str(life.number + 1)))

    def renew(self, life: Attempt) -> Attempt:
        """The life after one in which nothing has failed."""
        self.store.compare_set(str(life.number + 1), "", replace(life, number=life.number + 1).pack())
        return Attempt.unpack(self.store.get(str(life.number + 1)))

    def done(self, life: Attempt) -> None:
        """This rank has nothing left to do."""
        self.store.set(f"{life.number}/done/{self.rank}", "")

    def all_done(self, life: Attempt) -> bool:
        return self.store.check([f"{life.number}/done/{rank}" for rank in self.unit.ranks])

    def _fail(self, life: Attempt, failure: Failure) -> None:
        self.store.set(f"{life.number}/failed/{self.rank}", json.dumps(asdict(failure)))
        until = time.monotonic() + _SETTLE
        while failure.symptom and not self.over(life) and time.monotonic() < until:
            time.sleep(_LOOK)
        before = (replace(each, details="") for each in life.failures)  # they were shown
        failures = (*before, self._first(life))
        end = verdict(failures, self.budget)
        self.store.compare_set(str(life.number + 1), "", Attempt(life.number + 1, failures, end).pack())

    def _first(self, life: Attempt) -> Failure:
        """The cause among what the ranks have written down."""
        keys = [f"{life.number}/failed/{rank}" for rank in self.unit.ranks]
        found = [Failure(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]
        return min(found, key=lambda failure: (failure.symptom, not failure.outside, failure.time))


def verdict(failures: tuple[Failure, ...], budget: int | None) -> str:
    """Why there is no further life; empty if there is one (RobustRL §5.1.2).

    What happens again at once is a mistake in a program, not a fault of a machine: to restart would only hide it. What
    comes from outside is none, however often: it counts against the budget alone.
    """
    if failures[-1].hopeless:
        return "it would fail the next time too"
    if not failures[-1].outside and (mistake := _mistake(failures)):
        return mistake
    if budget is None:
        return "the run file says  robust: {restart: task}"
    if len(failures) > budget:
        return f"its {budget} restarts are used up (robust.restarts in the run file)"
    return ""


def _mistake(failures: tuple[Failure, ...]) -> str:
    """Why the last failure, one of a program, is a mistake in it; empty if it may pass."""
    last, before = failures[-1], [each for each in failures[:-1] if not each.outside]
    if len(failures) == 1 and not last.finished and last.phase != "waiting":
        return "it failed before it had done its first step, which a mistake does and a broken machine rarely"
    if before and last.phase == before[-1].phase == "starting":
        return "its restart has failed twice"
    if before and last.step and before[-1].step == last.step:
        return f"it failed twice in step {last.step}"
    return ""
