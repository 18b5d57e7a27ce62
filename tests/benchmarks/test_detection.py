"""Who suspects a quiet rank, and who a stopped one: on observations as a supervisor makes them."""

from benchmarks.detection import Hold, Look, alarms, judge
from distflow.config.robust import Phase
from distflow.recovery.detectors import Observation


def looks(rank: int, phase: Phase, begins: int, ends: int, stopped: bool = False) -> list[Look]:
    """One a second; a rank that is stopped, or waits, makes no progress."""
    still = stopped or phase not in ("training", "generating")
    return [Look(moment, rank, Observation("rollout" if rank else "trainer", phase, 1, moment - begins,
                                           moment - begins if still else 0.0, moment - begins if stopped else 0.0))
            for moment in range(begins, ends)]


def test_a_stopped_rank_is_told_from_one_that_waits_for_tools():
    """Rank 1 waits for tools from 0 to 10 and from 35 on; rank 0 trains, and is stopped from 20 to 50."""
    seen = [*looks(0, "training", 0, 20), *looks(0, "training", 20, 50, stopped=True),
            *looks(1, "generating", -2, 0), *looks(1, "tools", 0, 10), *looks(1, "generating", 10, 35),
            *looks(1, "tools", 35, 50)]
    raised = alarms(sorted(seen, key=lambda look: look.moment), 4.0)
    hold = [Hold(0, 20.0, 50.0)]
    assert judge(raised["phase"], hold) == ([5.0], 0)
    assert judge(raised["rank"], hold) == ([5.0], 1)  # the tools of before; those of later are within the stop
    assert judge(raised["cluster"], hold) == ([19.0], 0)  # once rank 1 waits too
