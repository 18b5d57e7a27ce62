"""Interface of engines that train and infer, whichever library computes; micro-batches and learning-rate schedules."""

from __future__ import annotations

import math
import time
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
from distflow.config.sizes import Shape
from distflow.data.batch import Batch, Ragged
from distflow.errors import EngineError
from distflow.plan import Layout
from distflow.telemetry.metrics import current
from distflow.weights.fingerprint import Sums, sums_of
from workers.engines.devices import device_of, peak_of

LossOf = Callable[[Tensor, Tensor, Batch], Tensor]
"""(outputs of the head, micro-batch) → sum of weighted losses. A vocabulary head gives log-probabilities [T] of the
responses, or [T, K] of the `candidates` of the micro-batch, and entropies [T]; a value head the values [T] before each
token and the scores [B] of whole responses."""

_MOST = 0.5  # share of the gradient's squared norm from which on a layer's is reported


class Reader(ABC):
    """A role's model that says how likely, or how good, given responses are. Methods are collective, see `Trainer`."""

    @abstractmethod
    def infer(self, prompts: Ragged, responses: Ragged, temperature: float = 1.0, images: Ragged | None = None,
              routed_experts: Ragged | None = None, top: int = 0) -> tuple[Tensor, Tensor]:
        """Return what the model's head gives for T response tokens of B rows, on the CPU, and placeholders' behind it.
        A vocabulary head: log-probabilities [T] and entropies [T], or with `top` the most probable tokens [T, top] and
        their log-probabilities. A value head: values before each token [T], and scores of whole responses [B].

        `routed_experts`: the experts that the routers choose, see `workers.engines.routing`. Raises EngineError: the
        engine does not compute this.
        """

    def logprobs(self, prompts: Ragged, responses: Ragged, temperature: float, images: Ragged | None = None,
                 routed_experts: Ragged | None = None) -> Ragged:
        """Return the log-probability of each response token, float32, shaped like `responses`."""
        return _of_tokens(responses, self.infer(prompts, responses, temperature, images, routed_experts)[0])

    def entropies(self, prompts: Ragged, responses: Ragged, temperature: float, images: Ragged | None = None,
                  routed_experts: Ragged | None = None) -> Ragged:
        """Return the entropy of the distribution of each response token, float32, in nats, shaped like `responses`."""
        return _of_tokens(responses, self.infer(prompts, responses, temperature, images, routed_experts)[1])

    def top_logprobs(self, prompts: Ragged, responses: Ragged, temperature: float, count: int,
                     images: Ragged | None = None) -> tuple[Ragged, Ragged]:
        """Return the `count` most probable tokens at each place of a response (int32 [count], the most probable first)
        and their log-probabilities (float32)."""
        tokens, logprobs = self.infer(prompts, responses, temperature, images, top=count)
        return _of_tokens(responses, tokens), _of_tokens(responses, logprobs)

    def values(self, prompts: Ragged, responses: Ragged) -> Ragged:
        """Return the value before each response token, float32, shaped like `responses`."""
        return _of_tokens(responses, self.infer(prompts, responses)[0])

    def scores(self, prompts: Ragged, responses: Ragged) -> Tensor:
        """Return [B] float32, the value at the end of each response."""
        return self.infer(prompts, responses)[1][: len(responses)]


def _of_tokens(responses: Ragged, found: Tensor) -> Ragged:
    return responses.with_values(found[: len(responses.values)])


