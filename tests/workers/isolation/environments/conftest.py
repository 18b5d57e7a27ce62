"""A module of users' environments, good and hostile ones, that processes can import."""

from __future__ import annotations

import contextlib
import sys

import pytest

from workers.isolation.env_pool import EnvFailure, EnvSettings
from workers.isolation.env_service import EnvService

SOURCE = '''
import asyncio, os, time
from pathlib import Path
from distflow import Turn, environment


@environment
class Counter:
    """Shows how often it was asked, and what it was asked."""
    def __init__(self, question):
        self.question, self.asked = question, 0

    def step(self, text):
        self.asked += 1
        return Turn(f"{self.question} {self.asked} {text} {os.getpid()}", done=text == "stop", reward=0.5)


@environment(safe=True)
class Shared(Counter):
    pass


@environment(safe=True)
class Alike(Counter):
    """Answers alike wherever its process is."""
    def step(self, text):
        self.asked += 1
        return Turn(f"{self.question} {self.asked} {text}", reward=0.5)


@environment(safe=True)
class Patient:
    """Waits for a word from outside, without keeping others of its process from working."""
    def __init__(self, question):
        self.question = question

    async def step(self, text):
        with open(f"{self.question}.asked", "a") as asked:
            asked.write(f"{text}\\n")
        while text == "wait" and not Path(self.question).exists():
            await asyncio.sleep(0.005)
        return Turn("at last", done=True, reward=1.0)


class Hostile:
    def __init__(self, question, *, places="."):
        self.question, self.places, self.said = question, Path(places), []

    def step(self, text):
        self.said.append(text)
        act = getattr(self, text, None)
        return act() if act else Turn(" ".join(self.said), reward=0.25)

    def sleep(self):
        time.sleep(3600)

    def ends_server(self):
        os.kill(os.getppid(), 9)
        time.sleep(3600)

    def raises(self):
        raise KeyError("no such tool")

    def odd(self):
        raise ValueError(self.question + chr(0xd800))

    def nonsense(self):
        return {"observation": "?"}

    def tensor(self):
        import numpy
        return Turn("", numpy.bool_(True), numpy.float32(0.5))

    def tensors(self):
        import numpy
        return Turn("", False, numpy.zeros(2))

    def infinite(self):
        return Turn(reward=float("nan"))

    def exit(self):
        raise SystemExit(0)

    def fork(self):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                (self.places / "written").write_text(str(os.getpid()))
                (self.places / "written").rename(self.places / "stray")
                time.sleep(3600)
            os._exit(0)
        time.sleep(3600)

    def garbage(self):
        for name in os.listdir("/proc/self/fd"):
            try:
                os.write(int(name), b"\\\\xc1garbage" * 100)
            except OSError:
                pass
        time.sleep(3600)

    def flood(self):
        return Turn("x" * (8 << 20))

    def once(self):
        """Fails the first time, whoever is asked."""
        try:
            (self.places / f"once-{self.question}").touch(exist_ok=False)
        except FileExistsError:
            return Turn(" ".join(self.said))
        os._exit(1)


@environment
class Unsafe(Hostile):
    pass


@environment(safe=True)
class Safe(Hostile):
    pass
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Yield the name of the module, which goes with the test."""
    (tmp_path / "my_tools.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_tools"
    sys.modules.pop("my_tools", None)


@pytest.fixture
def player():
    """`player(environment, settings, **marks)` returns a function that says a text for a row with some columns, and
    returns its turn."""
    with contextlib.ExitStack() as stack:
        def play(environment, settings, safe=False, coroutine=False, **marks):
            service = EnvService(
                EnvSettings(f"workers.isolation.environments.{environment}", settings, safe, coroutine, seconds=60.0,
                            **marks))
            stack.callback(service.close)
            pool = stack.enter_context(service.client())

            def say(row: int, text: str, **columns: str):
                pool.step(row, columns or {"question": "q"}, text)
                (of, turn), = pool.turns(60.0)
                assert of == row
                if isinstance(turn, EnvFailure) or turn.done:
                    pool.end(row)
                return turn

            return say

        yield play
