"""What a worker that starts again knows of the run: the best validation, and steps that were repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from distflow.config.load import load
from distflow.errors import StepFailed
from distflow.telemetry.events import Events
from planners import plan
from workers.sink import Sink
from workers.validation import ValidationResult


class Rollouts:
    """Validations that others answer, with these means by step; each is known of one step later."""

    def __init__(self, means: dict[int, float]):
        self.means, self.known, self.lost, self.asked = means, set(), set(), []

    def ask(self, step: int) -> None:
        self.known.add(step)
        self.asked.append(step)

    def results(self, step: int, wait: float = 0.0) -> Iterator[ValidationResult]:
        while self.asked and self.asked[0] < step:
            of_step = self.asked.pop(0)
            yield ValidationResult(of_step, of_step, {"validation/held": self.means[of_step]})


@pytest.fixture
def sink(alone, tmp_path, monkeypatch):
    """`sink(means, resumed_at, concluded, **validation)`: that of a worker, which may have to conclude again."""
    (tmp_path / "held.jsonl").write_text('{"question": "1", "answer": "1"}\n')

    def make(means: dict[int, float], resumed_at: int | None = None, concluded: bool = False, detectors: str = "{}",
             **settings) -> Sink:
        events = Events()
        events.open(tmp_path / "events.jsonl", 0)
        monkeypatch.setattr("distflow.telemetry.events._current", events)
        more = [f"validation.{name}={value}" for name, value in settings.items()]
        spec = load("grpo.yaml", None, ["mode=async", "steps=9", "validation.every=1", "checkpoint.every=0", "log=[]",
                                        f"robust.detectors={detectors}",
                                        f"validation.data={{held: {tmp_path}/held.jsonl}}", *more])
        unconcluded = resumed_at is not None and not concluded
        planned, state = plan(spec, 2), SimpleNamespace(from_memory=unconcluded, save=lambda step: None)
        context = SimpleNamespace(spec=spec, own=planned, plan=planned, path=tmp_path)
        return Sink(context, resumed_at, Rollouts(means), state, {})

    return make


def test_a_resumed_run_knows_the_best_mean_so_far(sink, tmp_path):
    first = sink({0: 0.1, 1: 0.4, 2: 0.3})
    first.start(0)
    for step in (1, 2, 3):
        first.conclude(step)
    assert (first.best, sink({}, 3).best) == (0.4, 0.4)


def test_a_step_that_fails_again_after_an_older_snapshot_is_repeated_once(sink, tmp_path):
    """The worker is back some steps, so that the step that fails is not its first."""
    def repeat(first: int, spike: float, at: int = 12) -> Sink:
        made = sink({}, first - 1 or None, detectors="{loss_spike: restart}")
        for step in range(first, at + 1):
            metrics = {"grad_norm": spike if step == at else 1.0 + 0.01 * step, "seconds": 1.0}
            if made.folder:
                made.folder.write_metrics(step, metrics)
            made._note_faults(step, metrics)
        return made

    with pytest.raises(StepFailed, match="step 12: grad_norm is"):
        repeat(1, 50.0)
    again = repeat(8, 50.0).learning
    assert again is not None
    assert again.seen == {"loss_spike": 12}
    event, = (each for each in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
              if each["event"] == "step_repeated")
    assert event["of_step"] == 12
    with pytest.raises(StepFailed, match="step 12: grad_norm is nan"):
        repeat(8, math.nan)
    with pytest.raises(StepFailed, match="step 13"):
        repeat(8, 50.0, at=13)
