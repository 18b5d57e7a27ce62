"""How long a counter has stood still."""

import time

import pytest

from distflow.telemetry.heartbeat import Silence


@pytest.mark.parametrize(("pause", "after_an_hour"), [(5.0, 9.0), (3600.0, 3588.0)])
def test_silence_is_what_is_heard_and_not_how_often_one_asks(monkeypatch, pause, after_an_hour):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    silence = Silence(pause)
    for now[0], heard, seconds in ((1, "a 1", 0), (5, "a 1", 4), (9, "a 1", 8), (11.5, "a 1", 10.5), (12, "a 2", 0),
                                   (16, "a 2", 4), (3600, "a 2", after_an_hour), (3601, "a 2", after_an_hour + 1),
                                   (9999, "a 3", 0)):
        assert silence.of(heard) == seconds, now
