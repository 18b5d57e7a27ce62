"""What every engine that trains and infers offers, whichever library computes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distflow.config.run import RoleRun
from distflow.data.batch import Batch, Ragged

LossOf = Callable[[Tensor, Tensor, Batch], Tensor]
"""What the head gives and the micro-batch's rows → the sum of weighted losses. A vocabulary gives log-probabilities [T]
and entropies [T], a value head the values [T] before each token and the scores [B] of whole responses."""


class Trainer(ABC):
    """One role's model, spread over the ranks of its layout.

    Its methods are collective: every rank calls them, with the rows of its share. Ranks of one share (those that split
    the model between them) bring the same rows and get the same results.
    """

    settings: RoleRun
    mesh: DeviceMesh
    device: torch.device
    pad_token: int
    steps: int
    version: int
    """Of the weights: how often they have changed since this engine was made, by optimizer steps and restores."""
    shares: dist.ProcessGroup
    """The ranks that have one row each between them: one of each share, this one among them."""

    @abstractmethod
    def logprobs(self, prompts: Ragged, responses: Ragged, temperature: float, images: Ragged | None = None) -> Ragged:
        """The log-probability of each response token, float32, in the form of `responses`."""

    @abstractmethod
    def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """The value before each response token, float32, in the form of `responses`."""

    @abstractmethod
    def scores(self, prompts: Ragged, responses: Ragged) -> Tensor:
        """[B] float32: the value at the end of each response."""

    @abstractmethod
    def update(self, batch: Batch, loss_of: LossOf, temperature: float, step: int,
               together: bool = False) -> dict[str, float]:
        """One optimizer step.

        Args:
            batch: this rank's rows; `prompts`, `responses`, perhaps `images`, and whatever `loss_of` needs.
            loss_of: called for each micro-batch; its results are summed over micro-batches and shares, so that
                the gradient does not depend on how the rows are divided.
            step: for the learning-rate schedule.
            together: rows of one id, which follow each other, stay in one micro-batch: their losses are not apart.

        Returns:
            gradient norm before clipping, and learning rate.

        Raises:
            EngineError: the gradient is not finite; the weights are left as they were.
        """

    @abstractmethod
    def export(self, dtype: torch.dtype | None = None,
               into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """What training changes, as whole tensors by their Hugging Face names: see `distflow.weights.reshard.gathered`.
        """

    def shards(self) -> Mapping[str, Tensor]:
        """What this rank gives to those that pull the weights: its part of what training changes, as DTensors, or whole
        tensors that no other rank gives. Collective."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {name: whole.clone() for place, (name, whole) in enumerate(self.export()) if place % ranks == rank}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Sharded state for torch.distributed.checkpoint, of what training changes."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, perhaps on other ranks."""

    @abstractmethod
    def resident(self, weights: bool = True) -> Iterable[Tensor]:
        """This rank's tensors between two steps: optimizer state, and `weights`; those that another engine shares
        excepted."""

    def scratch(self) -> Iterable[Tensor]:
        """This rank's tensors that it keeps between two steps, though nothing of what is in them is needed."""
        return ()

    @property
    def speaks(self) -> bool:
        """Whether this rank reports for its share: the last stage of a pipeline is the one that sees losses."""
        mesh = self.mesh
        if not mesh.mesh_dim_names:
            return True
        at = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
        return at.get("tp", 0) == at.get("cp", 0) == 0 and at.get("pp", 0) == mesh["pp"].size() - 1

    def total(self, values: Tensor) -> Tensor:
        """The sum over all shares, on the CPU."""
        values = values.to(self.device)
        dist.all_reduce(values, group=self.shares)
        return values.cpu()

    def _micro_batches(self, batch: Batch, together: bool = False) -> list[Batch]:
        """Rows cut by the token budget, and as many pieces on every rank, since forward and backward are collective. A
        rank's pieces are as even as can be: one with fewer rows than others holds them up in none."""
        tokens = batch["prompts"].lengths + batch["responses"].lengths
        sizes = torch.unique_consecutive(batch.ids, return_counts=True)[1] if together else torch.ones_like(tokens)
        needed = torch.zeros_like(sizes).index_add_(0, Ragged(tokens, sizes).row_of, tokens).tolist()
        budget = self.settings.micro_batch_tokens
        count = torch.tensor(max(len(cuts(needed, budget)), 1), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.shares)
        rows = [0, *sizes.cumsum(0).tolist()]
        pieces = [batch.slice(rows[start], rows[stop]) for start, stop in even_cuts(needed, budget, int(count))]
        return pieces + [_placeholder(self.pad_token, "images" in batch.columns)] * (int(count) - len(pieces))


def cuts(needed: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Neighbours that need at most `cap` together, from one to before another; what needs more is alone."""
    edges, used = [0], 0
    for place, more in enumerate(needed):
        if used and used + more > cap:
            edges.append(place)
            used = 0
        used += more
    return list(pairwise([*edges, len(needed)])) if needed else []


def even_cuts(needed: Sequence[int], cap: int, count: int) -> list[tuple[int, int]]:
    """`cuts` by the smallest cap that gives at most `count` of them, as `cap` does."""
    return cuts(needed, bisect_left(range(cap), True, key=lambda less: len(cuts(needed, less)) <= count))


def schedule(settings: RoleRun, step: int, steps: int) -> float:
    """The factor of the learning rate at `step` (from 0) of `steps`: linear warm-up, then the schedule down to 0."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0


def _placeholder(pad_token: int, sees: bool) -> Batch:
    """A row that counts for nothing, for a rank that has fewer micro-batches than others."""
    one = Ragged(torch.tensor([pad_token]), torch.tensor([1]))
    none = {"images": Ragged(torch.empty(0), torch.tensor([0]))} if sees else {}
    return Batch(torch.tensor([-1]), {"prompts": one, "responses": one, **none})


def is_placeholder(micro: Batch) -> bool:
    """Whether the losses of a micro-batch count for nothing."""
    return bool(micro.ids[0] < 0)
