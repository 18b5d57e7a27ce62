"""Models of a known shape with random weights, made without a download, and the arithmetic that they need.

FLOPs of a forward pass, two for each multiplication and addition: 2 for each token and each parameter of the layers'
matrices; 4 · heads · head size for each layer, token and token that it sees (itself and those before: the scores and
their product with the values); 2 · hidden · vocabulary for each token whose following one is scored or drawn. Norms,
rotations, the softmax and the embedding count for nothing. A training step is three forward passes (the backward pass
is two); what is computed again to save memory does not count. That is the model FLOPs of MFU (Chowdhery et al. 2022,
appendix B).
A model folder of such a shape:  python -m benchmarks.shapes 0.5B FOLDER
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from workers.engines.embedded import build_tokenizer

TRAINING = 3
"""Forward passes that a training step is worth."""
_STATE = 16
"""Bytes of weights, gradients and Adam's state of each parameter, in float32."""
_WHILE_COMPUTING = 6
"""Bytes of each parameter of two layers and what is outside of layers, in bfloat16 with float32 gradients."""
_LOGITS = 12 * 2**28


@dataclass(frozen=True)
class Shape:
    """A decoder of the Qwen2 family, or of the Qwen3 family where it has a head size of its own."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    head_size: int | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def matrices(self) -> int:
        """Parameters of one layer's matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All but norms and biases, which are one in ten thousand."""
        return self.layers * self.matrices + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def trainable(self, memory: float) -> Shape:
        """Return the shape with as many of its layers, at least one, as can be trained in so many bytes over all
        devices."""
        others = self.parameters - self.layers * self.matrices
        computing = _WHILE_COMPUTING * (2 * self.matrices + others) + _LOGITS
        fitting = int(((memory - computing) / _STATE - others) // self.matrices)
        return replace(self, layers=max(1, min(self.layers, fitting)))

    def flops(self, prompt: int, response: int, samples: int = 1) -> float:
        """Return the FLOPs of a forward pass through one prompt and `samples` responses to it, in tokens; the prompt is
        read once and the responses' tokens are scored."""
        seen = prompt * (prompt + 1) / 2 + samples * (response * prompt + response * (response + 1) / 2)
        by_token = 2 * self.layers * self.matrices * (prompt + samples * response)
        attention = 4 * self.layers * self.heads * self.head_dim * seen
        return by_token + attention + 2 * self.hidden * self.vocabulary * samples * response

    def build(self, device: str) -> PreTrainedModel:
        """Build the model with float32 weights, drawn on the device."""
        family = {"head_dim": self.head_size} if self.head_size else {}
        config = (Qwen3Config if self.head_size else Qwen2Config)(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=32768, tie_word_embeddings=self.tied, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, **family)
        torch.manual_seed(0)
        with torch.device(device):
            return (Qwen3ForCausalLM if self.head_size else Qwen2ForCausalLM)(config).float()


SHAPES = {shape.name: shape for shape in (
    Shape("0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    Shape("7B", 28, 3584, 28, 4, 18944, 152064, tied=False),
    Shape("Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True, head_size=128),
    Shape("Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, tied=True, head_size=128),
    Shape("tiny", 2, 64, 2, 1, 192, 512, tied=True))}
"""Those of Qwen2.5 (Yang et al. 2024) and Qwen3 (Yang et al. 2025), and one to see that the benchmark works."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="where the weights, in bfloat16, and a tokenizer are written")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu", help="where the weights are drawn")
    given = parser.parse_args()
    SHAPES[given.shape].build(given.device).bfloat16().save_pretrained(given.folder)
    build_tokenizer(["one"]).save_pretrained(given.folder)


if __name__ == "__main__":
    main()
