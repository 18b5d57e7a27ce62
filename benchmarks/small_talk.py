"""A tool and a reward for a model that has learned nothing: they tell its answers apart by their length."""

from __future__ import annotations

import asyncio
import time

from distflow import Turn, environment, reward


@environment(safe=True)
class PatientTool:
    """Takes a moment for each of three turns, so that each step waits for tools."""

    def __init__(self, question: str):
        self.turns = 0

    async def step(self, text: str) -> Turn:
        self.turns += 1
        await asyncio.sleep(0.05)
        return Turn(f"{len(text)} letters", done=self.turns == 3, reward=1 / (1 + len(text)))


@environment(safe=True)
class Counted:
    """Counts five turns: it is brought to where it stood by the same steps."""

    def __init__(self, question: str):
        self.turns = 0

    async def step(self, text: str) -> Turn:
        self.turns += 1
        await asyncio.sleep(0.2)
        return Turn(f"{self.turns}: {len(text)} letters", done=self.turns == 5, reward=1 / (1 + len(text)))


@environment(safe=True)
class Restored(Counted):
    """The same by its snapshot; steps that were repeated would count wrongly."""

    def snapshot(self) -> int:
        return self.turns

    def restore(self, state: int) -> None:
        self.turns = state


@environment(safe=True, stateless=True)
class Forgetful:
    """Knows no turn but the one that it answers; the conversation ends by its limit."""

    def __init__(self, question: str):
        self.question = question

    async def step(self, text: str) -> Turn:
        await asyncio.sleep(0.2)
        return Turn(f"{len(text)} letters", reward=1 / (1 + len(text)))


@reward
def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


@reward
def patient_brevity(completion: str) -> float:
    time.sleep(0.05)
    return brevity(completion)
