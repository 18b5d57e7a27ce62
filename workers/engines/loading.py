"""Loads models and tokenizers from Hugging Face folders, or builds embedded ones."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import GENERATION_CONFIG_NAME

from distflow.config.dag import Head
from distflow.config.model_code import code_of, refusal, settings_in
from distflow.config.run import Model
from distflow.config.shipped import find
from distflow.config.sizes import POSITIONS
from distflow.config.spec import Spec
from distflow.config.templates import of_processor
from distflow.data.checks import training_fields
from distflow.data.dataset import open_training_sets
from distflow.data.problems import answer_text, asked_and_answered, content_text, mended_record, messages_of
from distflow.errors import Diagnostic, InvalidInput, Location, listing, shown
from workers.engines.capabilities import decoder_layers
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.value import with_value_head
from workers.engines.vision import ImageProcessor, LibraryProcessor, attach_images

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*",
                    "merges.txt", "*.model", "tekken.json", "additional_chat_templates/*")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TABLES = ("masked_bias", "inv_freq", "causal_mask")
"""Ends of names of tensors that older files have of a layer, and that a model makes itself."""
_WEIGHTS = {"dtype": "auto", "weights_only": True, "attn_implementation": "eager", "return_dict": True}
"""How weights are read: a .bin file is pickled, and may hold tensors alone. Some models have other classes for other
attention, of which "eager" is right for all; `capabilities.prepare` sets what is used. Configurations of models that
were traced ask for tuples."""


def load_model(spec: Spec, model: Model, head: Head = "lm") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model on the CPU, in the dtype of its files, and its tokenizer. Its weights are pages of the files, which
    all ranks of a machine share; they are the engines' to convert. An embedded one, float32, is built from the run's
    seed and data. `head="value"` takes the trained head of a classifier's folder, and adds a new head to any other
    model."""
    tokenizer = load_tokenizer(spec, model)
    if folder := source_folder(spec, model):
        loaded, processor = _load_folder(folder, head), ImageProcessor.read(folder)
        if spec.run.data.images is not None and processor is None:
            processor = LibraryProcessor.read(folder, loaded.config.model_type, tokenizer)
        return attach_images(loaded, processor), tokenizer
    sizes = {**model.model_dump(exclude={"path"}), "head_dim": model.head_dim, "mixture": model.mixture,
             "max_positions": POSITIONS}
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    built = build_model(len(tokenizer), spec.run.seed, **sizes, **ids)
    return with_value_head(built) if head == "value" else built, tokenizer


