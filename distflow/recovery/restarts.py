"""Coordinates restarts: the ranks of a restart group share one attempt number in the store.

No process decides. Each supervisor that sees a worker of the group fail writes its failure to the store and proposes
the next attempt; the store takes the first proposal, and all others follow it.

    key in the store, below restarts/GROUP    value
    N                                         attempt N with the failures of those before it, as JSON; none for 0
    N/failures                                number of failures in attempt N
    N/failed/K                                the K-th of them, as JSON
    N/done/R                                  there once rank R has nothing left to do in attempt N
    N/done                                    there once no rank of the group has
    before TAKEOVER                           newest attempt when a machine took the place of another one
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from itertools import takewhile

from distflow.store.interface import Store

_SETTLE, _READ = 5.0, 64
"""Seconds that a rank which missed another waits for that one's failure; failures of an attempt that a rank reads."""
_CONCLUDING = ("validating", "saving", "ending")
"""Phases of a worker after what it has trained; a restart goes back to the same place."""
_PAUSE = 10.0  # seconds before a failure in one of them is tried again: a disk or a server may have room by then


@dataclass(frozen=True)
class RestartGroup:
    """Ranks that restart together: the trainer, one replica of another group, or in mode sync all ranks."""

    name: str
    ranks: range
    group: str  # `trainer`, `rollout`, `inference`, or in mode sync `ranks`


@dataclass(frozen=True)
class Failure:
    """Failure of a worker: `what` in one line, and `details` (a traceback) for debugging.

    step: of the worker, from 1; 0 before the first. finished: steps done in this attempt. symptom: the worker only
    missed another rank. hopeless: it would fail the next time too. silent: seconds without progress when the failure
    was detected. code: exit status of the supervisor if no attempt follows. outside: the worker was killed or stopped
    from outside, which says nothing about the program. required_process: a process that the whole group needs has
    ended, and each supervisor of the group starts its own one again. order: in which the store was told of the failures
    of an attempt; machines have different clocks. exhausted: threads, files or the dock's memory have run out.
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
    required_process: bool = False
    order: int = 0
    exhausted: bool = False


@dataclass(frozen=True)
class Attempt:
    """An attempt of a restart group. failures: of the attempts before. end: why there is none after these."""

    number: int = 0
    failures: tuple[Failure, ...] = ()
    end: str = ""

    def pack(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Attempt:
        fields = json.loads(text)
        return cls(fields["number"], tuple(Failure(**each) for each in fields["failures"]), fields["end"])


class RestartCoordinator:
    """A rank's view of the attempts of its restart group.

    Args:
        store: of the run, by a connection of this process.
        budget: number of restarts.
    """

    def __init__(self, store: Store, restart_group: RestartGroup, rank: int, budget: int):
        self.store = store.below(f"restarts/{restart_group.name}")
        self.restart_group, self.rank, self.budget = restart_group, rank, budget

    def is_superseded(self, attempt: Attempt) -> bool:
        """Return whether the next attempt has begun, or there is known to be none."""
        return self.store.has(str(attempt.number + 1))

    def newest(self) -> Attempt:
        attempt = Attempt()
        while self.is_superseded(attempt):
            attempt = self.next(attempt, None)
        return attempt

    def attempt_before(self, takeover: str) -> Attempt:
        """Return the last attempt that had begun when the first rank of a machine took another's place."""
        number = int(self.store.put_if(f"before {takeover}", str(self.newest().number), None))
        attempt = Attempt()
        while attempt.number < number:
            attempt = self.next(attempt, None)
        return attempt

    def next(self, attempt: Attempt, failure: Failure | None) -> Attempt:
        """Return the next attempt: proposed here if this rank has seen a failure, else the one that others began."""
        if failure is not None:
            self._fail(attempt, failure)
        while (found := self.store.get(str(attempt.number + 1))) is None:
            self.store.wait([str(attempt.number + 1)], self.store.deadline.seconds)
        return Attempt.unpack(found)

    def renew(self, attempt: Attempt) -> Attempt:
        """Return the next attempt of a group that has not failed; it takes the settings as they are now."""
        following = replace(attempt, number=attempt.number + 1)
        return Attempt.unpack(self.store.put_if(str(following.number), following.pack(), None))

    def mark_done(self, attempt: Attempt) -> None:
        self.store.put(f"{attempt.number}/done/{self.rank}", "")

    def all_done(self, attempt: Attempt) -> bool:
        """Return whether all ranks are done. The first one alone looks at each of them."""
        ranks, done = self.restart_group.ranks, f"{attempt.number}/done"
        if self.rank != ranks.start:
            return self.store.has(done)
        if not self.store.has(*(f"{done}/{rank}" for rank in ranks)):
            return False
        self.store.put(done, "")
        return True

    def _fail(self, attempt: Attempt, failure: Failure) -> None:
        failure = replace(failure, order=self.store.add(f"{attempt.number}/failures"))
        self.store.put(f"{attempt.number}/failed/{failure.order}", json.dumps(asdict(failure)))
        if failure.symptom:
            self.store.wait([str(attempt.number + 1)], _SETTLE)
        if self.is_superseded(attempt):
            return
        before = (replace(each, details="") for each in attempt.failures)  # they were shown
        failures = (*before, self._first(attempt, failure))
        end = stop_reason(failures, self.budget)
        self.store.put_if(str(attempt.number + 1), Attempt(attempt.number + 1, failures, end).pack(), None)

    def _first(self, attempt: Attempt, mine: Failure) -> Failure:
        """Return the first cause among the first failures and `mine`: a later rank with a cause of its own proposes."""
        count = min(_READ, self.store.add(f"{attempt.number}/failures", 0))
        texts = self.store.get_all([f"{attempt.number}/failed/{order}" for order in range(1, count + 1)])
        found = [mine, *(Failure(**json.loads(text)) for text in texts if text)]
        return min(found, key=lambda failure: (failure.symptom, not failure.outside, failure.order))


