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
    """A Hugging Face model (`model: path` for short), or a tiny architecture with random weights."""

    path: str | None = None
    """A folder in Hugging Face's format (config.json, *.safetensors, tokenizer.json), or a model's name on the hub,
    such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION. It is downloaded unless the hub's cache has it. A resumed run
    keeps its commit. `arithmetic_sft` is shipped: a small start for the embedded task."""
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_moe"] | None = None
    """A tiny model of this family with random weights, for trials. The keys below are its sizes."""
    layers: PositiveInt = 3
    """Number of layers."""
    hidden: PositiveInt = 128
    """Width of a token's hidden state."""
    heads: PositiveInt = 4
    """Attention heads of a layer."""
    kv_heads: PositiveInt = 2
    """Key and value heads of a layer; they must divide `heads`."""
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of an attention head, even. vLLM needs 32: its attention on CPU crashes below."""
    max_positions: PositiveInt = 256
    """Longest row, prompt and response together, in tokens."""
    experts: PositiveInt | None = None
    """Experts of each layer of a qwen3_moe (default: 8)."""
    experts_per_token: PositiveInt | None = None
    """Experts that compute a token (default: 2). Together they are as wide as a dense layer."""

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
    """Divisor of the logits; 0 always takes the most probable token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens whose probabilities add up to this share."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the highest probability (Nguyen et al. 2024). Not with `rollout:
    sglang`."""
    stop: Texts = []
    """Texts that end a response, besides the model's end token: one or a list. They stay in the response and are
    trained. Not with `rollout: sglang`."""
    batch_rows: PositiveInt = 512
    """Rows that one rank samples at the same time. With 1, `rollout: hf` on a CPU samples a row bit for bit alike,
    whatever else is sampled and however long its tools take."""
    memory_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a GPU's memory for weights and caches of vLLM and SGLang while they are awake."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: sample with 8-bit weights and activations in linear layers and experts, one scale for a weight, made from
    the trainer's weights at each update. For `rollout: vllm` on a GPU. Correct for the difference
    (`truncated_importance`)."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that its rollout chose for each token (R3, Ma et al. 2025), so that
    rounding does not change them. For `rollout: hf` or `vllm`."""
    cuda_graphs: bool = True
    """Capture a decoding step once and launch it as a whole, on a GPU. `rollout: hf` does so for dense models without
    windows or images, vLLM and SGLang for all."""
    batch_invariant: bool = False
    """Use kernels whose result for a row does not depend on the other rows, where the library has them; slower."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every response at once. Take it out")
        return value


class Lora(Document):
    """Low-rank adapters (Hu et al. 2021). They are trained instead of the model's own weights. Their output is scaled
    by alpha / rank, or with `rslora` by alpha / √rank (Kalajdzievski 2023)."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32
    """Scale of an adapter's output, see above."""
    targets: Texts = Field(default=["all-linear"], min_length=1)
    """Linear layers with adapters, by the last parts of their names; `all-linear`: all but the output layer."""
    rslora: bool = False
    """Scale by alpha / √rank."""


class RoleRun(Document):
    """The model, the engines and the optimizer of one role."""

    model: Model | None = None
    """Model folder or name on the Hugging Face hub (`model: Qwen/Qwen3-0.6B`), or a tiny architecture; none for a role
    that copies another one's."""
    lora: Lora | None = None
    """Adapters of a trained role; without them its whole model is trained."""
    freeze: Texts = []
    """Parameters of a trained role that are not trained: a pattern of their names, or a list, such as
    [model.embed_tokens.*, layers.0.*, mlp.gate.weight]. `*` is any text; a pattern may begin at any part of a name.
    They have no gradient and no optimizer state. For `engine: fsdp` without `lora`."""
    engine: Literal["fsdp", "megatron"] = "fsdp"
    """Library that trains and infers."""
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    """Library that samples."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the forward pass; master weights and reductions stay float32. auto: bfloat16 on GPU, float32 on CPU."""
    swap: bool = False
    """Move training state to host memory while the role samples, and free sampling state while it trains."""
    replicas: PositiveInt = 1
    """Copies of the model in training (HSDP). Each copy is sharded over dp / replicas ranks, such as those of a
    machine."""
    offload: bool = False
    """Keep weights, gradients and optimizer in host memory while training; a layer moves to the device when it
    computes."""
    recompute: bool | None = None
    """Compute a layer's activations again in the backward pass instead of keeping them; default: above 1e9
    parameters."""
    compile: bool = False
    """Compile everything in a layer except attention for training (torch.compile); the first steps are slow."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens, padding included, in one forward and backward pass of a rank. A longer row has a pass of its own. It
    changes memory and speed, not the result."""
    learning_rate: PositiveFloat = 1e-6
    """Learning rate of AdamW after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: it stays, or falls to `min_learning_rate` at the last step, linearly or along a
    cosine. A resume with other `steps` stretches it, and reports the jump."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the last step, with `schedule: linear` or `cosine`; with 0 only the step after it would have
    rate 0."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate grows linearly from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW for weight matrices; not for biases and norms, even if they are stacked."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay of AdamW's first and second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to it."""
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
    such as hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet; or several of them."""

    train: dict[str, PositiveFloat] = Field(min_length=1)
    """The file or folder; or several with weights, such as {gsm8k.jsonl: 3, math.jsonl: 1}: three of four prompts come
    from the first. Each is shuffled by itself and repeated. Records get the field `source`, the name of their file
    (with its folder if two files have one name), unless they have one; list it in `columns` to see it in samples."""
    batch: PositiveInt = 32
    """Prompts of a step, over all ranks. Any number works with any number of ranks."""
    question: str = "question"
    """Field with the question: text, or chat messages with `role` and `content`. Rewards get the text of the last user
    message as `question`. A dot enters a field, here and in all field names, such as extra_info.question. Without this
    key, records of TRL (`prompt`), verl and Alpaca are recognised; a note says so."""
    answer: str = "answer"
    """Field with the right answer, text or number, which rewards compare to and supervised training imitates. Of
    messages it is the last one of the assistant. If it is the same field as `question`, or if there are only `messages`
    or `conversations`, the question's last message is the answer. Rewards get a list or mapping as JSON text; it is
    never imitated. Records need no answer if no reward and no node reads it."""
    targets: Literal["last", "all"] = "last"
    """Assistant messages that supervised training imitates: the answer, or all of the conversation. Not with
    `images`."""
    drop_answer: bool = False
    """Remove an assistant message at the end of a question. Otherwise the model continues it."""
    system_prompt: str | None = None
    """System message before every question without one of its own."""
    prompt_suffix: str = ""
    """Text directly after every question, such as ' Think step by step.' Rewards get the question without it."""
    tools: str | None = None
    """Field with a question's tools, as the chat template takes them: a list of JSON schemas, or JSON text of one."""
    enable_thinking: bool | None = None
    """Switch of the chat template, if it has one; default: the template's own."""
    chat_template_kwargs: dict[str, bool | int | float | str | list[str]] = {}
    """Further variables of the chat template, such as {reasoning_effort: low}."""
    strict: bool = False
    """Refuse records with an empty question or answer. Otherwise another record takes their place; metric
    `data/records_skipped` and events.jsonl say so."""
    filter: Texts = []
    """Records to train on: an expression over fields, such as len(question) < 400 and level in [3, 4]; your function of
    a record, MODULE:FUNCTION; or a list, which must all be true. Each rank reads all records once at the start and
    reports how many each filter drops. A rank that keeps other records than rank 0 ends the run. Validation data is not
    filtered."""
    columns: Annotated[dict[str, str], BeforeValidator(fields_by_column)] = {}
    """Further fields for nodes and rewards, such as [difficulty, extra_info.index] (the second is column `index`), or
    renamed, such as {number: extra_info.index}. A list or mapping in a field is read as JSON text. Samples show them,
    and `distflow why` compares by them: name the field with a record's origin."""
    images: str | None = None
    """Field with a question's images: a path (from the data file on), {bytes, path}, or a list of these. Each stands at
    <image> in the question, or all stand before it."""
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts lose their beginning (metric `data/prompts_cut`); see `long_prompts`."""
    long_prompts: Literal["cut", "drop"] = "cut"
    """Treatment of longer training prompts. drop: another record takes the place (metric `data/records_skipped`,
    events.jsonl); always so with `images`, which cannot be cut. Validation cuts prompts, and leaves out those whose
    images are too long."""
    max_target_tokens: PositiveInt = 1024
    """Longer answers lose their end in supervised training (metric `data/targets_cut`)."""

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
    """Answers to held-out problems: the most probable one to each, by default."""

    data: dict[str, str] = Field(min_length=1)
    """The sets: your name for each, and its file or folder, such as {test: gsm8k_test.jsonl}."""
    every: PositiveInt = 20
    """Steps between two validations. One always comes before the first step, and one after the last."""
    reward: Any = "math"
    """Reward, as of a `score` node: see `distflow.contracts.rewards`."""
    samples: PositiveInt = 1
    """Answers to each problem. Of several, the mean is reported, and `validation_pass/SET`: pass@k with all of them."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of these answers; 0 takes the most probable tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """As in `generation`, whose value is the default. This and the next two mean nothing at temperature 0."""
    top_k: NonNegativeInt | None = None
    """As in `generation`, whose value is the default."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """As in `generation`, whose value is the default. Not with `rollout: sglang`."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer, in tokens; default: that of `generation`."""
    stop_at: float | None = None
    """End the run once the first set's mean reward reaches this."""
    patience: PositiveInt | None = None
    """End the run after this many validations in a row without a new best mean of the first set."""
    best: bool = False
    """Keep the models of the first set's best mean as Hugging Face folders in RUN/best/."""
    group: Literal["rollout", "trainer"] = "rollout"
    """Ranks that answer (modes async and semi_sync). rollout: one that samples, while the others continue; the result
    comes some steps later. trainer: those that train, which stand still meanwhile."""

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
    """Number of newest checkpoints that stay on disk."""


class Parallel(Document):
    """How a node's ranks split its work. Default: all ranks of the run, data-parallel. Only nodes with a model may have
    other sizes than `dp`."""

    dp: PositiveInt | None = None
    """Data-parallel parts of the rows; default: as many as the ranks allow."""
    tp: PositiveInt = 1
    """Ranks that split each layer of a model."""
    pp: PositiveInt = 1
    """Ranks that split a model by layers, into stages."""
    cp: PositiveInt = 1
    """Ranks that split rows along their tokens."""
    ep: PositiveInt = 1
    """Ranks that split the experts of a layer, among those of `tp`, `cp` and `dp`."""
    layers: list[PositiveInt] = []
    """Layers of each stage of `pp`, such as [10, 6] for unequal ranks; default: equal."""
    order: RankOrder = SHARES_OUTERMOST
    """Which ranks are neighbours, nearest first. tp-pp-dp: the stages of a dp part are next to each other. tp-dp-pp:
    the first stage of all dp parts is on the first ranks, and so on, so that unequal machines can have a stage each."""
    rows: list[NonNegativeInt] = []
    """A number for each dp part, which gets rows in that proportion, such as [2, 1] for unequal ranks; 0 leaves it out;
    default: equal."""

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
    """Default number of ranks of `distflow run` and `distflow plan`; under torchrun its own count holds."""
    mode: Literal["sync", "semi_sync", "async"] = "sync"
    """sync: all ranks sample, then all train. async: some sample, the others train, each at its own pace. semi_sync: as
    async, but training ranks sample, too, until enough is there (`switch_at`)."""
    groups: Groups = Groups()
    """Division of the ranks. In mode sync only `inference` and `trainers` count."""
    staleness: NonNegativeInt = 1
    """Highest age of the weights that sampled a token, in steps before those that train on it (mode async). With 0,
    training waits for samples of its newest weights, as in mode sync. (Metric `staleness/max` counts optimizer steps:
    several for a node with mini-batches.)"""
    on_stale: Literal["wait", "drop", "keep"] = "wait"
    """Treatment of samples older than `staleness` (modes async and semi_sync). wait: there are none; training takes
    prompts in the order of the data and waits for the slowest. drop, keep: it takes finished prompts first, while slow
    ones continue. One that is too old by then is sampled again (drop), or trained on in a DAG that corrects for it
    (keep; `truncated_importance`)."""
    on_new_weights: Literal["continue", "restart"] = "continue"
    """Unfinished rows when new weights come (mode async). continue: their next tokens use these. restart: the turn in
    progress begins again."""
    switch_at: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a step's prompts, of any steps, whose samples must wait before ranks that do both begin to train (mode
    semi_sync)."""
    fuse: bool = True
    """Let training ranks compute finished prompts while others are still sampled, in nodes that need no whole step,
    such as a reference's log-probabilities (modes async and semi_sync). Batches then depend on timing, so two runs with
    one seed round differently."""
    transport: Literal["auto", "memory", "ucx", "tcp"] = "auto"
    """How weights travel to sampling ranks (mode async): shared memory within a machine, UCX (extra `ucx`), or TCP.
    auto: the first that both ends can use; events.jsonl says which."""
    backend: Backend = "auto"
    """Library of the collectives between ranks. auto: nccl on GPUs, gloo on CPUs. Another one is tried at the start,
    which fails if it does not work. ucc: Unified Collective Communication, in few builds of torch."""
    dock_gib: PositiveFloat = 16.0
    """GiB of samples in the host memory of each machine, or with `--store` of each that trains. If they are full,
    sampling ranks begin only prompts of the step that the trainer waits for, until it releases others. The trainer
    never waits for room. With `on_stale` drop or keep no rank waits: the trainer releases rows of trained steps."""
    layouts: dict[str, Parallel] = {}
    """How ranks split a node's work, by node."""
    validation: Validation | None = None
    """Held-out problems and their interval; default: no validation."""
    training_api: TrainingApi | None = None
    """A client's calls train, instead of the DAG's nodes (mode sync); {} for the defaults."""
    checkpoint: Checkpoint = Checkpoint()
    """How often the run is saved to disk."""
    robust: Robust = Robust()
    """Recovery from failures."""
    faults: list[Fault] = []
    """Faults on purpose."""
    preflight: bool = True
    """Prove data, rewards and tokens on the first records, and models on a few rows, at the start."""
    log: list[LoggerSettings] = Field(default=["tensorboard"], validate_default=True)
    """Further places for metrics and samples, some with settings: {wandb: {project: mine, mode: offline}}."""
    output: str = "runs"
    """Folder in which each run makes its own."""
    samples: NonNegativeInt = 4
    """Rows of each step in samples.jsonl, from the first training rank."""
    all_samples: bool = False
    """Write all rows of each step, as in samples.jsonl without single tokens: each training rank writes
    samples/rankN.jsonl."""
    trajectories: NonNegativeInt = 16
    """Rows of each step and rank whose turns are written to trajectories/, for nodes with conversations."""
    report: bool = True
    """Write report.html at the end; `distflow report` writes it at any time."""
    timeline: bool = True
    """Write each rank's activities to timeline/, for `distflow report --trace`, `distflow why` and the report."""
    profile: list[PositiveInt] = []
    """Steps that the PyTorch profiler records to profile/, on training ranks (in mode sync all)."""
    wait_limit: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds that a collective waits for the slowest rank, and in modes async and semi_sync the trainer for samples,
    before the run stops and names the missing rank. Set it above the longest step of any role: idle ranks wait this
    long, too. A restarting worker waits as long for a run folder that is read-only or away."""

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
