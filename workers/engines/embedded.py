"""The embedded model: a tokenizer and a tiny random language model, both made on the spot, without a download.

They are ordinary transformers objects: `save_pretrained` writes a checkpoint that every engine here can load.
"""
from collections.abc import Iterable

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
)

ARCHITECTURES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
PAD, BOS, EOS, USER, ASSISTANT = "<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"
# Every role but the assistant speaks as the user: three more special tokens would never be trained.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + EOS +
    "{% else %}" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
# A digit is a piece of its own. A word or sign takes the space before it, and the space after it when a digit follows:
# a number then costs as many tokens as it has digits.
PIECES = r"\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"
SMALLEST_HEAD = 32  # vLLM's attention on CPU crashes below it
# Narrow layers want wider draws than the usual 0.02, made for thousands of units: the embedded task is then learned in
# about two thirds of the steps.
INITIAL_DEVIATION = 0.06


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts` (any strings); the same texts give the same tokenizer.

    All 256 bytes are in the vocabulary, so that any string survives encoding and decoding. Words merge to single
    tokens, digits never do. `vocab_size` is an upper bound (few texts hold fewer merges) and at least 261: the bytes
    and five special tokens. Raises ValueError below that.
    """
    special = [PAD, BOS, EOS, USER, ASSISTANT]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special) + len(alphabet):
        raise ValueError(f"vocab_size={vocab_size} cannot hold {len(alphabet)} bytes, {len(special)} special tokens; "
                         f"take {len(special) + len(alphabet)} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet),
                                  show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left",
        extra_special_tokens=[USER, ASSISTANT], chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )


def build_model(
    vocab_size: int,
    seed: int,
    *,
    architecture: str = "qwen3",
    layers: int = 3,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int | None = None,
    max_positions: int = 256,
    pad_token_id: int = 0,
    bos_token_id: int = 1,
    eos_token_id: int = 2,
) -> PreTrainedModel:
    """Build a float32 causal language model on the CPU, with weights drawn from `seed` alone.

    `intermediate` is the width of the feed-forward layers (default: 3 x `hidden`); `max_positions` counts tokens of
    prompt and response together. The global random state is left as it was. Raises ValueError for an unknown
    architecture, for heads that kv_heads does not divide, and for heads too small for the rollout engines.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r} is not known; choose one of {', '.join(ARCHITECTURES)}")
    if head_dim < SMALLEST_HEAD:
        raise ValueError(f"head_dim={head_dim} is too small for vLLM on CPU; use {SMALLEST_HEAD} or more")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}; each of those serves equally many")
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=max_positions, tie_word_embeddings=True, initializer_range=INITIAL_DEVIATION,
        pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).float()
