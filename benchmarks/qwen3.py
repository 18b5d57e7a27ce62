"""The sizes of Qwen3 (Qwen Team 2025, table 1) as model folders without weights: enough to plan with."""

from __future__ import annotations

import json
from pathlib import Path

_SIZES = {
    "1.7B": (2048, 28, 6144, 16, 8, True), "4B": (2560, 36, 9728, 32, 8, True), "8B": (4096, 36, 12288, 32, 8, False),
    "14B": (5120, 40, 17408, 40, 8, False), "32B": (5120, 64, 25600, 64, 8, False)}
"""Hidden size, layers, width of the feed-forward layers, heads, key-value heads, whether the head is the embeddings."""


def folder(size: str, below: Path, scores: bool = False) -> Path:
    """Return a model folder of this size. `scores`: a reward model, with one number for each token."""
    hidden, layers, inner, heads, kv_heads, tied = _SIZES[size]
    config = {"architectures": ["Qwen3ForTokenClassification" if scores else "Qwen3ForCausalLM"], "model_type": "qwen3",
              "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": 151936,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "dtype": "bfloat16",
              "tie_word_embeddings": tied, "max_position_embeddings": 40960}
    place = below / f"qwen3_{size}{'_scores' if scores else ''}"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config | ({"id2label": {"0": "reward"}} if scores else {})))
    (place / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # without a tensor
    (place / "tokenizer.json").write_text("{}")
    return place
