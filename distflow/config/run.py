"""Run files: models, data, engines, layouts, steps, checkpoints and recovery; nothing of the algorithm."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

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

from distflow.config.expressions import OWN_FILTER, expression, fields_by_column
from distflow.config.groups import Groups
from distflow.config.loggers import LoggerSettings, loggers_of, require_logger
from distflow.config.robust import Fault, Robust
from distflow.config.training_api import TrainingApi
from distflow.config.yaml_source import Document
from distflow.plan import SHARES_OUTERMOST, RankOrder

Backend = Literal["auto", "nccl", "gloo", "ucc"]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text, or a list of them."""


class Model(Document):
    """A Hugging Face model folder (`model: path` for short), or a tiny architecture that starts from random weights."""

    path: str | None = None
    """A folder in Hugging Face's format (config.json, *.safetensors, tokenizer.json), or the name of a model on its
    hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION, which is downloaded unless the hub's cache has it. A
    resumed run continues with the same commit. `arithmetic_sft` is shipped: a small start for the embedded task."""
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_moe"] | None = None
    """A tiny model of this family with random weights, for trying things out; the keys below are its sizes."""
    layers: PositiveInt = 3
    """Number of layers."""
    hidden: PositiveInt = 128
    """Width of a token's hidden state."""
    heads: PositiveInt = 4
    """Attention heads of a layer."""
    kv_heads: PositiveInt = 2
    """Key and value heads of a layer; `heads` is a multiple of it."""
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of an attention head; rotary embeddings turn pairs. vLLM needs 32: its attention on CPU crashes below."""
    max_positions: PositiveInt = 256
    """Longest row, prompt and response together, in tokens."""
    experts: PositiveInt | None = None
    """Experts of each layer of a qwen3_moe (default: 8)."""
    experts_per_token: PositiveInt | None = None
    """Experts that compute for a token (default: 2), which together are as wide as a dense layer."""

    @property
    def mixture(self) -> tuple[int, int] | None:
        """Experts of a layer, and those of a token; None for a dense architecture."""
        return (self.experts or 8, self.experts_per_token or 2) if self.architecture == "qwen3_moe" else None

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
    """Longest response, in tokens."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities add up to this share."""
    top_k: NonNegativeInt = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens that have at least this share of the likeliest one's probability (Nguyen et al. 2024).
    Not with `rollout: sglang`."""
    stop: Texts = []
    """Texts that end a response, beside the model's own end token; one text, or a list. They stay in the response, and
    their tokens are trained like all that were sampled. Not with `rollout: sglang`."""
    batch_rows: PositiveInt = 512
    """Rows that generate at the same time on one rank. With `rollout: hf` on a CPU and 1 a row is sampled bit for bit
    alike, whatever else is sampled and however long its tools take."""
    memory_share: float = Field(default=0.5, gt=0, le=1)
    """Of a GPU's memory, what vLLM and SGLang may take for weights and caches while they are awake."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: linear layers and experts sample with weights and activations of 8 bits, one scale for a weight, made of the
    trainer's weights at each update. With `rollout: vllm` on a GPU; correct for the difference
    (`truncated_importance`)."""
    routing_replay: bool = False
    """Whether a mixture of experts is trained with the experts that its rollout chose for each token (R3, Ma et al.
    2025), so that rounding does not send a token to others. With `rollout: hf` and `engine: fsdp`."""
    cuda_graphs: bool = True
    """On a GPU: whether a decoding step is captured once and launched as a whole. With `rollout: hf` for dense models
    without windows or images; with vLLM and SGLang for all."""
    batch_invariant: bool = False
    """Kernels whose result for a row does not depend on the other rows, where the library has them; slower."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once. Take it out")
        return value


class Lora(Document):
    """Low-rank adapters (Hu et al. 2021) are trained instead of the model's own weights, which stay as they are.

    What they add to a layer is scaled by alpha / rank, or with `rslora` by alpha / √rank (Kalajdzievski 2023).
    """

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32
    """Scale of what an adapter adds, see above."""
    targets: Texts = Field(default=["all-linear"], min_length=1)
    """The linear layers that get adapters, by the last parts of their names; `all-linear`: all but the output layer."""
    rslora: bool = False
    """Whether that is scaled by alpha / √rank."""


