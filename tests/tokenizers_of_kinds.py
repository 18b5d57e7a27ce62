"""Small tokenizers of the kinds that models have, each with a chat template of one of their habits.

    KINDS[name]()   builds one; nothing is downloaded

Tokenizers: byte-level BPE, with and without merges across line ends; BPE and Unigram in the manner of SentencePiece,
which write a blank before a text or before each stretch of it. Templates: see the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [f"What is {a} + {b}? The answer is {a + b}.\n\nuser: think, assistant: [INST] USER system tool <b>"
         for a in range(12) for b in range(12)]
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]

CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OPENS_THINK = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
REFUSES_SYSTEM = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
                  "{% endif %}" + CHATML)
STRIPS_THINKING = (  # an answer before the last question loses its thinking; the last one has an empty one at least
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% set said = message['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in message['content'] else '' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TRIMS = ("{{ bos_token }}{% for message in messages %}<|head|>{{ message['role'] }}<|body|>\n\n"
         "{{ message['content'] | trim }}<|eot|>{% endfor %}"
         "{% if add_generation_prompt %}<|head|>assistant<|body|>\n\n{% endif %}")
ZEPHYR = ("{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}</s>\n{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
PHI = ("{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
       "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")  # special tokens take the line ends behind them
LLAVA = ("{% for message in messages %}{{ message['role'].upper() }}:\n{% for part in message['content'] | "
         "selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
         "{% if message['role'] == 'assistant' %}</s>{% else %}\n{% endif %}{% endfor %}"
         "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}")  # contents are parts
INST = ("{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] | trim }} </s>"
        "{% else %}{{ bos_token }}[INST] {{ message['content'] | trim }} [/INST]{% endif %}{% endfor %}")
LETTERS = ("{% for message in messages %}{% if message['role'] == 'assistant' %}ASSISTANT: {{ message['content'] }}</s>"
           "{% else %}{{ message['role'] | upper }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}ASSISTANT:{% endif %}")
CLOSES = CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}")
NO_END = ("{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
          "{% if add_generation_prompt %}### assistant:\n{% endif %}")

_LINE_ENDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(template: str | None, special: Sequence[str] = IM, *, eos: str = "<|im_end|>", bos: str | None = None,
               line_ends: bool = False) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer. `line_ends`: those behind signs are merged with them, as in newer vocabularies."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if not line_ends else \
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LINE_ENDS), behavior="isolated"),
                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=[*special],
                                                         initial_alphabet=alphabet, show_progress=False))
    return _tokenizer(inner, template, special, eos, bos)


def sentencepiece(template: str | None,
                  special: Sequence[str | AddedToken] = ("<|user|>", "<|assistant|>", "<|system|>"), *,
                  scheme: str = "first", unigram: bool = False, adds_end: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer that writes a blank before a text (`first`), or before each stretch between special tokens
    (`always`)."""
    own = ["<unk>", "<s>", "</s>", *special]
    inner = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=True)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    letters = sorted({"▁", "\n", *map(chr, range(33, 127)), *"é日本🙂"})
    trainer = trainers.UnigramTrainer(vocab_size=420, special_tokens=own, unk_token="<unk>", initial_alphabet=letters,
                                      show_progress=False) if unigram else \
        trainers.BpeTrainer(vocab_size=560, special_tokens=[*own, *(f"<0x{byte:02X}>" for byte in range(256))],
                            initial_alphabet=letters, show_progress=False)
    inner.train_from_iterator(TEXTS, trainer)
    inner.post_processor = processors.TemplateProcessing(single=f"<s> $A{' </s>' if adds_end else ''}",
                                                         special_tokens=[("<s>", 1), ("</s>", 2)])
    return _tokenizer(inner, template, own, "</s>", "<s>")


def _tokenizer(inner: Tokenizer, template: str | None, special: Sequence[str | AddedToken], eos: str,
               bos: str | None) -> PreTrainedTokenizerFast:
    unknown = "<unk>" if "<unk>" in special else None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, bos_token=bos, unk_token=unknown, clean_up_tokenization_spaces=False,
        extra_special_tokens=[token for token in special if token not in (eos, bos, unknown)])
    tokenizer.chat_template = template
    return tokenizer


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": lambda: byte_level(CHATML),
    "line_ends": lambda: byte_level(CHATML, line_ends=True),
    "special_tags": lambda: byte_level(CHATML, [*IM, *TAGS]),
    "opens_think": lambda: byte_level(OPENS_THINK),
    "refuses_system": lambda: byte_level(REFUSES_SYSTEM),
    "other_end": lambda: byte_level(CHATML, eos="<|endoftext|>"),
    "closes": lambda: byte_level(CLOSES, eos="<|endoftext|>"),
    "strips_thinking": lambda: byte_level(STRIPS_THINKING, [*IM, *TAGS]),
    "trims": lambda: byte_level(TRIMS, ["<|begin|>", "<|head|>", "<|body|>", "<|eot|>"], eos="<|eot|>",
                                bos="<|begin|>", line_ends=True),
    "no_end": lambda: byte_level(NO_END, eos="<|endoftext|>", line_ends=True),
    "zephyr": lambda: sentencepiece(ZEPHYR),
    "always_blank": lambda: sentencepiece(ZEPHYR, scheme="always"),
    "unigram": lambda: sentencepiece(ZEPHYR, unigram=True),
    "takes_blanks": lambda: sentencepiece(PHI, [AddedToken(token, rstrip=True, normalized=False) for token in
                                                ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")]),
    "inst": lambda: sentencepiece(INST, ()),
    "parts": lambda: byte_level(LLAVA, ["<unk>", "<s>", "</s>"], eos="</s>", bos="<s>"),
    "letters": lambda: sentencepiece(LETTERS, ()),
    "no_template": lambda: byte_level(None),
    "no_template_adds_end": lambda: sentencepiece(None, (), adds_end=True),
}
