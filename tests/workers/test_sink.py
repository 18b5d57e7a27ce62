"""Ends of a run before its last step: what ends it, and that a worker that starts again knows of it."""

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

    def results(self, wait: float = 0.0) -> Iterator[ValidationResult]:
        while self.asked[:-1] or (wait and self.asked):
            of_step = self.asked.pop(0)
            yield ValidationResult(of_step, {"validation/held": self.means[of_step]})


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


def train(sink: Sink, step: int = 0) -> int:
    """Do steps up to the end of the run; return the last one."""
    over = sink.start(step)
    while not over:
        step += 1
        over = sink.conclude(step)
    return step


def test_a_worker_that_starts_again_while_the_last_validation_is_awaited_trains_no_more(sink):
    settings, means, last = {"patience": 2}, {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2, 4: 0.9}, 4
    assert train(sink(means, **settings)) == last
    again = sink(means, last, **settings)
    assert train(again, last) == last
    for outcome in again.requests.results(wait=1.0):  # of the last step, which may be the best one
        again._note(outcome)
    assert train(sink(means, last, **settings), last) == last
    assert train(sink(means, last, concluded=True, **settings), last) == last, "nor does a run that is resumed"
    other = {name: 2 * value for name, value in settings.items()}
    assert train(sink(dict.fromkeys(range(10), 0.95), last, **other), last) > last, "under other settings it goes on"


def test_detectors_go_by_the_settings_with_which_a_run_is_resumed(sink, tmp_path):
    resumed = sink({}, 4, concluded=True)
    (tmp_path / "run.yaml").write_text("data: {max_prompt_tokens: 8}")  # as a resume writes it before the first step
    resumed.start(4)
    assert resumed.learning.series.settings == {"data.max_prompt_tokens": "8"}


def test_an_end_after_a_step_that_is_done_again_counts_no_more(sink):
    assert train(sink({0: 0.3, 1: 0.2, 2: 0.1}, patience=2)) == 3
    assert train(sink({1: 0.4, 2: 0.3, 3: 0.5, 4: 0.1, 5: 0.1}, 1, patience=2), 1) == 6


def test_a_step_that_fails_again_after_an_older_snapshot_is_repeated_once(sink, tmp_path):
    """The worker is back some steps, so that the step that fails is not its first."""
    def repeat(first: int, spike: float, at: int = 12) -> Sink:
        made = sink({}, first - 1 or None, True, detectors="{loss_spike: restart}")
        made.start(first - 1)
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
