"""What is silence and what is not: each detector at its border, and long quiet phases without one false alarm."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

import pytest

from distflow.config.robust import PHASES
from distflow.recovery import detectors
from distflow.recovery.detectors import DETECTORS, HealthMonitor, Observation, detector
from distflow.telemetry.heartbeat import Heartbeat

QUIET = Observation("trainer", "training", 3, in_phase=0.0, silent=0.0, mute=0.0)


@pytest.mark.parametrize(("name", "at_border"), [
    ("stalled", replace(QUIET, silent=300.0)),
    ("stalled", replace(QUIET, phase="inference", silent=300.0)),
    ("no_tokens", replace(QUIET, phase="generating", silent=60.0, mute=99.0)),
    ("frozen", replace(QUIET, phase="waiting", silent=60.0, mute=99.0)),
    ("frozen", replace(QUIET, phase="starting", silent=300.0, mute=999.0)),
])
def test_a_detector_speaks_beyond_its_border(name, at_border):
    assert DETECTORS[name](at_border) is None
    assert f"detector `{name}`" in DETECTORS[name](replace(at_border, silent=at_border.silent + 0.1))


def test_a_gpu_that_computes_is_given_more_time():
    assert DETECTORS["stalled"](replace(QUIET, silent=1800.0, idle=300.0)) is None
    assert "tensor cores have not worked for 2 s" in DETECTORS["stalled"](replace(QUIET, silent=1800.1, idle=2.0))
    assert "tensor cores have not worked for 301 s" in DETECTORS["stalled"](replace(QUIET, silent=300.1, idle=300.9))


def test_silence_alone_means_nothing_where_others_are_waited_for():
    for phase in PHASES:
        silent = replace(QUIET, phase=phase, silent=1e6, mute=1.0)
        said = {name for name, each in DETECTORS.items() if each(silent)}
        speaks = {"training": {"stalled"}, "inference": {"stalled"}, "generating": {"no_tokens"}}
        assert said == speaks.get(phase, set()), phase


def test_ranks_that_hang_together_in_a_collective_answer_and_are_found_all_the_same():
    silent = replace(QUIET, phase="generating", silent=600.0, mute=0.5)
    assert DETECTORS["no_tokens"](silent) is None
    assert "no token for 601 s, though it answers" in DETECTORS["no_tokens"](replace(silent, silent=600.6))


class Clock:
    """Clock that advances on demand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Worker:
    """A page, and a process that answers."""

    def __init__(self, clock: Clock, **settings: dict[str, float]):
        self.clock, self.heartbeat, self.answers = clock, Heartbeat(), True
        self.monitor = HealthMonitor("rollout", settings)
        self.monitor.begin(self.heartbeat)

    def live(self, seconds: float, ticks: float = 0.0) -> list[str]:
        """What is found meanwhile, by a look in each half second; `ticks`: progress a second."""
        found, done = [], 0.0
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            if self.answers:
                self.heartbeat.page.heartbeats += 1
            done += ticks / 2
            if done >= 1:
                self.heartbeat.tick()
                done -= int(done)
            if finding := self.monitor.look():
                found.append(finding.what)
        return found


@pytest.mark.run
def test_two_hundred_quiet_runs_without_a_false_alarm(clock):
    """Waits for tools, samples and weights of up to 20 minutes; slow progress just inside the windows."""
    slowest = {"training": 1 / 290, "inference": 1 / 290, "generating": 1 / 590}
    for seed in range(200):
        draw, worker = random.Random(seed), Worker(clock)
        for _ in range(8):
            phase = draw.choice(PHASES)
            worker.heartbeat.enter(phase)
            worker.heartbeat.begin(draw.randrange(100))
            assert worker.live(draw.uniform(1, 1200), ticks=slowest.get(phase, 0.0)) == [], (seed, phase)


def test_a_worker_that_falls_silent_after_any_history_is_found(clock):
    for seed in range(20):
        draw, worker = random.Random(seed), Worker(clock)
        for _ in range(3):
            worker.heartbeat.enter(draw.choice(PHASES))
            worker.live(draw.uniform(1, 100), ticks=1.0)
        worker.heartbeat.enter("tools")
        worker.answers = False
        assert worker.live(60) == []
        assert "does not answer" in worker.live(6)[0], seed


def test_one_that_waits_for_another_is_only_a_symptom(clock):
    worker = Worker(clock, stalled={"seconds": 5})
    worker.heartbeat.enter("training")
    assert worker.live(5.5) == []
    assert worker.live(0.5) == ["it has made no progress for 6 s of training (detector `stalled`)."]
    assert worker.monitor.look().symptom
    worker.answers = False
    worker.live(10)
    assert not worker.monitor.look().symptom


def test_tensor_cores_are_looked_at_once_the_worker_has_a_gpu(clock, monkeypatch):
    works = True
    monkeypatch.setattr(detectors, "tensor_cores", lambda gpu: (lambda: works) if gpu == "GPU-1" else None)
    worker = Worker(clock)
    worker.heartbeat.enter("training")
    assert "no progress for 300 s of training (detector" in worker.live(301)[0]
    worker.heartbeat.set_gpu("GPU-1")
    assert worker.live(1000) == []  # it works, and is only slow
    works = False
    assert worker.live(295) == []
    assert "tensor cores have not worked for 30" in worker.live(10)[0]


def test_a_supervisor_that_stood_still_itself_finds_nothing(clock):
    """A machine that slept for an hour."""
    worker = Worker(clock)
    worker.heartbeat.enter("training")
    worker.live(10, ticks=1.0)
    worker.answers = False
    worker.live(1.5)
    clock.now += 3600
    worker.answers = True
    assert worker.live(100, ticks=1.0) == []


def test_settings_and_detectors_of_ones_own(clock):
    @detector
    def slow_save(observation: Observation, *, seconds: float = 900.0) -> str | None:
        return "saves and saves" if observation.phase == "saving" and observation.in_phase > seconds else None

    try:
        worker = Worker(clock, slow_save={"seconds": 10})
        worker.heartbeat.enter("saving")
        assert worker.live(10) == []
        assert worker.live(0.5) == ["it saves and saves."]
    finally:
        del detectors.DETECTORS["slow_save"]


@pytest.mark.parametrize("phase", ["generating", "tools"])
def test_a_stopped_process_is_found_when_its_window_is_over(phase):
    window, look = 2.0, 0.2
    heartbeat = Heartbeat()
    monitor = HealthMonitor("rollout", {"no_tokens": {"seconds": 2 * window}, "frozen": {"seconds": window}})
    monitor.begin(heartbeat)
    child = os.fork()
    if not child:
        heartbeat.start()
        heartbeat.enter(phase)
        while True:
            time.sleep(0.01)
            heartbeat.tick()
    try:
        began = time.monotonic()
        while time.monotonic() < began + 2 * window:  # it works, and is left alone
            assert monitor.look() is None
            time.sleep(look)
        os.kill(child, signal.SIGSTOP)
        stopped = time.monotonic()
        while not (finding := monitor.look()):
            time.sleep(look)
            assert time.monotonic() < stopped + 10 * window
        took = time.monotonic() - stopped
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not finding.symptom
    assert took <= 3 * window  # the borders themselves: test_a_detector_speaks_beyond_its_border