class Trainer(Reader):
    """One role's model, spread over the ranks of its layout. Methods are collective: every rank calls them with the
    rows of its data-parallel share; ranks that split one copy of the model get the same results."""

    pads = False  # whether rows are computed as long as the longest of their micro-batch
    accumulates = True  # whether several calls of `accumulate` add up
    balances = False  # whether each row has a gradient besides its loss's: that of a load-balancing loss
    version = 0  # number of optimizer steps and restores since the engine was created
    dp_group: dist.ProcessGroup  # one rank of each data-parallel share: they hold each row once

    def __init__(self, settings: RoleRun, mesh: DeviceMesh, pad_token: int, steps: int):
        self.settings, self.mesh, self.pad_token, self.steps = settings, mesh, pad_token, steps
        self.device, self.shape = device_of(mesh), None
        self.layer_shares: dict[str, float] = {}  # metrics of the step's gradient
        self.shape: Shape | None  # of a model whose FLOPs are known
        self.peak = peak_of(torch.cuda.get_device_name()) if mesh.device_type == "cuda" else None

    def update(self, batch: Batch, loss_of: LossOf, temperature: float, step: int,
               together: bool = False) -> dict[str, float]:
        """Take one optimizer step; return `grad_norm` before clipping, `learning_rate`, and the share of a layer that
        has most of the gradient.

        `batch` has this rank's rows: `prompts`, `responses`, perhaps `images`, `routed_experts` and `candidates` (other
        tokens, [K] at each place of a response, whose log-probabilities are wanted), and what `loss_of` needs, whose
        losses are summed over micro-batches and shares. `together` keeps consecutive rows of one id in one micro-batch.
        Raises EngineError: the gradient is not finite; the weights are left as they were.
        """
        began = time.perf_counter()
        self.accumulate(batch, loss_of, temperature, together)
        try:
            result = self.step(step)
        except EngineError as error:
            raise EngineError(f"{error}{_not_finite(batch)}") from None
        if self.shape and self.peak:
            share = self.peak * (self.mesh.size() // dist.get_world_size(self.dp_group)) * (time.perf_counter() - began)
            current().mean("mfu", update_flops(self.shape, batch, self.settings.lora is not None), share)
        return result

    def accumulate(self, batch: Batch, loss_of: LossOf, temperature: float, together: bool = False) -> None:
        """Compute the gradient that the next `step` applies, see `update`; it is added to that of earlier calls, where
        the engine `accumulates`."""
        self._accumulate(self._micro_batches(batch, together), loss_of, temperature)

    def step(self, step: int, rate: float | None = None) -> dict[str, float]:
        """Apply the gradient, see `update`. `rate`: the learning rate in place of the schedule's."""
        rate = self.settings.learning_rate * schedule(self.settings, step, self.steps) if rate is None else rate
        norm = self._step(rate)
        if not math.isfinite(norm):
            raise EngineError(f"the gradient norm of optimizer step {step + 1} is {norm}; the weights are left as they "
                              "were. Look at the rewards and log-probabilities of this step, or lower learning_rate.")
        self.version += 1
        return {"grad_norm": norm, "learning_rate": rate, **self.remembered(), **self.layer_shares}

    @staticmethod
    @abstractmethod
    def make_groups(layout: Layout, settings: RoleRun) -> None:
        """Make the process groups of an engine with this layout. Collective over all ranks, with an engine or not."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard the gradient that is not applied."""

    @abstractmethod
    def _accumulate(self, micros: list[Batch], loss_of: LossOf, temperature: float) -> None:
        """Compute the gradient of the sum of all losses."""

    @abstractmethod
    def _step(self, rate: float) -> float:
        """Clip the gradient and apply it, unless its norm is not finite; return its norm before clipping."""

    def remembered(self) -> dict[str, float]:
        """Return how many updates the optimizer's moments remember, and which share of the weights the last one has
        moved, where the engine knows it."""
        return {}

    def note_layers(self, squares: Mapping[str, float]) -> float:
        """Note the layer whose gradient is most of all; return the norm of all. `squares`: of norms, by layer."""
        total = sum(squares.values())
        shares = {layer: each / total for layer, each in squares.items() if each > _MOST * total}
        self.layer_shares = {f"gradient/share_of_layer/{layer}": share for layer, share in shares.items()}
        return math.sqrt(total)

    @abstractmethod
    def export(self, dtype: torch.dtype | None = None,
               into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights as whole tensors by Hugging Face name; see
        `distflow.weights.reshard.gather_tensors`."""

    def shards(self) -> Mapping[str, Tensor]:
        """Return this rank's part of the trained weights: DTensors, or tensors that no other rank has. Collective."""
        ranks = self.mesh.mesh.flatten().tolist()
        mine, number = ranks.index(dist.get_rank()), len(ranks)
        return {name: whole.clone() for index, (name, whole) in enumerate(self.export()) if index % number == mine}

    def sums(self, dtype: torch.dtype) -> Sums:
        """Return the checksums of the trained weights in a dtype, see `distflow.weights.fingerprint`. Collective."""
        return sums_of(self.export(dtype), dtype)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the sharded training state for torch.distributed.checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, possibly of another layout."""

    @abstractmethod
    def resident(self, weights: bool = True) -> Iterable[Tensor]:
        """Yield this rank's unshared tensors between two steps: optimizer state and, with `weights`, shards of what is
        trained, or of a frozen role's model."""

    def scratch(self) -> Iterable[Tensor]:
        """Yield tensors that stay allocated between two steps though their contents are not needed."""
        return ()

    @property
    def reports(self) -> bool:
        """Whether this rank reports for its share; only the last pipeline stage has losses."""
        mesh = self.mesh
        if not mesh.mesh_dim_names:
            return True
        tp, cp, pp = (mesh[name] for name in ("tp", "cp", "pp"))
        return tp.get_local_rank() == cp.get_local_rank() == 0 and pp.get_local_rank() == pp.size() - 1

    def total(self, values: Tensor) -> Tensor:
        """Sum over all data-parallel shares; the result is on the CPU."""
        values = values.to(self.device)
        dist.all_reduce(values, group=self.dp_group)
        return values.cpu()

    def _micro_batches(self, batch: Batch, together: bool = False) -> list[Batch]:
        """Cut rows by the token budget, evenly, and into equally many pieces on every rank: passes are collective."""
        tokens = batch["prompts"].lengths + batch["responses"].lengths
        sizes = torch.unique_consecutive(batch.ids, return_counts=True)[1] if together else torch.ones_like(tokens)
        row_of, how = Ragged(tokens, sizes).row_of, "amax" if self.pads else "sum"
        needed = torch.zeros_like(sizes).scatter_reduce_(0, row_of, tokens, how).tolist()
        budget, counts = self.settings.micro_batch_tokens, sizes.tolist() if self.pads else None
        count = torch.tensor(max(len(cuts(needed, budget, counts)), 1), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self.dp_group)
        rows = [0, *sizes.cumsum(0).tolist()]
        pieces = [batch.slice(rows[start], rows[stop]) for start, stop in even_cuts(needed, budget, int(count), counts)]
        return pieces + [_placeholder(self.pad_token, "images" in batch.columns)] * (int(count) - len(pieces))


def update_flops(shape: Shape, batch: Batch, adapters: bool = False) -> float:
    """Return the model FLOPs of an update, three forward passes (with `adapters` two: no gradient is needed of frozen
    weights). A prompt counts once for the consecutive rows of one id."""
    prompts, responses = (batch[name].lengths.double() for name in ("prompts", "responses"))
    first = torch.ones(len(prompts), dtype=torch.bool)
    first[1:] = batch.ids[1:] != batch.ids[:-1]
    alone, seen = prompts[first], responses * prompts + responses * (responses + 1) / 2
    seen_alone = (alone * (alone + 1) / 2).sum()
    passes = 2 if adapters else 3
    return passes * shape.forward_flops(float(alone.sum()), float(responses.sum()), float(seen.sum() + seen_alone))


def cuts(needed: Sequence[int], cap: int, counts: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Cut a sequence into (start, stop) pieces of at most `cap` in sum; a larger item stands alone. With `counts`, rows
    of an item, rows are padded: `needed` is the longest row of an item, and a piece takes that of its longest row for
    each of its rows."""
    edges, used, rows, longest = [0], 0, 0, 0
    for index, more in enumerate(needed):
        after = used + more if counts is None else (rows + counts[index]) * max(longest, more)
        if used and after > cap:
            edges.append(index)
            rows = longest = 0
            after = more if counts is None else counts[index] * more
        used, longest = after, max(longest, more)
        rows += counts[index] if counts else 0
    return list(pairwise([*edges, len(needed)])) if needed else []


def even_cuts(needed: Sequence[int], cap: int, count: int,
              counts: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return `cuts` by the smallest cap that gives at most `count` pieces."""
    cap = bisect_left(range(cap), True, key=lambda less: len(cuts(needed, less, counts)) <= count)
    return cuts(needed, cap, counts)


def schedule(settings: RoleRun, step: int, steps: int) -> float:
    """Return the learning rate's factor at `step` (from 0) of `steps`: linear warm-up, then decay to its minimum in the
    last step, or if that is 0 in the step after it, so that the last one trains too."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    end = steps - 1 if settings.min_learning_rate else steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    if settings.schedule == "constant":
        return 1.0
    left = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    least = settings.min_learning_rate / settings.learning_rate
    return least + (1.0 - least) * left


def schedule_notes(name: str, before: RoleRun, after: RoleRun, done: int, steps: tuple[int, int]) -> Iterator[str]:
    """Yield what a run that is resumed after `done` steps does otherwise than one may think, with other settings of the
    role `name` or other `steps` than it had, as (before, after): schedules count from the run's first step."""
    stretched = steps[0] != steps[1] and "constant" not in (before.schedule, after.schedule)
    if done > 0 and (stretched or before.learning_rate == after.learning_rate):
        old, due, new = (role.learning_rate * schedule(role, step, total) for role, step, total in (
            (before, done - 1, steps[0]), (before, done, steps[0]), (after, done, steps[1])))
        settings = ["schedule=constant", *["min_learning_rate=0"] * bool(after.min_learning_rate),
                    *["warmup_steps=0"] * (after.warmup_steps > done), f"learning_rate={old:g}"]
        keep = " ".join(f"--set roles.{name}.{setting}" for setting in settings)
        if not math.isclose(new, due) and not math.isclose(new, old):
            yield f"the learning rate of role `{name}` was {old:g} in step {done} and is {new:g} in step {done + 1}: " \
                  f"{_what_differs(before, after, steps)} To keep the rate as it was:  {keep}"
    if before.warmup_steps < after.warmup_steps <= done:
        yield f"role `{name}` has no warm-up from here: its {after.warmup_steps} steps are counted from the run's first"
    if before.lora and after.lora and before.lora.alpha != after.lora.alpha:
        yield f"`alpha` of role `{name}` is {after.lora.alpha:g} and was {before.lora.alpha:g}: what its adapters " \
              f"have learned so far counts {after.lora.alpha / before.lora.alpha:g} times as much"


def _what_differs(before: RoleRun, after: RoleRun, steps: tuple[int, int]) -> str:
    """Return sentences on why a resumed run has another learning rate; `steps` of a constant schedule do not count."""
    constant = before.schedule == after.schedule == "constant"
    settings = ["warmup_steps", *["min_learning_rate"] * (not constant)]
    names = [name for name in settings if getattr(before, name) != getattr(after, name)]
    if names and before.schedule == after.schedule and (steps[0] == steps[1] or constant):
        changes = " and ".join(f"`{name}` is {getattr(after, name)} and was {getattr(before, name)}" for name in names)
        return f"{changes}, counted from the run's first step." if names == ["warmup_steps"] else f"{changes}."
    return f"its {after.schedule} schedule now lasts {steps[1]} steps, counted from the run's first one. It was " \
           f"{before.schedule}, of {steps[0]} steps."


def _placeholder(pad_token: int, with_images: bool) -> Batch:
    one = Ragged(torch.tensor([pad_token]), torch.tensor([1]))
    none = {"images": Ragged(torch.empty(0), torch.tensor([0]))} if with_images else {}
    return Batch(torch.tensor([-1]), {"prompts": one, "responses": one, **none})


def _not_finite(batch: Batch) -> str:
    """Return a sentence that names a column of this rank's rows that is not finite where it is trained, or ""."""
    mask = batch.columns.get("mask")
    for name, column in batch.columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if not values.is_floating_point():
            continue
        bad = ~torch.isfinite(values)
        if isinstance(column, Ragged) and isinstance(mask, Ragged) and len(mask.values) == len(bad):
            bad &= mask.values.bool()
        if bad.any():
            places = bad.flatten(1).any(1) if bad.dim() > 1 else bad
            rows = column.row_of[places].unique() if isinstance(column, Ragged) else places.nonzero()
            return f" `{name}` is {values[bad][0].item()} in {len(rows)} of this rank's {len(batch)} rows."
    return ""


def is_placeholder(micro: Batch) -> bool:
    return bool(micro.ids[0] < 0)
