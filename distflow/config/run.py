"""Run files: models, data, engines, layouts, steps, checkpoints and recovery; nothing of the algorithm."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distflow.config.extras import require_file_system
from distflow.config.groups import Groups
from distflow.config.loggers import LoggerSettings, loggers_of, require_logger
from distflow.config.robust import Fault, Robust
from distflow.config.yaml_source import Document
from distflow.plan import SHARES_OUTERMOST, RankOrder

Backend = Literal["auto", "nccl", "gloo", "ucc"]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text, or a list of them."""


def fields_by_column(value: Any) -> Any:
    """Return a list of fields by the names of their columns, each the last part of a dotted name; anything else as it
    is. Raises ValueError: two would have the same name."""
    fields = [value] if isinstance(value, str) else value
    if not isinstance(fields, list):
        return value
    columns: dict[str, str] = {}
    for field in fields:
        name = str(field).rpartition(".")[2]
        if columns.setdefault(name, field) != field:
            named = ", ".join(f"{each.replace('.', '_')}: {each}" for each in (columns[name], field))
            raise ValueError(f"two fields would both be column `{name}`. Name them:  columns: {{{named}}}")
    return columns


def rows_or_all(value: Any) -> Any:
    """Return a number of rows, or `all`. Raises ValueError."""
    if value == "all" or type(value) is int and value >= 0:
        return value
    raise ValueError(f"{value!r} is neither a number of rows, as 4, nor `all`")


def address(value: Any) -> Any:
    """Return the address at which a server listens, as HOST:PORT with port 0 for a free one. Raises ValueError."""
    if not isinstance(value, str):
        if value in ({}, {"host": "127.0.0.1", "port": 0}):  # as older versions have written it
            return "127.0.0.1:0"
        if isinstance(value, dict):
            raise ValueError("it is an address. Instead:  training_api: localhost")
        return value
    try:
        url = urlsplit(f"//{value}")
        host, port = url.hostname, url.port or 0
    except ValueError as error:
        raise ValueError(f"`{value}` is no address: {error}. Instead:  training_api: localhost") from None
    if not host or host.isdecimal() or "@" in value or url.netloc != value:
        raise ValueError(f"`{value}` is no address, which is a host, or HOST:PORT. Instead:  training_api: "
                         "localhost:8000")
    return f"{f'[{host}]' if ':' in host else host}:{port}"


class Model(Document):
    """A Hugging Face model (`model: path` for short), or a tiny architecture with random weights."""

    path: str | None = None
    """A Hugging Face folder, or a name on the hub: Qwen/Qwen3-0.6B, or Qwen/Qwen3-0.6B@REVISION. `arithmetic_sft` is
    shipped."""
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_moe"] | None = None
    """A tiny model of this family with random weights. The keys below are its sizes."""
    layers: PositiveInt = 3
    """Number of layers."""
    hidden: PositiveInt = 128
    """Width of a token's hidden state."""
    heads: PositiveInt = 4
    """Attention heads of a layer. vLLM on a CPU needs `hidden` to be 32 times as much or more."""
    kv_heads: PositiveInt = 2
    """Key and value heads of a layer, a divisor of `heads`."""

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def mixture(self) -> tuple[int, int] | None:
        """Experts of a layer, and those of a token; None for a dense architecture."""
        return (8, 2) if self.architecture == "qwen3_moe" else None

    @property
    def takes_images(self) -> bool:
        """Whether a tiny architecture takes images."""
        return self.architecture == "qwen3_vl"

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_both(self) -> Model:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("give either the path of a model folder or an architecture, as  {architecture: qwen3}")
        sizes = [name for name, field in type(self).model_fields.items()
                 if name not in ("path", "architecture") and getattr(self, name) != field.default]
        if self.path and sizes:
            raise ValueError(f"`{sizes[0]}` is a size of a tiny `architecture`; the folder of a model says its own "
                             "sizes. Take it out")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of 2 × heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}), so that each "
                             "key-value head serves equally many")
        return self


