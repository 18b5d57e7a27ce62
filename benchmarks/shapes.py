"""Models of known shapes: random weights made without a download, or folders without weights, enough to plan with.

A training step is three forward passes (the backward pass is two); what is computed again to save memory does not
count. A model folder of such a shape, with weights:  python -m benchmarks.shapes 0.5B FOLDER
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config import sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING = 3
"""Forward passes that a training step is worth."""
_STATE = 16
"""Bytes of weights, gradients and Adam's state of each parameter, in float32."""
_WHILE_COMPUTING = 6
"""Bytes of each parameter of two layers and what is outside of layers, in bfloat16 with float32 gradients."""
_LOGITS = 12 * 2**28


@dataclass(frozen=True)
class Shape:
    """A model's name and its configuration for transformers."""

    name: str
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @cached_property
    def sizes(self) -> sizes.Shape:
        return sizes.shape_of(self.config)

    def trainable(self, memory: float) -> Shape:
        """Return the shape with as many of its layers, at least one, as can be trained in so many bytes over all
        devices."""
        layer = self.sizes.parameters - self.with_layers(self.layers - 1).sizes.parameters
        others = self.sizes.parameters - self.layers * layer
        computing = _WHILE_COMPUTING * (2 * layer + others) + _LOGITS
        return self.with_layers(max(1, min(self.layers, int(((memory - computing) / _STATE - others) // layer))))

    def with_layers(self, layers: int) -> Shape:
        return replace(self, config=self.config | {"num_hidden_layers": layers})

    def flops(self, prompt: int, response: int, samples: int = 1) -> float:
        """Return the FLOPs of a forward pass through one prompt and `samples` responses to it, in tokens; the prompt is
        read once and the responses' tokens are scored."""
        seen = prompt * (prompt + 1) / 2 + samples * (response * prompt + response * (response + 1) / 2)
        return self.sizes.forward_flops(prompt, samples * response, seen)

    def build(self, device: str) -> PreTrainedModel:
        """Build the model with float32 weights, drawn on the device."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config), dtype=torch.float32)

    def folder(self, below: Path, scores: bool = False) -> Path:
        """Return a model folder without weights. `scores`: a reward model, with one number for each token."""
        place = below / f"{self.name}{'_scores' if scores else ''}"
        place.mkdir(exist_ok=True)
        head = {"architectures": ["Qwen3ForTokenClassification" if scores else "Qwen3ForCausalLM"],
                **({"id2label": {"0": "reward"}} if scores else {})}
        (place / "config.json").write_text(json.dumps(self.config | head))
        (place / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # without a tensor
        (place / "tokenizer.json").write_text("{}")
        return place


def _shape(name: str, family: str, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, tied: bool,
           vocabulary: int = 151936) -> Shape:
    return Shape(name, {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied,
        "vocab_size": vocabulary, "max_position_embeddings": 40960, "dtype": "bfloat16", "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **({"head_dim": 128} if family == "qwen3" else {})})


SHAPES = {shape.name: shape for shape in (
    _shape("0.5B", "qwen2", 896, 24, 4864, 14, 2, True), _shape("7B", "qwen2", 3584, 28, 18944, 28, 4, False, 152064),
    _shape("Qwen3-0.6B", "qwen3", 1024, 28, 3072, 16, 8, True),
    _shape("Qwen3-1.7B", "qwen3", 2048, 28, 6144, 16, 8, True),
    _shape("Qwen3-4B", "qwen3", 2560, 36, 9728, 32, 8, True),
    _shape("Qwen3-8B", "qwen3", 4096, 36, 12288, 32, 8, False),
    _shape("Qwen3-14B", "qwen3", 5120, 40, 17408, 40, 8, False),
    _shape("Qwen3-32B", "qwen3", 5120, 64, 25600, 64, 8, False),
    _shape("tiny", "qwen2", 64, 2, 192, 2, 1, True, 512))}
"""Those of Qwen2.5 (Yang et al. 2024) and Qwen3 (Yang et al. 2025), and one to see that a benchmark works."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="where the weights, in bfloat16, and a tokenizer are written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="where the weights are drawn")
    given = parser.parse_args()
    from workers.engines.embedded import build_tokenizer

    SHAPES[given.shape].build(given.device).bfloat16().save_pretrained(given.folder)
    build_tokenizer(["one"]).save_pretrained(given.folder)


if __name__ == "__main__":
    main()
