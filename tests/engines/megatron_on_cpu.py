"""Megatron-core without a GPU, for tests: import it before an engine is made. It does nothing where CUDA is available.

Modules of megatron.core get a `torch` of their own in which the current device is the CPU; the real one is untouched,
so that other libraries work as ever. Two methods of tensors are patched, for callers in megatron.core alone: `cuda`,
and `type`, since its optimizer compares the name of a tensor's type with `torch.cuda.FloatTensor`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any

import torch

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "zeros",
             "zeros_like")
CPU = torch.device("cpu")


class Stream:
    """A stream or an event that is always done: on a CPU each operation ends before the next begins."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = wait = synchronize = nothing

    def record_event(self, *_: Any) -> Stream:
        return self

    record = record_event

    def query(self) -> bool:
        return True


class Cuda(types.ModuleType):
    """`torch.cuda` as megatron.core sees it."""

    Stream = Event = Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
            setattr(self, name, lambda *_, **__: None)
        self.current_device = lambda: CPU
        self.current_stream = self.default_stream = lambda *_: Stream()
        self.stream = lambda _: contextlib.nullcontext()
        self.memory_allocated = self.max_memory_allocated = lambda *_: 0
        self.get_rng_state = lambda *_: torch.get_rng_state()
        self.set_rng_state = lambda state, *_: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class Torch(types.ModuleType):
    """`torch` as megatron.core sees it: what it makes on "cuda" is made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = Cuda()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device", "")):
            options["device"] = CPU
        return factory(*arguments, **options)

    return make


def _type(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    result = _real_type(tensor, *arguments, **options)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) and _megatron_asks() else result


def _cuda(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return tensor if _megatron_asks() else _real_cuda(tensor, *arguments, **options)


def _megatron_asks() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core")


def _moved(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Megatron's own leaves what is on the CPU already as it is, even where numbers are wanted of it."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_real_type, _real_cuda = torch.Tensor.type, torch.Tensor.cuda

if not torch.cuda.is_available():
    from megatron.core.transformer.moe import token_dispatcher

    import workers.engines.megatron.engine  # noqa: F401 - and with it all modules of megatron.core that it uses

    token_dispatcher.maybe_move_tensor_to_cpu = _moved
    torch.Tensor.type, torch.Tensor.cuda = _type, _cuda
    seen = Torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = seen
