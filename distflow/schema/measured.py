"""What a run shows of its nodes: on which rank they took how long, and for how much."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Taken:
    """What a node took on one rank in one step: seconds on the clock; its rows, the tokens of their prompts, and of
    those where a prompt that rows share counts once; the tokens of their responses, and of the longest one."""

    seconds: float = 0.0
    rows: int = 0
    prompt: int = 0
    read: int = 0
    response: int = 0
    longest: int = 0

    def add(self, other: Taken) -> None:
        """A further draw of the same step."""
        self.seconds += other.seconds
        self.rows += other.rows
        self.prompt += other.prompt
        self.read += other.read
        self.response += other.response
        self.longest = max(self.longest, other.longest)