class RoleRun(Document):
    """The model, the engines and the optimizer of one role."""

    model: Model | None = None
    """Its model folder or its name on the Hugging Face hub, as `model: Qwen/Qwen3-0.6B`, or a tiny architecture; none
    for a role that copies another's."""
    lora: Lora | None = None
    """Adapters of a trained role; without them its whole model is trained."""
    freeze: Texts = []
    """Parameters of a trained role that stay as they are: a pattern of their names, or a list, as
    [model.embed_tokens.*, layers.0.*, mlp.gate.weight]. `*` is any text, and a name may begin at any of its parts. Such
    weights have no gradient and no optimizer state. With `engine: fsdp`, and without `lora`."""
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
    recompute: bool | None = None
    """Whether a layer's activations are computed again in the backward pass instead of being kept; default: in models
    above 1e9 parameters."""
    compile: bool = False
    """Whether training compiles what layers have beside attention (torch.compile); the first steps are slow."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of prompts and responses in one forward and backward pass of a rank, with padding where rows are
    padded; a longer row is alone in its own. It changes memory and speed, not the result."""
    learning_rate: PositiveFloat = 1e-6
    """AdamW's, after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What becomes of the learning rate after the warm-up: it stays, or falls to `min_learning_rate` at the last step,
    in a line or along a cosine. A resume with other `steps` stretches it, and says how the rate jumps."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the last step, with `schedule: linear` or `cosine`; 0 would be that of the step after it."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate grows from 0, in a line."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's, for weight matrices: not for biases and norms, stacked ones either."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's decay of the mean and of the squared mean of gradients."""
    max_grad_norm: PositiveFloat = 1.0
    """A gradient whose norm is larger is scaled down to it."""
    generation: Generation = Generation()
    """How the role samples."""

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


_TURNS = 100_000  # most prompts in which several training sets have their shares
_TEMPLATE_SETTINGS = ("enable_thinking", "tools")  # of `data`, which the chat template gets too
_OF_TOKENIZER = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template",
                 "padding", "truncation", "max_length", "conversation", "return_tensors", "tokenizer_kwargs")