def load_tokenizer(spec: Spec, model: Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; that of an embedded one is built from the run's data."""
    folder = source_folder(spec, model)
    if not folder:
        return _embedded_tokenizer(spec, model.takes_images)
    tokenizer = read_tokenizer(folder)
    _require_end(tokenizer, folder)
    return tokenizer


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer as its tokenizer.json has it. Some classes that tokenizer_config.json names build another one
    from its vocabulary: LlamaTokenizerFast drops the blanks of a byte-level one (transformers#45701)."""
    tokenizer, file = _read(AutoTokenizer, folder), folder / "tokenizer.json"
    if tokenizer.is_fast and file.is_file():
        own = Tokenizer.from_file(str(file))
        alike = all(_state(tokenizer.backend_tokenizer, part) == _state(own, part)
                    for part in ("normalizer", "pre_tokenizer", "model", "decoder"))
        tokenizer = tokenizer if alike else _read(PreTrainedTokenizerFast, folder)
    if not tokenizer.chat_template and (processors := of_processor(folder)):
        tokenizer.chat_template, _ = processors
    return tokenizer


def _state(tokenizer: Tokenizer, part: str) -> bytes:
    return getattr(getattr(tokenizer, part), "__getstate__", bytes)() or b""


def known_ends(spec: Spec, model: Model | None) -> list[int]:
    """Return the tokens that end an answer by the model's folder, besides those of its tokenizer."""
    folder = source_folder(spec, model) if model else None
    return _named_ends(folder) if folder else []


def generation_config_of(spec: Spec, model: Model | None, loaded: PreTrainedModel) -> bytes:
    """Return the `generation_config.json` that is saved with a model: that of its folder as it is, since transformers
    reads some that it refuses to write."""
    folder = find(model.path, "models", spec.folder) if model and model.path else None
    if folder and (folder / GENERATION_CONFIG_NAME).is_file():
        return (folder / GENERATION_CONFIG_NAME).read_bytes()
    config = loaded.generation_config
    return config.to_json_string(keys_to_pop=["compile_config"]).encode() if config else b""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer by the files that it was read from, as they are: transformers 5 would write them without
    tokenizer.model, and in a form that version 4 does not read."""
    source = Path(tokenizer.name_or_path) if tokenizer.name_or_path else None
    files = _tokenizer_files(source, tokenizer.vocab_files_names.values()) if source else []
    for file in files:
        copied = folder / file.relative_to(source or folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
    if not files:
        tokenizer.save_pretrained(folder)
    settings, read = settings_in(folder / _TOKENIZER_CONFIG), _read(AutoTokenizer, folder)
    if tokenizer.chat_template and not read.chat_template:  # it was the processor's
        (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template), encoding="utf-8")
    if type(read) is not type(tokenizer) or settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(special := settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = special
        del settings["extra_special_tokens"]
    settings.pop("auto_map", None)  # the code that it names is not there
    if settings:
        (folder / _TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _tokenizer_files(folder: Path, others: Iterable[str]) -> list[Path]:
    """Return a folder's files of a tokenizer. `others`: names that its class has for some."""
    return [*{file for pattern in (*_TOKENIZER_FILES, *others) for file in folder.glob(pattern) if file.is_file()}]


def source_folder(spec: Spec, model: Model) -> Path | None:
    """Return the folder that a model is loaded from; None if it is embedded. Raises InvalidInput: it is gone."""
    if not model.path:
        return None
    if folder := find(model.path, "models", spec.folder):
        return folder
    raise InvalidInput(f"`{model.path}` was there when the run was checked, and is not any more")


def _load_folder(folder: Path, head: Head) -> PreTrainedModel:
    """Load a model; token classifiers count as value models too, since some libraries save critics as such."""
    config = _read(AutoConfig, folder)
    kind = (config.architectures or [""])[0]
    classifier = next((each for each in (AutoModelForSequenceClassification, AutoModelForTokenClassification)
                       if kind.endswith(each.__name__.removeprefix("AutoModel"))), None)
    vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    language = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    kept = classifier if head == "value" else None
    model, report = _read(kept or language, folder, output_loading_info=True, ignore_mismatched_sizes=True, **_WEIGHTS)
    model = _untied_as_loaded(_frozen_as_built(model))
    model = with_value_head(model) if head == "value" and not kept else model
    drawn = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    _require_whole(model, folder, drawn, report["unexpected_keys"])
    _require_read(model, folder, report["unexpected_keys"])
    return model


def _require_whole(model: PreTrainedModel, folder: Path, drawn: set[str], unread: set[str]) -> None:
    """Refuse a folder whose files lack weights of its model, or have them in other shapes: transformers has `drawn`
    them at random, and left others `unread`."""
    if lacking := sorted(drawn & model.state_dict().keys()):
        what = f"`{shown(folder)}` is no whole {type(model).__name__}: its files do not have, or in another shape, " \
               f"{listing(lacking, f'{len(lacking)} of its weights')}"
        other, end = next(((name, end) for name in sorted(unread) for end in lacking if name.endswith(f".{end}")),
                          ("", ""))
        hint = f"It has `{other}`: take `{other.removesuffix(end)}` out of all names." if other else \
            "Take a folder that has them. Base models and classifiers are saved without a head that gives tokens."
        head = getattr(model.get_output_embeddings(), "weight", None)
        if not other and all(model.state_dict(keep_vars=True)[name] is head for name in lacking):
            hint += '\nIf its head is its embeddings, write in its config.json:  "tie_word_embeddings": true'
        raise InvalidInput(Diagnostic(what, None, hint))


def _require_read(model: PreTrainedModel, folder: Path, unread: set[str]) -> None:
    """Refuse a folder with weights that a layer of the model does not read, or another part without parts of its own:
    it was trained with them. Layers that the model lacks, and heads for other tasks, may stay unread."""
    if not unread:
        return
    parts = dict(model.named_modules())
    _require_layers(model, folder, unread)
    inner = {part for layer in decoder_layers(model) for part in layer.modules()}
    odd = list[str]()
    for name in sorted(unread):
        above = name.rpartition(".")[0]
        while above not in parts:
            above = above.rpartition(".")[0]
        part = parts[above]
        has_table = name.removeprefix(f"{above}.") in dict(part.named_buffers()) or name.endswith(_TABLES)
        if not has_table and (part in inner or above and not [*part.children()]):
            odd.append(name)
    if odd:
        what = listing(odd, f"`{shown(folder)}` has weights with which a {type(model).__name__} does not compute")
        hint = 'Correct its config.json: its `model_type`, or a setting such as  "attention_bias": true\n' \
               "If they are scales of quantized weights, take the model before quantization. If nothing needs them, " \
               "remove them from its files."
        raise InvalidInput(Diagnostic(what, None, hint))


def _require_layers(model: PreTrainedModel, folder: Path, unread: set[str]) -> None:
    """Refuse a folder with more layers of the model than its configuration has. Those that predict further tokens have
    other weights, too."""
    layers = decoder_layers(model)
    above = next(name for name, part in model.named_modules() if part is layers)
    further: dict[str, set[str]] = {}
    for name in unread:
        number, _, rest = name.removeprefix(f"{above}.").partition(".")
        if name.startswith(f"{above}.") and number.isdigit() and not rest.endswith(_TABLES):
            further.setdefault(number, set()).add(rest)
    known = {frozenset(layer.state_dict()) for layer in layers}
    if more := sorted(int(number) for number, names in further.items() if frozenset(names) in known):
        what = f"the files of `{shown(folder)}` have layers like the model's that its config.json leaves out, from " \
               f"number {more[0]} on: only {len(layers)} of them would be trained"
        hint = f'Correct it:  "num_hidden_layers": {max(more) + 1}\nOr remove these layers from the files.'
        raise InvalidInput(Diagnostic(what, None, hint))


def _frozen_as_built(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the parameters that the family builds frozen, such as biases of routers: transformers loads them as if
    they were trained."""
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(model.config))
    for name, parameter in built.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)
    return model


def _untied_as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """Let the configuration say that the head is one of its own, where the files have another than the embeddings:
    transformers then keeps both, and other libraries go by the configuration."""
    head, text = model.get_output_embeddings(), model.config.get_text_config()
    if head is not None and getattr(head, "weight", None) is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = text.tie_word_embeddings = False
    return model


def _read(kind: Any, folder: Path, **options: Any) -> Any:
    """Read a part of a model's folder, without running code that is in it. Raises InvalidInput: it needs that."""
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, **options)
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        what, hint = refusal(folder, f"`{shown(folder)}`") if code_of(folder) and isinstance(error, ValueError) else (
            f"transformers cannot read `{shown(folder)}` ({type(error).__name__}: {' '.join(str(error).split())})", "")
        raise InvalidInput(Diagnostic(what, None, hint)) from error


def _require_end(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a tokenizer without an end token: targets would teach none, and padding would have no token. That of the
    model's configuration is only proposed, since the chat template may end a turn with another."""
    if tokenizer.eos_token_id is not None:
        return
    first = next(iter(_named_ends(folder)), None)
    token = tokenizer.convert_ids_to_tokens(first) if first is not None else None
    what = "the tokenizer has no end-of-sequence token, so that no answer could end or learn to"
    hint = f'Add to it:  "eos_token": {json.dumps(token or "TOKEN", ensure_ascii=False)}'
    hint += "   (the model's configuration names it)" if token else "   with the token that ends an answer"
    raise InvalidInput(Diagnostic(what, Location(shown(folder / "tokenizer_config.json")), hint))


def _named_ends(folder: Path) -> list[int]:
    """Return the end tokens of `generation_config.json`, or of `config.json` where that names none."""
    has_own = (folder / GENERATION_CONFIG_NAME).is_file()
    named: Any = _read(GenerationConfig, folder).eos_token_id if has_own else None
    if named is None:
        named = GenerationConfig.from_model_config(_read(AutoConfig, folder)).eos_token_id
    ends = named if isinstance(named, list) else [named] if named is not None else []
    if odd := next((end for end in ends if not isinstance(end, int)), None):
        raise InvalidInput(Diagnostic(f"`eos_token_id` holds {json.dumps(odd)}, which is no number of a token",
                                      Location(shown(folder / (GENERATION_CONFIG_NAME if has_own else "config.json"))),
                                      "Write the number that the tokenizer has for it."))
    return ends


def _embedded_tokenizer(spec: Spec, with_images: bool) -> PreTrainedTokenizerBase:
    data = spec.run.data
    sets, fields = open_training_sets(data, spec.data_path).values(), training_fields(spec)
    first = (mended_record(record) for records in sets for record in records.get(range(min(len(records), 2000)))
             if not (fields.missing(record) or fields.empty(record)))
    texts = ("\n".join(content_text(message.get("content")) for message in messages_of(record, data)) +
             f" {answer_text(asked_and_answered(record, data)[1])}" for record in first)
    return build_tokenizer(texts, with_images=with_images)
