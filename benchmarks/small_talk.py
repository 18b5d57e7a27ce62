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


@reward
def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


@reward
def patient_brevity(completion: str) -> float:
    time.sleep(0.05)
    return brevity(completion)