class Generation(Document):
    """How a role samples. Log-probabilities are computed at this temperature, too."""

    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Divisor of the logits; 0: always the most probable token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens up to this total probability."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most probable tokens; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the highest probability. Not with `rollout: sglang`."""
    stop: Texts = []
    """Texts that end a response. They stay in it and are trained. Not with `rollout: sglang`."""
    batch_rows: PositiveInt = 512
    """Rows that a rank samples at once. With 1, nodes are not fused, and `rollout: hf` on a CPU samples a row bit for
    bit the same in any company."""
    memory_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a GPU's memory for vLLM or SGLang while it is awake."""
    routing_replay: bool = False
    """Train a mixture with the experts that its rollout chose for each token (R3, Ma et al. 2025)."""
    cuda_graphs: bool = True
    """Capture decoding as CUDA graphs; `rollout: hf` only for dense models without windows or images."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once. Take it out")
        return value


class Lora(Document):
    """Low-rank adapters (Hu et al. 2021), trained instead of the model. Their output is scaled by alpha / rank."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32
    """Scale of an adapter's output."""
    targets: Texts = Field(default=["all-linear"], min_length=1)
    """Linear layers with adapters, by the last parts of their names; `all-linear`: all but the output layer."""


class RoleRun(Document):
    """The model, the engines and the optimizer of one role."""

    model: Model | None = None
    """A folder, a name on the hub, or a tiny architecture; none for a role that copies another one's."""
    lora: Lora | None = None
    """Train adapters instead of the whole model."""
    freeze: Texts = []
    """Parameters that are not trained, by patterns such as [model.embed_tokens.*, layers.0.*, mlp.gate.weight]. For
    `engine: fsdp` without `lora`."""
    engine: Literal["fsdp", "megatron"] = "fsdp"
    """Library that trains and infers."""
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    """Library that samples."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the forward pass; master weights stay float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    swap: bool = False
    """Move training state to host memory while the role samples, and a frozen role's weights while others compute."""
    replicas: PositiveInt = 1
    """Copies of the model in training (HSDP), each sharded over dp / replicas ranks."""
    offload: bool = False
    """Keep weights, gradients and optimizer in host memory while training."""
    recompute: bool | None = None
    """Recompute activations in the backward pass; default: above 1e9 parameters."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens, padding included, in one pass of a rank. Changes memory and speed, not the result."""
    learning_rate: PositiveFloat = 1e-6
    """Learning rate of AdamW after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to `min_learning_rate` at the last step."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the last step of `linear` or `cosine`."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate grows linearly from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW for weight matrices; not for biases and norms."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay of AdamW's first and second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Larger gradient norms are scaled down to this."""
    generation: Generation = Generation()
    """How the role samples."""

    @field_validator("max_grad_norm", mode="before")
    @classmethod
    def _is_a_bound(cls, value: Any) -> Any:
        if value is None or value in (0, math.inf):  # which mean so elsewhere
            raise ValueError("to scale no gradient down, take a bound that none exceeds:  max_grad_norm: 1e9")
        return value

    @field_validator("min_learning_rate")
    @classmethod
    def _is_fallen_to(cls, value: float, info: ValidationInfo) -> float:
        start = info.data.get("learning_rate", math.inf)
        if value > start:
            raise ValueError(f"{value:g} is above learning_rate ({start:g}), from which the schedule falls to it. A "
                             f"tenth of that is usual:  min_learning_rate: {start / 10:g}")
        if value and info.data.get("schedule") == "constant":
            raise ValueError("it changes nothing in a constant schedule. Instead:  schedule: cosine")
        return value

    def recomputes(self, parameters: int) -> bool:
        """Return whether a model of so many parameters recomputes its activations."""
        return self.engine == "fsdp" and (parameters > 1e9 if self.recompute is None else self.recompute)


MOST_TURNS = 100_000  # most prompts in which several training sets have their shares
NO_VARIABLES = {"tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template",
                "padding", "truncation", "max_length", "conversation", "return_tensors", "tokenizer_kwargs"}
"""Arguments of a tokenizer beside the variables of its chat template."""


