"""What is physical: models, data, engines, layouts, steps. Says nothing about the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from distflow.schema.document import Document
from distflow.schema.robust import Fault, Robust


class Model(Document):
    """A Hugging Face model folder (`model: path` for short), or a tiny architecture that starts from random weights."""

    path: str | None = None
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_moe"] | None = None
    layers: PositiveInt = 3
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: int = Field(default=32, ge=32, multiple_of=2)
    """vLLM's attention on CPU knows no smaller one; rotary embeddings turn pairs."""
    max_positions: PositiveInt = 256
    experts: PositiveInt | None = None
    """Of each layer of a qwen3_moe (default: 8)."""
    experts_per_token: PositiveInt | None = None
    """How many of them compute for a token (default: 2), each with as much less width as makes up for it."""

    @property
    def mixture(self) -> tuple[int, int] | None:
        """Experts of a layer, and how many of them a token has; None for a tiny architecture without."""
        return (self.experts or 8, self.experts_per_token or 2) if self.architecture == "qwen3_moe" else None

    @property
    def sees(self) -> bool:
        """Whether a tiny architecture takes images."""
        return self.architecture == "qwen3_vl"

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("give either the path of a model folder or an `architecture`")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}), so that each "
                             "key-value head serves equally many")
        if (self.experts or self.experts_per_token) and not self.mixture:
            raise ValueError("`experts` and `experts_per_token` are for  architecture: qwen3_moe")
        if self.mixture and self.mixture[1] > self.mixture[0]:
            raise ValueError("a token cannot have {1} of {0} experts; lower experts_per_token".format(*self.mixture))
        return self


class Generation(Document):
    """How a role samples. Log-probabilities are computed at this temperature everywhere."""

    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: NonNegativeInt = 0
    batch_rows: PositiveInt = 512
    """Rows that generate at the same time on one rank."""
    memory_share: float = Field(default=0.5, gt=0, le=1)
    """Of a GPU's memory, what vLLM and SGLang may take for weights and caches while they are awake."""
    batch_invariant: bool = False
    """Kernels whose result for a row does not depend on the other rows, where the library has them; slower."""


class Lora(Document):
    """Low-rank adapters (Hu et al. 2021) are trained instead of the model's own weights, which stay as they are.

    What they add to a layer is scaled by alpha / rank, or with `rslora` by alpha / √rank (Kalajdzievski 2023).
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32
    targets: list[str] = Field(default=["all-linear"], min_length=1)
    """The linear layers that get adapters, by the last parts of their names; `all-linear`: all but the output layer."""
    rslora: bool = False

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RoleRun(Document):
    """The model, the engines and the optimizer of one role."""

    model: Model | None = None
    lora: Lora | None = None
    """Adapters of a trained role; without them its whole model is trained."""
    engine: Literal["fsdp", "megatron"] = "fsdp"
    """The library that trains and infers."""
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    """The library that samples."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass; master weights and reductions stay float32. auto: bfloat16 on GPU, float32 on CPU."""
    swap: bool = False
    """Whether what only training needs is in host memory while the role samples, and what only sampling needs is given
    back while it trains."""
    replicas: PositiveInt = 1
    """How many times training has the model (HSDP): each copy lies in shards on dp / replicas ranks, as a machine's."""
    offload: bool = False
    """Whether training keeps weights, gradients and optimizer in host memory, and a layer comes when it computes."""
    recompute: bool = False
    """Whether a layer's activations are made anew in the backward pass instead of being kept."""
    compile: bool = False
    """Whether training compiles what layers have beside attention (torch.compile); the first steps are slow."""
    micro_batch_tokens: PositiveInt = 16384
    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    max_grad_norm: PositiveFloat = 1.0
    generation: Generation = Generation()


class Data(Document):
    """The training set: a .jsonl or .parquet file, or a folder that `datasets` saved."""

    train: str
    batch: PositiveInt = 32
    """Prompts of a step, over all ranks. Any number works with any number of ranks."""
    question: str = "question"
    answer: str = "answer"
    columns: list[str] = []
    """Further text fields that nodes may read, by their own names."""
    images: str | None = None
    """A field with what a question shows: the path of an image (from the data file on), {bytes, path}, or a list of
    these. Each stands where the question says <image>; without that, all stand before it."""
    max_prompt_tokens: PositiveInt = 1024
    max_target_tokens: PositiveInt = 1024


