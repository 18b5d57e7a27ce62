"""Loads models and tokenizers from Hugging Face folders, or builds embedded ones."""

from __future__ import annotations

import json
from pathlib import Path

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
)

from distflow.config.dag import Head
from distflow.config.load import Spec
from distflow.config.run import Model
from distflow.config.shipped import find
from distflow.data.dataset import fields_of, open_training_sets
from distflow.data.problems import answer_text, asked_and_answered, content_text, mended_record, messages_of
from distflow.errors import Diagnostic, InvalidInput, Location, shown
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.value import with_value_head
from workers.engines.vision import ImageProcessor, attach_images


def load_model(spec: Spec, model: Model, head: Head = "lm") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model on the CPU, in the dtype of its files, and its tokenizer. Its weights are pages of the files, which
    all ranks of a machine share; they are the engines' to convert. An embedded one, float32, is built from the run's
    seed and data. `head="value"` takes the trained head of a classifier's folder, and adds a new head to any other
    model."""
    tokenizer = load_tokenizer(spec, model)
    if model.path:
        folder = _existing(find(model.path, "models", spec.folder), model.path)
        return attach_images(_load_folder(folder, head), ImageProcessor.read(folder)), tokenizer
    sizes = {**model.model_dump(exclude={"path", "experts", "experts_per_token"}), "mixture": model.mixture}
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    built = build_model(len(tokenizer), spec.run.seed, **sizes, **ids)
    return with_value_head(built) if head == "value" else built, tokenizer


def load_tokenizer(spec: Spec, model: Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; that of an embedded one is built from the run's data."""
    if not model.path:
        return _embedded_tokenizer(spec, model.takes_images)
    folder = _existing(find(model.path, "models", spec.folder), model.path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _require_end(tokenizer, folder)
    return tokenizer


def _existing(path: Path | None, name: str) -> Path:
    if path is None:
        raise InvalidInput(f"`{name}` was there when the run was checked, and is not any more")
    return path


def _load_folder(folder: Path, head: Head) -> PreTrainedModel:
    """Load a model; token classifiers count as value models too, since some libraries save critics as such."""
    kind = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
    classifier = next((each for each in (AutoModelForSequenceClassification, AutoModelForTokenClassification)
                       if kind.endswith(each.__name__.removeprefix("AutoModel"))), None)
    if head == "value" and classifier:
        return classifier.from_pretrained(folder, dtype="auto")
    vision = type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype="auto")
    return with_value_head(model) if head == "value" else model


def _require_end(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a tokenizer without an end token: targets would teach none, and padding would have no token. That of the
    model's configuration is only proposed, since the chat template may end a turn with another."""
    if tokenizer.eos_token_id is not None:
        return
    named = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    if (folder / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(folder).eos_token_id or named
    first = next(iter(named), None) if isinstance(named, list) else named
    token = tokenizer.convert_ids_to_tokens(first) if first is not None else None
    what = "the tokenizer has no end-of-sequence token, so that no answer could end or learn to"
    hint = f'Add to it:  "eos_token": {json.dumps(token or "TOKEN", ensure_ascii=False)}'
    hint += "   (the model's configuration names it)" if token else "   with the token that ends an answer"
    raise InvalidInput(Diagnostic(what, Location(shown(folder / "tokenizer_config.json")), hint))


def _embedded_tokenizer(spec: Spec, with_images: bool) -> PreTrainedTokenizerBase:
    data = spec.run.data
    sets, fields = open_training_sets(data, spec.data_path).values(), fields_of(data, data.columns)
    first = (mended_record(record) for records in sets for record in records.get(range(min(len(records), 2000)))
             if not fields.empty(record))
    texts = ("\n".join(content_text(message.get("content")) for message in messages_of(record, data)) +
             f" {answer_text(asked_and_answered(record, data)[1])}" for record in first)
    return build_tokenizer(texts, with_images=with_images)
