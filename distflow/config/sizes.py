"""Sizes of a model, from its configuration, before anything is loaded.

    Shape              sizes on which memory and FLOPs depend
    shape_of           of a configuration: by arithmetic for plain decoders, else those of the model that
                       `workers.engines.description` builds without weights, in a process of its own
    shape_of_embedded  of a model without a folder
    parts_of           the same with names: of parameters and of linear layers, always by that process

That process loads torch, which takes seconds. Its answers are kept in the user's cache folder, by the configuration,
the version of transformers and the program that describes models.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from distflow.config.model_code import read_json
from distflow.config.run import Model

VOCABULARY = 512  # upper bound of the vocabulary that is trained for a model without a folder
WIDENING = 3  # width of the feed-forward layers of a model without a folder, in hidden sizes
POSITIONS = 1024  # longest row of a model without a folder, in tokens
_DESCRIBES = "workers.engines.description"
_ROOT = Path(__file__).resolve().parents[2]
_SECONDS, _WAITS = 180, 60.0
"""Seconds for that process, and to wait for another one that is asked the same."""
REFUSED = 3  # its exit status where the configuration is bad, or no engine could compute the model
_LASTING = (0, 1)
"""Exit statuses after which it would say the same again; it was not killed."""
_OF_ONE_FILE = ("_name_or_path", "transformers_version")
"""Keys that say nothing of a model."""


class Attention(NamedTuple):
    """Layers that keep keys and values of each token."""

    layers: int
    width: int  # heads × mean size of a head's keys and values: of the products with each token that is seen
    cached: int  # elements that one layer keeps of a token
    window: int = 0  # most tokens that are seen, 0: all


@dataclass(frozen=True)
class Shape:
    """Sizes of a model on which memory depends."""

    parameters: int
    layers: int
    kv_width: int  # elements of one token's keys in one layer: key-value heads × head size
    vocabulary: int
    hidden: int
    positions: int | None = None  # most tokens of prompt and response together; None if the configuration does not say
    dtype: str | None = None  # of the weights on disk, as `bfloat16`; None if the configuration does not say
    vocabulary_head: int = 0  # parameters of the output layer; 0 if it shares those of the embeddings
    labels: int | None = None  # outputs for each token in place of a vocabulary; None for a language model
    token_pixels: int = 0  # pixels of an image that become one token; 0 for a model that takes no images
    heads: int = 1
    kv_heads: int = 1
    experts: int = 0  # experts of each layer; 0 for a dense model
    expert_parameters: int = 0  # parameters of the experts of all layers together
    experts_per_token: int = 0  # experts of a layer that compute for a token
    widening: int = 0  # width of the feed-forward layers; 0 where experts have their own
    head_norms: bool = False  # whether queries and keys of each head are normalized
    looked_up: int = 0  # parameters of tables from which a token takes a row; 0: one row of `hidden` for each token
    attention: tuple[Attention, ...] = ()  # by kind of layer; () with no `state`: all alike, and as wide as heads say
    state: int = 0  # elements that layers without keys keep of a row, however long
    learned_positions: int = 0  # rows of a table of positions, beyond which there is no token; 0: no such table
    own_length: int = 0  # longest row whose rotary frequencies are those of shorter ones; 0: no row's depend on it
    plain: str = ""  # why engines compute the model the plain way, as a sentence without its subject; "" if they do not
    weights: dict[str, int] = field(default_factory=dict, compare=False)  # elements of each parameter, once loaded
    linears: dict[str, int] = field(default_factory=dict, compare=False)  # inputs plus outputs of each linear layer

    @property
    def active_parameters(self) -> int:
        idle = 1 - self.experts_per_token / self.experts if self.experts else 0
        return self.parameters - int(idle * self.expert_parameters)

    @property
    def query_width(self) -> int:
        """Elements of one token's queries in one layer: heads × head size, which may differ from the hidden size."""
        return max((kind.width for kind in self.attention), default=self.kv_width * self.heads // self.kv_heads)

    @property
    def active_widening(self) -> int:
        """Width of the feed-forward layers that compute for a token: of the experts that it goes to, or of the one."""
        each = self.expert_parameters // (3 * self.hidden * max(self.experts * self.layers, 1))
        return self.widening or self.experts_per_token * each

    @property
    def attending(self) -> tuple[Attention, ...]:
        alike = Attention(self.layers, self.query_width, 2 * self.kv_width)
        return self.attention if self.attention or self.state else (alike,)

    @property
    def cached(self) -> int:
        """Elements that all layers together keep of a token."""
        return sum(kind.layers * kind.cached for kind in self.attending)

    def forward_flops(self, prompts: float, responses: float, seen: float) -> float:
        """Return the model FLOPs of a forward pass (Chowdhery et al. 2022, appendix B): two for each token and each
        parameter of the layers that compute for it, four for each head's width and token that it sees (`seen` in all;
        a window's at most), four for each element of a state, and two for each of the head's parameters and token of a
        response."""
        tokens, head = prompts + responses, self.hidden * (self.labels or self.vocabulary)
        layers = self.active_parameters - (self.looked_up or self.vocabulary * self.hidden) - self.vocabulary_head
        attended = sum(kind.layers * kind.width * (min(seen, kind.window * tokens) if kind.window else seen)
                       for kind in self.attending)
        return 2 * layers * tokens + 4 * attended + 4 * self.state * tokens + 2 * head * responses

    def with_value_head(self) -> Shape:
        return replace(self, parameters=self.parameters - self.vocabulary_head + self.hidden, vocabulary_head=0,
                       labels=1)


def read_config(file: Path) -> dict[str, Any]:
    """Return the settings in a Hugging Face `config.json`. Raises ValueError: it holds none."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {json.dumps(content)[:80]}, not settings by their names")
    return content


def shape_of(config: dict[str, Any]) -> Shape | None:
    """Return sizes from a Hugging Face configuration; None if they cannot be known. Raises ValueError: transformers
    could not make a model of it."""
    if not _is_plain(config):
        return _described(config)
    try:
        return _by_arithmetic(config)
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except TypeError as error:
        raise ValueError(f"a value has the wrong type: {error}") from None


_PLAIN: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"num_key_value_heads": 8}, "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128}, "qwen3_moe": {"num_key_value_heads": 4}}
"""Families whose sizes are counted here, with defaults of their configurations."""
_ODD = ("attention_bias", "mlp_bias", "use_sliding_window", "mlp_only_layers", "quantization_config", "text_config",
        "vision_config")
"""Keys by which a model of these families differs from what is counted."""
_ROTARY = {"default": set[str](), "linear": {"factor"}, "yarn": {"factor"},
           "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}}
"""Rotary embeddings whose frequencies depend on no row's length, and the keys that each needs."""
_DTYPES = ("float32", "bfloat16", "float16")


def _is_plain(config: dict[str, Any]) -> bool:
    """Return whether a model's sizes are those of its family, and its configuration has nothing that transformers could
    refuse."""
    kind, rotary = config.get("model_type", "llama"), config.get("rope_parameters") or config.get("rope_scaling") or {}
    windows = any(layer != "full_attention" for layer in config.get("layer_types") or ()) or \
        (kind == "mistral" and config.get("sliding_window", 4096))
    if kind not in _PLAIN or windows or not isinstance(rotary, dict) or any(config.get(key) for key in _ODD):
        return False
    needs = _ROTARY.get(rotary.get("rope_type") or rotary.get("type") or "default")
    return config.get("decoder_sparse_step", 1) == 1 and needs is not None and needs <= rotary.keys() and \
        config.get("hidden_act", "silu") == "silu" and _fits(config) and \
        (config.get("dtype") or config.get("torch_dtype") or "float32") in _DTYPES


def _fits(config: dict[str, Any]) -> bool:
    """Return whether heads divide each other and the states, and the padding token is one of the vocabulary."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "pad_token_id")
    sizes: list[Any] = [config.get(name) for name in names]
    hidden, heads, kv_heads, vocabulary, pad = sizes
    kv_heads, pad = kv_heads or heads, pad or 0
    if not all(isinstance(each, int) and each > 0 for each in (hidden, heads, kv_heads, vocabulary, pad + 1)):
        return True  # the arithmetic says what is wrong
    return heads % kv_heads == 0 and bool(config.get("head_dim") or hidden % heads == 0) and pad < vocabulary


def _by_arithmetic(config: dict[str, Any]) -> Shape:
    kind = config.get("model_type", "llama")
    config = {**_PLAIN[kind], **config}
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    size, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    queries, keys, normed = heads * size, kv_heads * size, kind.startswith("qwen3")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0  # transformers writes the latter
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    of_experts = experts * 3 * hidden * inner
    per_layer = 2 * hidden * (queries + keys) + (queries + 2 * keys) * (kind == "qwen2") + 2 * size * normed + \
        2 * hidden + (of_experts + experts * hidden if experts else 3 * hidden * inner)
    own_head = 0 if config.get("tie_word_embeddings") else vocabulary * hidden
    return Shape(layers * per_layer + vocabulary * hidden + own_head + hidden, layers, keys, vocabulary, hidden,
                 config.get("max_position_embeddings"), config.get("dtype") or config.get("torch_dtype"), own_head,
                 labels_of(config), heads=heads, kv_heads=kv_heads, experts=experts,
                 experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
                 expert_parameters=layers * of_experts, widening=0 if experts else inner, head_norms=normed)


def labels_of(config: dict[str, Any]) -> int | None:
    """Return the number of a classifier's labels; Hugging Face's default is 2."""
    kinds = ("ForSequenceClassification", "ForTokenClassification")
    if not str(next(iter(config.get("architectures") or ()), "")).endswith(kinds):
        return None
    return len(config.get("id2label") or (0, 1))


def _described(config: dict[str, Any]) -> Shape | None:
    """Return what another process says of a configuration, or has said before; None if it says nothing. Raises
    ValueError: transformers cannot read the configuration, or no engine could compute the model."""
    said = json.dumps({name: value for name, value in config.items() if name not in _OF_ONE_FILE}, sort_keys=True)
    shape = _answer(said)
    return shape and replace(shape, labels=labels_of(config))


@functools.cache
def _answer(config: str) -> Shape | None:
    file = _cache_file(config)
    with _one_at_a_time(file):
        is_kept, shape = _kept(file)
        if not is_kept:
            status, shape = _ask(config)
            if status in _LASTING and file:
                _keep(file, shape)
    return shape


def _cache_file(config: str) -> Path | None:
    """Return where the answer to a configuration is kept; None for a user without a folder."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    versions = version("transformers"), version("torch")
    digest = hashlib.sha256("\0".join([config, *versions]).encode() + _describing_program()).hexdigest()[:32]
    return None if folder.startswith("~") else Path(folder, "distflow", "sizes", f"{digest}.json")


@functools.cache
def _describing_program() -> bytes:
    names = "description", "capabilities", "attention", "context_parallel"
    files = [Path(__file__), *(_ROOT.joinpath("workers/engines", f"{name}.py") for name in names)]
    return b"\0".join(file.read_bytes() for file in files)


@contextlib.contextmanager
def _one_at_a_time(file: Path | None) -> Iterator[None]:
    """Let the ranks of a machine wait for the first that asks, for a while; where nothing can be written each asks."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock, until = stack.enter_context(file.with_suffix(".lock").open("w")), time.monotonic() + _WAITS
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
    yield


def _kept(file: Path | None) -> tuple[bool, Shape | None]:
    """Return whether an answer is kept, and the answer."""
    try:
        return (True, from_json(file.read_text(encoding="utf-8"))) if file else (False, None)
    except (OSError, ValueError, TypeError, LookupError):  # there is none, or it is broken
        return False, None


def _keep(file: Path, shape: Shape | None) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(shape and asdict(shape)), encoding="utf-8")
        new.replace(file)


def from_json(text: str) -> Shape | None:
    """Return a shape from `json.dumps(asdict(shape))`, None from `null`. Raises ValueError, TypeError or LookupError.
    """
    said = json.loads(text)
    return said and Shape(**{**said, "attention": tuple(Attention(*kind) for kind in said["attention"])})


def _ask(config: str) -> tuple[int, Shape | None]:
    """Return the exit status of the process and the last shape that it prints: it knows more from line to line, as far
    as it comes. Raises ValueError: see `_described`."""
    try:
        done = _describing(config)
    except (OSError, subprocess.TimeoutExpired):
        return -1, None
    if done.returncode == REFUSED:
        raise ValueError(done.stderr.strip().rpartition("\n")[2][:300])
    lines = [line for line in done.stdout.splitlines() if line.startswith(("null", "{"))]
    return (done.returncode, from_json(lines[-1])) if lines else (-1, None)


def _describing(config: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": "",
                   "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run([sys.executable, "-P", "-m", _DESCRIBES], input=config, capture_output=True, text=True,
                          timeout=_SECONDS, check=False, env=environment)


def parts_of(config: dict[str, Any]) -> Shape | None:
    """Return sizes with the names of all parameters and of all linear layers but the head; None if they cannot be
    known. Raises ValueError as `shape_of`."""
    return _described(config)


def shape_of_embedded(model: Model) -> Shape | None:
    """Return the sizes of a model without a folder, with the largest vocabulary that it may have."""
    config = embedded_config(model)
    return _described(config) if model.takes_images else _by_arithmetic(config)


def embedded_config(model: Model) -> dict[str, Any]:
    """Return the configuration of a model without a folder, with the largest vocabulary that it may have."""
    text = {"hidden_size": model.hidden, "num_hidden_layers": model.layers, "vocab_size": VOCABULARY,
            "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
            "intermediate_size": WIDENING * model.hidden, "tie_word_embeddings": True,
            "max_position_embeddings": POSITIONS, **mixture_of(model.hidden, model.mixture)}
    seeing = {"text_config": {**text, "rope_parameters": vision_rope(model.head_dim)},
              "vision_config": embedded_vision(model.hidden), "tie_word_embeddings": True}
    return {"model_type": model.architecture, **(seeing if model.takes_images else text)}


def mixture_of(hidden: int, mixture: tuple[int, int] | None) -> dict[str, Any]:
    """Return the configuration keys of a tiny architecture's experts, those of a token as wide as a dense layer."""
    if not mixture:
        return {}
    experts, each = mixture
    return {"num_experts": experts, "num_experts_per_tok": each, "norm_topk_prob": True,
            "moe_intermediate_size": WIDENING * hidden // each}


def embedded_vision(hidden: int) -> dict[str, Any]:
    """Return the image encoder's configuration of a tiny architecture; a token is a square of 16 × 16 pixels."""
    return {"depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": max(1, hidden // 32),
            "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": hidden,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}


def vision_rope(head_dim: int) -> dict[str, Any]:
    """Divide rotary frequencies between time, rows and columns."""
    third, half = head_dim // 6, head_dim // 2
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [half - 2 * third, third, third]}
