"""Runs an agent: a command of the user's own that drives a conversation with the model through the endpoint.

It is an environment whose only step is the whole command, so that its child process, its time limit, its memory limit
and the blame for its end are those of environments (`workers.isolation.env_pool`).
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from typing import IO

from distflow.contracts.decorators import Turn, environment
from distflow.telemetry.processes import kill_descendants
from workers.isolation.rewards_worker import LARGEST

_TAIL = 4000  # bytes that are kept of what a command prints, counted from its end
_SHOWN = 300  # characters of it in the reason of a failure
_DRAIN = 1.0  # seconds to read the rest of what an ended command has printed


@environment
class AgentCommand:
    """`step` gets the environment variables to add, as JSON; its turn shows the end of what the command printed."""

    def __init__(self, command: str, *, printed_reward: bool):
        """`command` is a JSON list of words. `printed_reward`: its last line says the reward."""
        self.command, self.printed_reward = json.loads(command), printed_reward

    def step(self, text: str) -> Turn:
        variables = os.environ | json.loads(text)
        for name in ("NO_PROXY", "no_proxy"):  # a proxy could not reach the endpoint
            variables[name] = ",".join(filter(None, [variables.get(name, ""), "127.0.0.1"]))
        process = subprocess.Popen(self.command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        assert process.stdout
        assert process.stderr
        tails = [_Tail(process.stdout), _Tail(process.stderr)]
        code = process.wait()
        kill_descendants(os.getpid())  # what it has left running
        printed, said = (tail.read() for tail in tails)
        if code:
            raise RuntimeError(f"its command ended with {f'code {code}' if code > 0 else f'signal {-code}'}: "
                               f"{(said or printed)[-_SHOWN:].strip()}")
        return Turn(printed, done=True, reward=_reward(printed) if self.printed_reward else 0.0)


class _Tail:
    """Reads a pipe in a thread, so that its writer never waits, and keeps the end."""

    def __init__(self, pipe: IO[bytes]):
        self.pipe, self.kept = pipe, b""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while data := os.read(self.pipe.fileno(), 1 << 16):
            self.kept = (self.kept + data)[-_TAIL:]

    def read(self) -> str:
        self.thread.join(_DRAIN)
        return self.kept.decode(errors="replace")


def _reward(printed: str) -> float:
    last = next(iter(printed.strip().splitlines()[-1:]), "")
    try:
        found = json.loads(last)
        reward = float(found["reward"])
        if abs(reward) <= LARGEST:
            return reward
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise ValueError(f'the last line that its command printed must be  {{"reward": NUMBER}}  and is {last[-100:]!r}. '
                     "Or let a later node give the reward:  printed_reward: false")