class Validation(Document):
    """Greedy answers to problems that are not trained on."""

    data: dict[str, str] = Field(min_length=1)
    every: PositiveInt = 20
    reward: Any = "math"
    """As that of a `score` node: see `distflow.schema.recipe`."""
    stop_at: float | None = None
    """End the run as soon as the first set's mean reward reaches this."""


class Checkpoint(Document):
    """`every` 0: no checkpoints; `keep`: how many of the newest stay on disk."""

    every: NonNegativeInt = 50
    keep: PositiveInt = 2


class Parallel(Document):
    """How a node's ranks split its work. Default: all ranks of the run, data-parallel.

    A model's nodes may split it too: `tp` ways within each layer, `pp` ways by layers, `cp` ways along the tokens; `ep`
    ways by experts, over the ranks of `dp` and `cp`. `rows` gives unlike ranks unlike parts of the work: one number for
    each share, in proportion, as [2, 1]; default: as much for each.
    """

    dp: PositiveInt | None = None
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    rows: list[NonNegativeInt] = []

    @field_validator("rows")
    @classmethod
    def _some(cls, value: list[int]) -> list[int]:
        if value and not any(value):
            raise ValueError("no share has rows. Give one number for each share, in proportion, as [2, 1]")
        return value


class Groups(Document):
    """How the ranks are divided where training and sampling do not share them."""

    rollout: float = 0.5
    """Ranks that sample, or their share of all. The others train."""

    @field_validator("rollout")
    @classmethod
    def _ranks_or_share(cls, value: float) -> float:
        if 0 < value < 1 or (value >= 1 and value == int(value)):
            return value if value < 1 else int(value)
        raise ValueError(f"{value:g} is neither a number of ranks, as 2, nor a share of them, as 0.5")


class Run(Document):
    """Everything that a run needs beside its DAG."""

    steps: PositiveInt
    data: Data
    roles: dict[str, RoleRun] = {}
    seed: int = Field(default=0, ge=0, lt=2**64)
    ranks: PositiveInt | None = None
    """How many ranks `distflow run` and `distflow plan` take by default; under torchrun its count stands."""
    mode: Literal["sync", "semi_sync", "async"] = "sync"
    """sync: all ranks sample and then train, together. async: some sample, the others train, each at its own pace.
    semi_sync: as async, but those that train sample too, until enough is there (`switch_at`)."""
    groups: Groups = Groups()
    staleness: NonNegativeInt = 1
    """By how many steps the weights that sampled a token may be older than those that train on it (mode async). With 0,
    training waits for samples of its newest weights, as in mode sync. (`staleness/max` of the metrics counts optimizer
    steps, of which a node with several mini-batches makes several.)"""
    on_new_weights: Literal["continue", "restart"] = "continue"
    """What happens to unfinished rows when new weights come (mode async): their next tokens are sampled with these, or
    the turn that is under way begins anew."""
    switch_at: float = Field(default=0.5, gt=0, le=1)
    """Ranks that do both go over to training (mode semi_sync) once the samples of so many prompts wait for it, as a
    share of a step's, of whichever steps they are."""
    fuse: bool = True
    """Whether ranks that train compute what needs no whole step, such as log-probabilities of the reference, of the
    prompts that are done while others are still sampled (modes async and semi_sync)."""
    transport: Literal["auto", "memory", "ucx", "tcp"] = "auto"
    """How weights travel to those that sample (mode async): through shared memory, within a machine; by UCX
    (`distflow[ucx]`); by TCP. auto: the first of these that both ends can use; events.jsonl says which."""
    layouts: dict[str, Parallel] = {}
    validation: Validation | None = None
    checkpoint: Checkpoint = Checkpoint()
    robust: Robust = Robust()
    faults: list[Fault] = []
    output: str = "runs"
    samples: NonNegativeInt = 4
    """Rows that samples.jsonl gets each step."""
    trajectories: NonNegativeInt = 16
    """Rows of each step and rank whose turns are written to trajectories/, for nodes that converse."""
    wait_limit: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds that a collective may wait for the slowest rank, and in modes async and semi_sync the trainer for the
    samples of a draw, before the run stops and says who is missing."""
