"""A reward model that is an encoder, as a tuned DeBERTa or RoBERTa: it reads question and answer at once."""

import functools

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distflow import reward


@functools.cache
def loaded(folder: str):
    return AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder).eval()


@reward(timeout=600)
def encoder_reward(completions: list[str], questions: list[str], *, model: str, rows: int = 16) -> list[float]:
    """Return the first label's logit of each answer, `rows` at a time, by the model's own tokenizer and forward."""
    tokenizer, classifier = loaded(model)
    scores = []
    for start in range(0, len(completions), rows):
        pairs = (texts[start : start + rows] for texts in (questions, completions))
        with torch.inference_mode():
            inputs = tokenizer(*pairs, padding=True, truncation=True, return_tensors="pt")
            scores += classifier(**inputs).logits[:, 0].tolist()
    return scores
