"""Root mean square norms by torch's fused kernel, in place of the six kernels of transformers' layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


def fuse_norms(model: nn.Module) -> int:
    """Compute those norms of a model by one kernel that compute what it computes; return how many."""
    norms = [module for module in model.modules() if is_rms_norm(type(module))]
    for norm in norms:
        norm.__class__ = _fused(type(norm))
    return len(norms)


@functools.cache
def is_rms_norm(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class normalise by the root mean square and scale by their weight, by trying one."""
    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        with torch.device("cpu"):
            norm: Any = kind(8)
            norm.weight.data.copy_(torch.linspace(0.5, 2, 8))
            given = torch.linspace(-1, 3, 32).view(4, 8)
            return torch.allclose(norm(given), rms_norm(given, (8,), norm.weight, norm.variance_epsilon), atol=1e-6)
    except (AttributeError, TypeError):  # made, or scaled, in another way
        return False


@functools.cache
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward})


def _forward(norm: Any, states: Tensor) -> Tensor:
    return rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)
