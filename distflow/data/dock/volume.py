"""How many bytes the sample flow of one iteration moves, by formula (MindSpeed RL §"Problem Statement", Eq. 1, 2, 4).

The paper's formulas were rebuilt from its text and agree with every row of its Table 1 to the digits that it prints.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleFlow:
    """One iteration: `prompts` (G) with `responses` (N) each; lengths in tokens, `width` (B) bytes a value.

    `long_columns` (n) are as long as the response: its tokens, log-probabilities, and so on; `scalars` are single
    values per sample.
    """

    prompts: int
    responses: int
    prompt_tokens: int
    long_columns: int
    response_tokens: int
    scalars: int
    width: int = 4

    @property
    def samples(self) -> int:
        return self.prompts * self.responses

    @property
    def nbytes(self) -> int:
        """Moved by the last three steps of an iteration, all together: G·N·B·(3·n·S + 2·P + 3·scalars) (Eq. 2)."""
        long = 3 * self.long_columns * self.response_tokens
        return self.samples * self.width * (long + 2 * self.prompt_tokens + 3 * self.scalars)

    def through_each_warehouse(self, warehouses: int, controllers: int) -> float:
        """Bytes through one of `warehouses`: its share of the rows, and their metadata to all `controllers` (Eq. 4).

        Metadata are the sample's scalars, sent once to every controller.
        """
        metadata = self.samples * self.width * self.scalars * controllers
        return (self.nbytes + metadata) / warehouses

    def seconds(self, bytes_per_second: float, warehouses: int = 1, controllers: int = 0) -> float:
        """What moving it takes if each warehouse sends and receives `bytes_per_second` in all."""
        return self.through_each_warehouse(warehouses, controllers) / bytes_per_second