class Data(Document):
    """The training set: a .jsonl or .parquet file, a folder that `datasets` saved, or a file on the Hugging Face hub,
    as hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet; or several of them."""

    train: dict[str, PositiveFloat] = Field(min_length=1)
    """The file or folder; or several, each with its weight, as {gsm8k.jsonl: 3, math.jsonl: 1}: three of four prompts
    come from the first. Each is shuffled by itself and begins again when it is through. Records have the name of their
    file as field `source`, with its folder where two have one name, unless they have such a field: name it in
    `columns` to see it in samples."""
    batch: PositiveInt = 32
    """Prompts of a step, over all ranks. Any number works with any number of ranks."""
    question: str = "question"
    """The field with what is asked: text, or a list of chat messages, each with `role` and `content`. Of messages,
    rewards get the text of the last one of the user as `question`. A dotted name is a field in a field, here and
    wherever a field is named, as extra_info.question. Without this key, records in the forms of TRL (`prompt`), verl
    and Alpaca are read as those have it; a note says so."""
    answer: str = "answer"
    """The field with the right answer, text or a number: what rewards compare to, or what supervised training
    imitates. Of messages it is the last one, of the assistant. Where it is the same field as `question`, or there is
    none beside `messages` or `conversations`, the last message of the question is the answer. A list or a mapping is
    given to rewards as JSON text, and is never imitated. Records need none where neither rewards nor nodes read it."""
    targets: Literal["last", "all"] = "last"
    """Which messages of the assistant supervised training imitates: the answer, or all of the conversation. Not with
    `images`."""
    drop_answer: bool = False
    """Whether a question of messages that ends with one of the assistant is asked without it. Else the model continues
    that message."""
    system_prompt: str | None = None
    """A system message before every question, but for those that begin with one of their own."""
    prompt_suffix: str = ""
    """Text that is put right behind every question, as " Think step by step." Rewards get the question without it."""
    tools: str | None = None
    """A field with the tools that a question may use, as the chat template takes them: a list of JSON schemas, or JSON
    text of one."""
    enable_thinking: bool | None = None
    """Passed to the chat template, where that has such a switch; default: the template's own."""
    chat_template_kwargs: dict[str, bool | int | float | str | list[str]] = {}
    """Further variables of the chat template, as {reasoning_effort: low}."""
    strict: bool = False
    """Whether a record whose question or answer is empty is a mistake. Else another record takes its place, and
    `data/records_skipped` of the metrics and events.jsonl say so."""
    filter: Texts = []
    """Records to train on: an expression over a record's fields, as len(question) < 400 and level in [3, 4], or a
    function of yours, MODULE:FUNCTION, which gets the record; or a list of these, which must all be true. Each rank
    reads all records once as the run starts, which says how many each filter drops; ranks that keep other records than
    rank 0 end the run. Validation data is not filtered."""
    columns: Annotated[dict[str, str], BeforeValidator(fields_by_column)] = {}
    """Further fields that nodes and rewards may read, by their own names, as [difficulty, extra_info.index], of which
    the second is column `index`; or by names of yours, as {number: extra_info.index}. A list or a mapping in such a
    field is read as JSON text. Samples have them too, and `distflow why` compares by them: name the field that says
    where a record comes from."""
    images: str | None = None
    """A field with what a question shows: the path of an image (from the data file on), {bytes, path}, or a list of
    these. Each stands where the question says <image>; without that, all stand before it."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt loses its beginning, and `data/prompts_cut` of the metrics counts it; see `long_prompts`."""
    long_prompts: Literal["cut", "drop"] = "cut"
    """What becomes of training prompts that are longer than that. drop: another record takes the place of each, which
    `data/records_skipped` of the metrics and events.jsonl say; with `images`, which cannot be cut, always. Validation
    cuts prompts, and leaves out those with images that are too long."""
    max_target_tokens: PositiveInt = 1024
    """A longer answer loses its end where it is imitated, and `data/targets_cut` of the metrics counts it."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_set(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value

    @field_validator("filter")
    @classmethod
    def _are_expressions(cls, value: list[str]) -> list[str]:
        for text in value:
            if not OWN_FILTER.fullmatch(text):
                expression(text)
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_of_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _TEMPLATE_SETTINGS:
                raise ValueError(f"`{name}` has a key of its own. Instead:  data: {{{name}: …}}")
            if name in _OF_TOKENIZER:
                raise ValueError(f"`{name}` is no variable of chat templates: it says how to encode. Take it out")
        return value

    @property
    def for_template(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}

    @property
    def turns(self) -> tuple[int, ...]:
        """How many prompts come from each of these in a round, in which all have their shares."""
        weights = [Fraction(str(weight)) for weight in self.train.values()]
        counts = [int(weight * math.lcm(*(each.denominator for each in weights))) for weight in weights]
        return tuple(count // math.gcd(*counts) for count in counts)

    @model_validator(mode="after")
    def _has_turns(self) -> Data:
        if sum(self.turns) > _TURNS:
            raise ValueError(f"the weights of `train` meet only every {sum(self.turns):,} prompts; {_TURNS:,} is the "
                             "most. Write them with fewer digits, as 0.7 and 0.3")
        return self

    @model_validator(mode="after")
    def _learns_text(self) -> Data:
        if self.targets == "all" and self.images:
            raise ValueError("`targets: all` finds messages of the assistant in text alone, and not with `images`. "
                             "Take one of the two out")
        return self


class Validation(Document):
    """Answers to problems that are not trained on: the likeliest one to each, unless it says otherwise."""

    data: dict[str, str] = Field(min_length=1)
    """The sets: a name of your own for each, and its file or folder, as {test: gsm8k_test.jsonl}."""
    every: PositiveInt = 20
    """Steps between two validations; one comes before the first step, and one after the last, in any case."""
    reward: Any = "math"
    """As that of a `score` node: see `distflow.contracts.rewards`."""
    samples: PositiveInt = 1
    """Answers to each problem. Of several the mean is reported, and `validation_pass/SET`: pass@k with all of them."""
    temperature: NonNegativeFloat = 0.0
    """Of these answers; 0 takes the likeliest tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """As that of the role's `generation`, which is the default. It says nothing at temperature 0, as the next two."""
    top_k: NonNegativeInt | None = None
    """As that of the role's `generation`, which is the default."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """As that of the role's `generation`, which is the default. Not with `rollout: sglang`."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer, in tokens; default: that of the role's `generation`."""
    stop_at: float | None = None
    """End the run as soon as the first set's mean reward reaches this."""
    patience: PositiveInt | None = None
    """End the run after so many validations in a row without a new best mean of the first set."""
    best: bool = False
    """Whether the models of the best mean of the first set so far are kept as Hugging Face folders in RUN/best/."""
    group: Literal["rollout", "trainer"] = "rollout"
    """Ranks that answer (modes async and semi_sync). rollout: one of those that sample, while the others go on; the
    result comes some steps later. trainer: those that train, which stand still meanwhile."""

    @model_validator(mode="after")
    def _samples_differ(self) -> Validation:
        if self.samples > 1 and not self.temperature:
            raise ValueError("several `samples` of a problem are alike at temperature 0; add  temperature: 1.0")
        limits = {"top_p": self.top_p not in (None, 1.0), "top_k": self.top_k, "min_p": self.min_p}
        if not self.temperature and (idle := [name for name, limit in limits.items() if limit]):
            raise ValueError(f"`{idle[0]}` says nothing at temperature 0, which takes the likeliest tokens; add  "
                             "temperature: 1.0")
        return self


