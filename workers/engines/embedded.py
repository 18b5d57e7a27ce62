"""Embedded model: builds a tokenizer and a tiny random language model without a download.

Both are ordinary transformers objects: `save_pretrained` writes a checkpoint that every engine can load.
"""
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from distflow.config.sizes import embedded_vision, mixture_of, vision_rope
from workers.engines.vision import ImageProcessor, attach_images

ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
PAD, BOS, EOS, USER, ASSISTANT = "<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"
IMAGE = "<|image_pad|>"  # an image token, as in Qwen's vocabularies; only for vision-language models
IMAGE_ID = 5  # of `IMAGE`, the first after the other special tokens
EMBEDDED_IMAGE_PROCESSOR = ImageProcessor(patch=8, merge=2, min_pixels=16 * 16, max_pixels=64 * 64,
                                          mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
# Every role but the assistant speaks as the user: three more special tokens would never be trained.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + EOS +
    "{% elif message['content'] is string %}" + USER + "{{ message['content'] }}"
    "{% else %}" + USER + "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
# Each digit is a pre-token. A word or sign takes the space before it, and the space after it if a digit follows: a
# number then costs as many tokens as it has digits.
PRETOKENS = r"\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"
# Narrow layers need larger initial weights than the usual 0.02: the embedded task then takes about two thirds of the
# steps.
INITIAL_DEVIATION = 0.06


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 512,
                    with_images: bool = False) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer. Digits never merge."""
    special = [PAD, BOS, EOS, USER, ASSISTANT, *([IMAGE] if with_images else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ValueError(f"vocab_size={vocab_size} cannot hold {len(alphabet)} bytes, {len(special)} special tokens; "
                         f"take {len(special) + len(alphabet)} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet),
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left",
        extra_special_tokens=special[3:], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int, seed: int, *, architecture: str = "qwen3", layers: int = 3, hidden: int = 128,
                heads: int = 4, kv_heads: int = 2, head_dim: int = 32, intermediate: int | None = None,
                mixture: tuple[int, int] | None = None, max_positions: int = 256, pad_token_id: int = 0,
                bos_token_id: int = 1, eos_token_id: int = 2) -> PreTrainedModel:
    """Build a float32 causal language model on the CPU, with weights drawn from `seed` alone. `mixture`: (experts of a
    layer, experts of a token) in place of feed-forward layers of width `intermediate`."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r} is not known; choose one of {', '.join(ARCHITECTURES)}")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; each of those serves equally many")
    ids: dict[str, Any] = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": intermediate or 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "max_position_embeddings": max_positions, **mixture_of(hidden, mixture),
        "initializer_range": INITIAL_DEVIATION}
    config_class, model_class = ARCHITECTURES[architecture]
    with_images = config_class is Qwen3VLConfig
    config = _vision_config(sizes, ids) if with_images else config_class(**sizes, **ids, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return attach_images(model_class(config).float(), EMBEDDED_IMAGE_PROCESSOR if with_images else None)


def _vision_config(sizes: dict[str, Any], ids: dict[str, Any]) -> Qwen3VLConfig:
    vision = {**embedded_vision(sizes["hidden_size"]), "initializer_range": INITIAL_DEVIATION}
    text = {**sizes, **ids, "rope_parameters": vision_rope(sizes["head_dim"])}
    none: dict[str, Any] = {"video_token_id": -1, "vision_start_token_id": -1, "vision_end_token_id": -1}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids,
                         image_token_id=IMAGE_ID, **none)