class Data(Document):
    """The training set: a JSON, CSV or Parquet file, a folder that `datasets` saved, or a file on the hub, such as
    hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet."""

    train: dict[str, PositiveFloat] = Field(min_length=1)
    """The file, folder or files (data/train-*.parquet); or several with weights: with {gsm8k.jsonl: 3, math.jsonl: 1}
    three of four prompts come from the first. Records get the field `source`, their file's name, unless they have one.
    """
    batch: PositiveInt = 32
    """Prompts of a step, over all ranks; any number."""
    question: str = "question"
    """Field with the question: text, or chat messages with `role` and `content`. A dot enters a field:
    extra_info.question. By default records of TRL (`prompt`), verl, Alpaca and Dolly are read."""
    answer: str = "answer"
    """Field with the right answer, or messages of which the last one of the assistant is the answer. Not needed if no
    reward and no node reads it."""
    targets: Literal["last", "all"] = "last"
    """Assistant messages that supervised training imitates: the answer, or all without those of `weight: 0` or
    `loss: false` (or `train`, `trainable`, `loss_mask`). Not with `images`."""
    drop_answer: bool = False
    """Remove an assistant message at the end of a question, which the model would continue."""
    system_prompt: str | None = None
    """System message before every question without one."""
    prompt_suffix: str = ""
    """Text after every question, such as ' Think step by step.' Rewards get the question without it."""
    tools: str | None = None
    """Field with a question's tools for the chat template: a list of JSON schemas, or JSON text of one."""
    chat_template_kwargs: dict[str, bool | int | float | str | list[str]] = {}
    """Variables of the chat template, such as {enable_thinking: false}. A record's field of this name goes first."""
    columns: Annotated[dict[str, str], BeforeValidator(fields_by_column)] = {}
    """Further fields for nodes, rewards and samples: [difficulty, extra_info.index] (the second is column `index`), or
    renamed: {number: extra_info.index}. Lists and mappings become JSON text."""
    images: str | None = None
    """Field with a question's images: a path (relative to the data file), {bytes, path}, or a list of these. They stand
    at <image> in the question, or before it."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts lose their beginning (`data/prompts_cut`); see `long_prompts`."""
    long_prompts: Literal["cut", "drop"] = "cut"
    """Longer training prompts are cut, or dropped for another record (`data/records_skipped`); with `images` always
    dropped."""
    max_target_tokens: PositiveInt = 1024
    """Longer answers lose their end in supervised training (`data/targets_cut`)."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_set(cls, value: Any) -> Any:
        if isinstance(value, list):
            sets = ", ".join(f"{name}: 1" for name in value[:8])
            raise ValueError(f"several sets are named with their weights. Instead:  train: {{{sets}}}")
        return {value: 1.0} if isinstance(value, str) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_of_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name == "tools":
                raise ValueError(f"`{name}` has a key of its own. Instead:  data: {{{name}: …}}")
            if name in NO_VARIABLES:
                raise ValueError(f"`{name}` is no variable of chat templates: it says how to encode. Take it out")
        return value

    @property
    def turns(self) -> tuple[int, ...]:
        """How many prompts come from each of these in a round, in which all have their shares."""
        weights = [Fraction(str(weight)) for weight in self.train.values()]
        counts = [int(weight * math.lcm(*(each.denominator for each in weights))) for weight in weights]
        return tuple(count // math.gcd(*counts) for count in counts)

    @model_validator(mode="after")
    def _has_turns(self) -> Data:
        if sum(self.turns) > MOST_TURNS:
            raise ValueError(f"the weights of `train` meet only every {sum(self.turns):,} prompts; {MOST_TURNS:,} "
                             "is the most. Write them with fewer digits, as 0.7 and 0.3")
        return self

    @model_validator(mode="after")
    def _learns_text(self) -> Data:
        if self.targets == "all" and self.images:
            raise ValueError("`targets: all` finds messages of the assistant in text alone, and not with `images`. "
                             "Take one of the two out")
        return self


def _set_name(file: str) -> str:
    """Return what a validation set is called: `test` of `data/test.jsonl`, `test-*.parquet` and `test/*.jsonl`."""
    path = Path(file)
    return path.name.partition(".")[0].partition("*")[0].rstrip("-_") or path.parent.name or "heldout"


class Validation(Document):
    """Answers to held-out problems, by default the most probable one to each."""

    data: dict[str, str] = Field(min_length=1)
    """A name for each set, and its file or folder: {test: gsm8k_test.jsonl}. Files alone have their own names."""
    every: PositiveInt = 20
    """Steps between two validations; one comes before the first step, and one after the last."""
    reward: Any = "math"
    """Reward, as of a `score` node."""
    samples: PositiveInt = 1
    """Answers to each problem; of several, the mean and pass@k (`validation_pass/SET`) are reported."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of these answers; 0: the most probable tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default: that of `generation`. It needs a temperature above 0."""
    patience: PositiveInt | None = None
    """End the run after this many validations in a row without a new best mean of the first set."""
    best: bool = False
    """Keep the models of the first set's best mean in RUN/best/."""

    @field_validator("data", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        files = [value] if isinstance(value, str) else value
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            return value
        for name_of in (_set_name, lambda file: Path(file).stem):
            if len(named := {name_of(file): file for file in files}) == len(files):
                return named
        raise ValueError("two files have one name. Name each set:  data: {first: FILE, second: FILE}")

    @model_validator(mode="after")
    def _samples_differ(self) -> Validation:
        if self.samples > 1 and not self.temperature:
            raise ValueError("several `samples` of a problem are alike at temperature 0; add  temperature: 1.0")
        if not self.temperature and self.top_p not in (None, 1.0):
            raise ValueError("`top_p` says nothing at temperature 0, which takes the likeliest tokens; add  "
                             "temperature: 1.0")
        return self


class Checkpoint(Document):
    """Saving the run's state to disk, in the background."""

    every: NonNegativeInt = 50
    """Steps between two checkpoints; 0: none."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    to: str | None = None
    """Object store that gets a copy of each, such as s3://BUCKET/FOLDER, below the run's name; `distflow resume
    s3://BUCKET/FOLDER/RUN` continues on another machine (docs/failures.md). What fsspec knows: s3, gs, hdfs, file."""

    @field_validator("to")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            require_file_system(value)
        return value


class Parallel(Document):
    """How a node's ranks split its work; default: data-parallel over all ranks. Nodes without a model have only
    `dp`."""

    dp: PositiveInt | None = None
    """Data-parallel parts of the rows; default: as many as the ranks allow."""
    tp: PositiveInt = 1
    """Ranks that split each layer of a model."""
    pp: PositiveInt = 1
    """Ranks that split a model into stages."""
    cp: PositiveInt = 1
    """Ranks that split rows along their tokens."""
    ep: PositiveInt = 1
    """Ranks that split the experts of a layer, among those of `tp`, `cp` and `dp`."""
    first: NonNegativeInt = 0
    """First of the ranks that the role has to itself, up to the next `first`: of 4 ranks, 2 gives it the last two.
    Counted among the ranks that train."""
    layers: list[PositiveInt] = []
    """Layers of each stage of `pp`, such as [10, 6] for unequal ranks; default: equal."""
    order: RankOrder = SHARES_OUTERMOST
    """Which ranks are neighbours. tp-pp-dp: the stages of a dp part. tp-dp-pp: the same stage of all dp parts, so that
    unequal machines can have a stage each."""
    rows: list[NonNegativeInt] = []
    """Proportion of rows for each dp part, such as [2, 1] for unequal ranks; 0 leaves it out; default: equal."""

    @field_validator("rows", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise ValueError(f"{value} is no list with a whole number for each share, as [2, 1]")
        if value and not any(value):
            raise ValueError("no share has rows. Give one number for each share, in proportion, as [2, 1]")
        return value


class Run(Document):
    """Everything that a run needs except its DAG."""

    steps: PositiveInt
    """Training steps of `data.batch` prompts each."""
    data: Data
    """The training data."""
    roles: dict[str, RoleRun] = {}
    """Models of the DAG's roles, by role."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Decides random weights, the order of the data, and samples."""
    ranks: PositiveInt | None = None
    """Default number of ranks of `distflow run` and `distflow plan`; torchrun's own count overrides it."""
    mode: Literal["sync", "semi_sync", "async"] = "sync"
    """sync: all ranks sample, then all train. async: some sample while the others train. semi_sync: as async, but
    training ranks sample, too, until half of a step's prompts have samples."""
    groups: Groups = Groups()
    """Division of the ranks."""
    staleness: NonNegativeInt = 1
    """Highest age of the weights that sampled a token, in steps before those that train on it (async)."""
    on_stale: Literal["wait", "drop", "keep"] = "wait"
    """Samples older than `staleness` (async, semi_sync). wait: none; training waits for the slowest prompts. drop,
    keep: training takes finished prompts first; a sample that is too old by then is sampled again, or trained on."""
    transport: Literal["auto", "memory", "ucx", "tcp"] = "auto"
    """How weights travel to sampling ranks (async). auto: the first that both ends can use."""
    backend: Backend = "auto"
    """Library of collectives. auto: nccl on GPUs, gloo on CPUs. ucc is in few builds of torch."""
    dock_gib: PositiveFloat = 16.0
    """GiB of samples in each machine's host memory (with `--store`: of each that trains). If full, sampling ranks begin
    only prompts of the step that the trainer waits for."""
    layouts: dict[str, Parallel] = {}
    """How ranks split a node's work, by node."""
    validation: Validation | None = None
    """Held-out problems; default: no validation."""
    training_api: Annotated[str | None, BeforeValidator(address)] = None
    """Address at which a client's calls sample and train, instead of the DAG's nodes (docs/training_api.md):
    `localhost`, at a free port, or 0.0.0.0:8000, which admits other machines. A token protects it; nothing is
    encrypted."""
    checkpoint: Checkpoint = Checkpoint()
    """How often the run is saved to disk."""
    robust: Robust = Robust()
    """Recovery from failures."""
    faults: list[Fault] = []
    """Faults on purpose."""
    preflight: bool = True
    """Prove data, rewards, tokens and models on the first records, at the start."""
    log: list[LoggerSettings] = Field(default=["tensorboard"], validate_default=True)
    """Loggers, some with settings: {wandb: {project: mine, mode: offline}}."""
    output: str = "runs"
    """Folder of run folders."""
    samples: Annotated[NonNegativeInt | Literal["all"], BeforeValidator(rows_or_all)] = 4
    """Rows of each step in samples.jsonl. all: every row also in samples/rankN.jsonl, without single tokens, and every
    conversation in trajectories/, which else has 16 of each step and rank."""
    report: bool = True
    """Write report.html at the end; `distflow report` writes it at any time."""
    profile: list[PositiveInt] = []
    """Steps that the PyTorch profiler records to profile/, on training ranks."""
    wait_limit: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds that a collective, or a trainer without samples, waits before the run ends and names the missing rank.
    Set it above the longest step of any role."""

    @property
    def shown_samples(self) -> int:
        """Rows of each step in samples.jsonl."""
        return 4 if self.samples == "all" else self.samples

    @property
    def shown_conversations(self) -> int:
        """Conversations of each step and rank in trajectories/."""
        return sys.maxsize if self.samples == "all" else 16

    @property
    def has_samplers(self) -> bool:
        """Whether prompts are sampled ahead of the steps that train on them, and pass through the dock."""
        return self.mode != "sync"

    @property
    def trainer_samples(self) -> bool:
        """Whether ranks that train sample, too: in the chain of their step, or in turns as samplers."""
        return self.mode != "async"

    @property
    def trainer_samples_alone(self) -> bool:
        """Whether the ranks that train are the samplers."""
        return self.has_samplers and self.trainer_samples and self.groups.rollout == 0

    @property
    def trainer_validates(self) -> bool:
        """Whether ranks that train answer the validation, and need an engine that samples for it."""
        return self.validation is not None and (not self.has_samplers or self.trainer_samples_alone)

    @property
    def rollouts_validate(self) -> bool:
        """Whether ranks that only sample answer the validation, beside the prompts that they sample."""
        return self.validation is not None and not self.trainer_validates

    @property
    def least_rollouts(self) -> int:
        """How many rollouts must work at least: one, where no other rank samples, or validates."""
        return 0 if self.trainer_samples and not self.rollouts_validate else 1

    @field_validator("log")
    @classmethod
    def _is_installed(cls, value: list[LoggerSettings]) -> list[LoggerSettings]:
        for name in loggers_of(value):
            require_logger(name)
        return value
