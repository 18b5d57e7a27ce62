"""Log-probabilities of responses under a causal language model, the prompt read once for all its responses.

The responses of a group share their prompt. Its keys and values are computed once and lent to each response,
gradients flowing back through them: with G responses of R tokens after a prompt of P tokens, P + G·R tokens pass
through the model instead of G·(P + R).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.data.batch import Ragged


class Policy(nn.Module):
    """Wraps a transformers model so that one forward answers what training and inference ask."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, prompts: Tensor, prompt_lengths: Tensor, prompt_of: Tensor, responses: Tensor,
                response_lengths: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """
        Args:
            prompts: [P, L] tokens, padded on the left; prompt_lengths: [P].
            prompt_of: [B] the prompt of each response.
            responses: [B, R] tokens, R at least 2, padded on the right; response_lengths: [B].
            temperature: divides the logits.

        Returns:
            logprobs [T] of all response tokens back to back, and entropies [T] (detached), both float32.
        """
        width = prompts.shape[1]
        mask = (torch.arange(width, device=prompts.device) >= width - prompt_lengths[:, None]).long()
        prefix = self.model(prompts, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                            use_cache=True, logits_to_keep=1)
        prefix.past_key_values.batch_select_indices(prompt_of)
        steps = torch.arange(responses.shape[1], device=prompts.device)
        valid = steps < response_lengths[:, None]
        rest = self.model(responses[:, :-1], attention_mask=torch.cat([mask[prompt_of], valid[:, :-1].long()], 1),
                          position_ids=prompt_lengths[prompt_of, None] + steps[:-1],
                          past_key_values=prefix.past_key_values, use_cache=True)
        logits = torch.cat([prefix.logits[prompt_of], rest.logits], 1)[valid].float() / (temperature or 1.0)
        logprobs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        tokens = responses[valid]
        return logprobs[torch.arange(len(tokens), device=tokens.device), tokens], entropy  # no view: FSDP warns of it


def inputs_of(prompts: Ragged, responses: Ragged, pad_token: int, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors that `Policy.forward` takes; equal prompts that follow each other become one."""
    starts = torch.ones(len(prompts), dtype=torch.bool)
    padded = prompts.padded(pad_token, side="left")
    same = (padded[1:] == padded[:-1]).all(1) & (prompts.lengths[1:] == prompts.lengths[:-1])
    starts[1:] = ~same
    tokens = responses.padded(pad_token)
    tokens = nn.functional.pad(tokens, (0, max(0, 2 - tokens.shape[1])), value=pad_token)
    parts = (padded[starts], prompts.lengths[starts], starts.long().cumsum(0) - 1, tokens, responses.lengths)
    return tuple(part.to(device) for part in parts)
