"""How the contract's tests build each engine that samples, and what they do not ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from distflow.config.dag import Role
from distflow.config.models import ROLLOUTS
from distflow.config.run import Generation, Lora, RoleRun
from distflow.data.batch import Ragged
from workers.engines import attention, engine_class
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.fsdp import FSDPEngine
from workers.engines.rollout import Rollout

VOCABULARY = 270
ENDS = [2, *range(3, VOCABULARY, 9)]
LIMIT = 24
REPLAY = {"routing_replay": True}
HALFWAY = {"test_an_abort_gives_what_there_is_and_the_row_goes_on_as_if_nothing_had_been",
           "test_pause_and_resume",
           "test_what_one_rank_has_begun_another_ends",
           "test_versions_say_which_weights_sampled_each_token"}
"""Tests that meet rows after a few steps, and before their ends."""


@dataclass(frozen=True)
class Traits:
    """What differs between libraries."""

    installed: bool = True
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings without which it cannot do what the contract asks."""
    exempt: dict[str, str] = field(default_factory=dict)
    """Tests of the contract by name, and why this engine cannot pass them."""
    slow: Callable[[Any, float], None] | None = None
    """Makes an engine that goes on by itself between two steps wait some seconds before each token."""


def _found(name: str) -> bool:
    from distflow.config.models import elsewhere, installed

    engine = ROLLOUTS[name]
    return not engine.packages or bool(installed(engine) or elsewhere(engine))


def slow_down(engine: Any, seconds: float) -> None:
    """SGLang's server has a call for it."""
    engine.server.call("/slow_down", {"forward_sleep_time": seconds})


TRAITS: dict[str, Traits] = {
    "hf": Traits(),
    "vllm": Traits(_found("vllm")),
    "sglang": Traits(_found("sglang"), {},
                     {"test_a_text_ends_a_row_with_the_token_that_completes_it": "its server has no tokenizer"},
                     slow=slow_down),
}


def engines() -> list[Any]:
    """For parametrize: those that are not installed are skipped."""
    return [pytest.param(name, marks=pytest.mark.skipif(not traits.installed, reason=f"{name} is not installed"))
            for name, traits in TRAITS.items()]


def tiny(architecture: str = "qwen3", kv_heads: int = 1) -> Any:
    return build_model(VOCABULARY, 0, architecture=architecture, layers=2, hidden=64, heads=2, kv_heads=kv_heads)


def mixture() -> Any:
    return build_model(VOCABULARY, 0, architecture="qwen3_moe", mixture=(8, 3), layers=2, hidden=64, heads=2,
                       kv_heads=2)


def undecided(model: Any, seed: int = 1) -> Any:
    """The mixture with pairs of experts that only rounding tells apart: a router's rows are equal to 1e-7."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight[1::2] = weight[::2] * (1 + 1e-7 * torch.randn(weight[::2].shape, generator=draw))
    return model


def build(name: str, mesh: Any, model: Any, dtype: str = "float32", lora: Lora | None = None,
          **generation: Any) -> Rollout:
    """The engine `name` with the weights of `model`; `ENDS` end its rows."""
    settings = RoleRun(rollout=name, dtype=dtype, lora=lora, generation=Generation(
        **{"max_new_tokens": LIMIT, "batch_rows": 64, **TRAITS[name].generation, **generation}))
    tokenizer = build_tokenizer(["one two three"], vocab_size=VOCABULARY)
    return engine_class(ROLLOUTS[name]).build(model, tokenizer, settings, mesh, 0, ENDS)


def trainer_of(model: Any, copied: Any, mesh: Any) -> FSDPEngine:
    """The trainer of a mixture's weights, in a model that is built alike."""
    copied.load_state_dict(model.state_dict())
    copied.set_attn_implementation(attention.NAME)
    return FSDPEngine(copied, RoleRun(generation=REPLAY), mesh, 0, 1, Role(trained=True))


def apart(engine: FSDPEngine, prompts: Ragged, samples: Any, experts: Ragged | None) -> float:
    """The largest difference of a log-probability in training, with the given experts."""
    repeated = prompts.select(torch.arange(len(prompts)).repeat_interleave(2))
    found = engine.logprobs(repeated, samples.tokens, 1.0, routed_experts=experts)
    return float((found.values - samples.logprobs.values).abs().max())
