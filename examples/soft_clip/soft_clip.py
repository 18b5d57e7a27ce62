"""A loss of your own: PPO's, but the gradient fades as the ratio leaves 1, where clipping cuts it off."""

from torch import Tensor

from distflow import loss, metric


@loss
def soft_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, sharpness: float = 5.0) -> Tensor:
    """Return the loss of each token; its gradient at a ratio of 1 is that of PPO."""
    moved = (logprobs - old_logprobs).exp() - 1
    metric("soft_clip/moved", moved.abs())
    return -(sharpness * moved).tanh() / sharpness * advantages