def pause_before(attempt: Attempt) -> float:
    """Return for how many seconds the workers of an attempt wait before they start."""
    last = attempt.failures[-1] if attempt.failures else None
    may_pass = last and (last.exhausted or last.phase in _CONCLUDING) and not (
        last.outside or last.symptom)
    return _PAUSE if may_pass else 0.0


def stop_reason(failures: tuple[Failure, ...], budget: int) -> str:
    """Return why there is no further attempt; empty if there is one (RobustRL §5.1.2).

    A failure that repeats at once is a mistake in a program, not a fault of a machine: a restart would only hide it. A
    failure from outside never is, however often it repeats: it counts against the budget alone.
    """
    if failures[-1].hopeless:
        return "it would fail the next time too"
    if not failures[-1].outside and (mistake := _repeated_mistake(failures)):
        return mistake
    if len(failures) > budget:
        return f"its {budget} restarts are used up (robust.restarts in the run file)"
    return ""


def _repeated_mistake(failures: tuple[Failure, ...]) -> str:
    """Return why the last failure is a mistake in a program; empty if it may be transient."""
    last, before = failures[-1], [each for each in failures[:-1] if not each.outside]
    if len(failures) == 1 and not last.finished and last.phase not in ("waiting", "ending") and not last.exhausted:
        return "it failed before it had done its first step, which a mistake does and a broken machine rarely"
    if before and last.phase == before[-1].phase == "starting":
        return "its restart has failed twice"
    since = list(takewhile(lambda each: each.outside, reversed(failures[:-1])))
    adjoining = before and not any(each.finished for each in since)  # else it came further than the failure before
    if adjoining and last.exhausted and before[-1].exhausted and not last.finished:
        return "threads, open files or memory have run out twice (`ulimit -u`, `ulimit -n`, `pids.max`), and each " \
               "start needs as many"
    if adjoining and last.phase == before[-1].phase in _CONCLUDING and last.step in (0, before[-1].step):
        return f"it failed twice in the same place ({last.phase})"
    if before and last.step and before[-1].step == last.step:
        return f"it failed twice in step {last.step}"
    return ""
