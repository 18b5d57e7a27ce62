"""Runs the model's Python programs in the sandbox."""

from __future__ import annotations

import asyncio

from pydantic import PositiveFloat, PositiveInt

from distflow.contracts.decorators import Turn, environment
from workers.isolation.environments import final_answer
from workers.isolation.rewards import behind_thoughts
from workers.isolation.rewards.programs import python_blocks
from workers.isolation.sandbox.runner import run_python


@environment(safe=True, together=64, stateless=True)
class PythonSandbox:
    """Runs the last fenced program of a turn and shows what it printed; a turn without one is the last.

    Each program runs in a new process. The last turn earns 1 if what follows its `####` is what follows the answer's,
    else 0. See `workers.isolation.sandbox.runner` for what the programs cannot do.
    """

    def __init__(self, answer: str, *, seconds: PositiveFloat = 5.0, memory_mib: PositiveInt = 512,
                 output: PositiveInt = 2000):
        """`seconds` and `memory_mib` that a program may take; characters of its `output` that are shown."""
        self.expected = answer.rpartition("####")[2].strip()
        self.seconds, self.memory_mib, self.output = seconds, memory_mib, output

    async def step(self, text: str) -> Turn:
        spoken, given = behind_thoughts(text), final_answer(text)
        programs = python_blocks(text if spoken is None else spoken)  # a `stop` may end a turn within its thoughts
        if not programs or given is not None:
            return Turn(done=True, reward=float(given == self.expected))
        done = await asyncio.to_thread(run_python, programs[-1], seconds=self.seconds, memory_mib=self.memory_mib)
        shown = done.stdout if done.ok else f"{done.stdout}{done.stderr}\n({_end(done.ended, self.seconds)})"
        return Turn(shown if len(shown) <= self.output else f"{shown[: self.output]}…")


def _end(ended: str, seconds: float) -> str:
    return {"time": f"ended after {seconds:g} s", "output": "ended, as it printed too much",
            "killed": "killed"}.get(ended, "it failed")