class Checkpoint(Document):
    """How often the run's state is written to disk, in the background."""

    every: NonNegativeInt = 50
    """Steps between two checkpoints; 0: no checkpoints."""
    keep: PositiveInt = 2
    """How many of the newest stay on disk."""


class Parallel(Document):
    """How a node's ranks split its work. Default: all ranks of the run, data-parallel. Only nodes with a model may have
    other sizes than `dp`."""

    dp: PositiveInt | None = None
    """Shares of the rows; default: as many as the ranks allow."""
    tp: PositiveInt = 1
    """Ranks that split each layer of a model."""
    pp: PositiveInt = 1
    """Ranks that split a model by layers, into stages."""
    cp: PositiveInt = 1
    """Ranks that split rows along their tokens."""
    ep: PositiveInt = 1
    """Ranks that split the experts of a layer, among those of `dp` and `cp`."""
    layers: list[PositiveInt] = []
    """Layers of each stage of `pp`, as [10, 6] for unlike ranks; by default equally many."""
    order: RankOrder = SHARES_OUTERMOST
    """Which ranks are neighbours, nearest first. tp-pp-dp: the stages of a share follow each other. tp-dp-pp: the first
    stage of all shares is on the first ranks, and so on, so that unlike machines can have a stage each."""
    rows: list[NonNegativeInt] = []
    """For each share a number, and rows in that proportion, as [2, 1] for unlike ranks; by default equally many."""

    @field_validator("rows", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise ValueError(f"{value} is no list with a whole number for each share, as [2, 1]")
        if value and not any(value):
            raise ValueError("no share has rows. Give one number for each share, in proportion, as [2, 1]")
        return value


class Run(Document):
    """Everything that a run needs beside its DAG."""

    steps: PositiveInt
    """Training steps; each takes `data.batch` prompts."""
    data: Data
    """What is trained on."""
    roles: dict[str, RoleRun] = {}
    """The models of the DAG's roles, by role."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Decides the random weights, the order of the data and what is sampled."""
    ranks: PositiveInt | None = None
    """How many ranks `distflow run` and `distflow plan` take by default; under torchrun its count stands."""
    mode: Literal["sync", "semi_sync", "async"] = "sync"
    """sync: all ranks sample and then train, together. async: some sample, the others train, each at its own pace.
    semi_sync: as async, but those that train sample too, until enough is there (`switch_at`)."""
    groups: Groups = Groups()
    """How ranks are divided; in mode sync, where the others sample and train, only `inference` and `trainers` count."""
    staleness: NonNegativeInt = 1
    """By how many steps the weights that sampled a token may be older than those that train on it (mode async). With 0,
    training waits for samples of its newest weights, as in mode sync. (`staleness/max` of the metrics counts optimizer
    steps, of which a node with several mini-batches makes several.)"""
    on_stale: Literal["wait", "drop", "keep"] = "wait"
    """What becomes of samples that would be older than `staleness` (modes async and semi_sync). wait: there are none,
    as training takes the prompts in the order of the data and waits for the slowest of them. drop, keep: it takes those
    that are done first, while the slow ones go on; one that is too old by then is dropped and sampled again, or trained
    on all the same, in a DAG that corrects for it (`truncated_importance`)."""
    on_new_weights: Literal["continue", "restart"] = "continue"
    """What happens to unfinished rows when new weights come (mode async): their next tokens are sampled with these, or
    the turn that is under way begins again."""
    switch_at: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Ranks that do both go over to training (mode semi_sync) once the samples of so many prompts wait for it, as a
    share of a step's, of whichever steps they are."""
    fuse: bool = True
    """Whether ranks that train compute what needs no whole step, such as log-probabilities of the reference, of the
    prompts that are done while others are still sampled (modes async and semi_sync). Which prompts are computed
    together then depends on when they come, so that two runs with one seed round otherwise."""
    transport: Literal["auto", "memory", "ucx", "tcp"] = "auto"
    """How weights travel to those that sample (mode async): through shared memory, within a machine; by UCX
    (extra `ucx`); by TCP. auto: the first of these that both ends can use; events.jsonl says which."""
    backend: Backend = "auto"
    """Library of the collectives on the ranks' devices. auto: nccl on GPUs, gloo on CPUs. Another is tried at the
    start, and it is a mistake if it does not work. ucc: Unified Collective Communication, which few builds of torch
    have."""
    dock_gib: PositiveFloat = 16.0
    """GiB of samples that each machine that trains should store in its host memory (modes async and semi_sync). Where
    they are full, ranks that sample begin no prompts but those of the step that the trainer waits for, until it has
    released others. The trainer itself never waits for room. With `on_stale` drop or keep no rank waits: the trainer
    releases the rows of trained steps."""
    layouts: dict[str, Parallel] = {}
    """How a node's ranks split its work, by node."""
    validation: Validation | None = None
    """Held-out problems and how often they are asked; without it there is no validation."""
    training_api: TrainingApi | None = None
    """A client's calls train, in place of the DAG's nodes (mode sync); {} for the defaults."""
    checkpoint: Checkpoint = Checkpoint()
    """How often the run is saved to disk."""
    robust: Robust = Robust()
    """What happens when something breaks."""
    faults: list[Fault] = []
    """What is broken on purpose, to see what happens."""
    preflight: bool = True
    """Whether data, rewards and tokens are proved on the first records, and models on a few rows, at the start."""
    log: list[LoggerSettings] = Field(default=["tensorboard"], validate_default=True)
    """Where metrics and samples go beside the run's folder. With settings: {wandb: {project: mine, mode: offline}}."""
    output: str = "runs"
    """The folder in which the run makes its own."""
    samples: NonNegativeInt = 4
    """Rows that samples.jsonl gets each step, of those of the first rank that trains."""
    all_samples: bool = False
    """Write all rows of each step too, in the form of samples.jsonl but for single tokens: each rank that trains writes
    its part to samples/rankN.jsonl."""
    trajectories: NonNegativeInt = 16
    """Rows of each step and rank whose turns are written to trajectories/, for nodes that converse."""
    report: bool = True
    """Write report.html when the run has finished; `distflow report` writes it at any time."""
    timeline: bool = True
    """Write what each rank does when to timeline/, for `distflow report --trace`, `distflow why` and the report."""
    profile: list[PositiveInt] = []
    """Steps that the PyTorch profiler records, on ranks that train (in mode sync all), to profile/."""
    wait_limit: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds that a collective may wait for the slowest rank, and in modes async and semi_sync the trainer for the
    samples of a draw, before the run stops and says who is missing. A rank without rows of a role waits so for all
    that others do with it in a step, as for an update: it must be longer than that takes. A worker that starts again
    waits as long for a run folder whose file system is read-only or away."""

    @property
    def trainer_validates(self) -> bool:
        """Whether ranks that train answer the validation, and need an engine that samples for it."""
        return self.validation is not None and (self.mode == "sync" or self.validation.group == "trainer"
                                                or self.trainer_samples_alone)

    @property
    def trainer_samples_alone(self) -> bool:
        """Whether no rank only samples, in a mode whose samples may be of older weights."""
        return self.mode == "semi_sync" and self.groups.rollout == 0

    @property
    def rollouts_validate(self) -> bool:
        """Whether ranks that only sample answer the validation, beside the prompts that they sample."""
        return self.validation is not None and not self.trainer_validates

    @property
    def least_rollouts(self) -> int:
        """How many rollouts must work at least: one, where no other rank samples, or validates."""
        return 0 if self.mode == "semi_sync" and not self.rollouts_validate else 1

    @field_validator("log")
    @classmethod
    def _is_installed(cls, value: list[LoggerSettings]) -> list[LoggerSettings]:
        for name in loggers_of(value):
            require_logger(name)
        return value
