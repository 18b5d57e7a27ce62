"""Says what a run does before its first step, and for how long, so that a start of minutes is no silence."""

from __future__ import annotations

import os
import time

from distflow.telemetry.events import show
from distflow.telemetry.processes import began

_REMINDERS = 10.0  # seconds of one phase after which it is named again, then twice as many, and so on


class Startup:
    """Phases of a start, with the seconds since its torchrun was started. Silent until `begin`."""

    def __init__(self) -> None:
        self.title, self.phase = "", ""
        self.started = self.phase_began = 0.0
        self.remind_after = _REMINDERS

    def begin(self, title: str) -> None:
        """Speak from now on, unless torchrun has started all processes again."""
        if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            self.title, self.started = title, _began_at(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else
                                                        os.getpid())

    def enter(self, phase: str) -> None:
        if self.title:
            self.phase, self.phase_began, self.remind_after = phase, _now(), _REMINDERS
            show(f"{self.title}: {phase} …  ({_now() - self.started:.0f} s since the start)")

    def remind(self) -> None:
        """Name a phase again that takes long."""
        if self.phase and _now() - self.phase_began >= self.remind_after:
            self.remind_after *= 2
            show(f"{self.title}: {self.phase} …  ({_now() - self.started:.0f} s since the start)")

    def end(self) -> None:
        self.title = self.phase = ""


_startup = Startup()


def current() -> Startup:
    return _startup


def _now() -> float:
    """Return the seconds since the machine has started, as /proc counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _began_at(process: int) -> float:
    return began(process) / os.sysconf("SC_CLK_TCK")
