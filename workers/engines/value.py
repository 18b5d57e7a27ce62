"""Value head: a language model with one number per token, for critics and reward models.

Hugging Face's form is a sequence classifier of one label (`AutoModelForSequenceClassification`), in which
reward models are published; the head is the linear layer `score`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, Cache, PreTrainedModel

from distflow.errors import EngineError
from workers.engines.context_parallel import ContextParallelCache
from workers.engines.policy import PackedRows, SharedPrompt, last_states


class ValueModel(SharedPrompt):
    """Value head: `values` [T], read where each response token is predicted, and `scores` [B], read at the last token
    (Ouyang et al. 2022, §3.5) that is not the configuration's padding, where a classifier's own class reads it. It
    computes in float32: bfloat16 would round values to two or three digits."""

    after_last = 1

    def __init__(self, model: PreTrainedModel, chunks: int = 4, context: ContextParallelCache | None = None):
        super().__init__(model, chunks, context)
        _head_of(model)
        padding = model.config.get_text_config().pad_token_id
        self.padding = -1 if padding is None else padding

    def run(self, tokens: Tensor, only_last: bool = False, **places) -> tuple[Tensor, Cache]:
        return last_states(self.model, tokens, only_last, **places)

    def read(self, outputs: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor]:
        head = _head_of(self.model)
        weight, bias = head.weight, head.bias
        values = nn.functional.linear(outputs.float(), weight.float(), bias if bias is None else bias.float())
        return (values.squeeze(-1),)

    def forward(self, *inputs: Tensor, images: dict[str, Tensor] | None = None, packed: PackedRows | None = None,
                plain: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
        prompts, prompt_lengths, prompt_of, responses, response_lengths = inputs
        (all_values,) = super().forward(prompts, prompt_lengths, prompt_of, responses, response_lengths, images=images,
                                        packed=packed, plain=plain)
        ends = (response_lengths + 1).cumsum(0) - 1
        before = torch.ones(len(all_values), dtype=torch.bool, device=ends.device)
        before[ends] = False
        places = torch.arange(1, responses.shape[1] + 1, device=ends.device)
        read = (places <= response_lengths[:, None]) & (responses != self.padding)
        return all_values[before], all_values[ends - response_lengths + (places * read).amax(1)]


def _head_of(model: nn.Module) -> nn.Linear:
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise EngineError(f"{type(model).__name__} has no linear head `score` of one number, as a role with  "
                          "head: value  needs")
    return score


@torch.no_grad()
def with_value_head(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the vocabulary head of a causal language model by a value head of zeros; other weights are shared."""
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(model.config), None)
    if kind is None:
        raise EngineError(f"transformers has no sequence classifier for {type(model).__name__}, so a role with this "
                          "model cannot have  head: value")
    model.config.num_labels = 1
    with torch.device("meta"):
        valued = kind(model.config)
    setattr(valued, valued.base_model_prefix, model.base_model)
    valued.score = nn.Linear(_head_of(valued).in_features, 1, bias=False)  # OPT's may be narrower than its layers
    nn.init.zeros_(valued.score.weight)
    return valued.train(model.training)
