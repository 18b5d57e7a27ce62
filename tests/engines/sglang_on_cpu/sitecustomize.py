"""Loaded by every Python of SGLang's environment in tests: lets its server run where there is no GPU.

Packages of GPU kernels are there by name only. SGLang imports them wherever it runs and calls none of them on a CPU
with the flags that distflow sets there; their own builds need a CUDA driver or a CUDA build of torch as soon as they
are imported. The one kernel that sampling with seeds needs is here in plain torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable

ABSENT = ("sgl_kernel", "triton", "torchvision")
MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""SGLang reads all that it has whenever it starts, twice, which takes most of that time."""


class Absent(type):
    """Anything of such a package is a class of this kind: as a decorator it changes nothing, as a function it gives
    itself, nothing is an instance of it."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("__") or name == "active":  # of Triton's drivers none is, without a GPU
            raise AttributeError(name)
        return Absent(name, (), {})

    def __call__(cls, *values: object, **settings: object) -> object:
        return values[0] if len(values) == 1 and isinstance(values[0], types.FunctionType) else cls


class Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these packages and everything inside them."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        known = fullname.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = functools.partial(Absent.__getattr__, Absent(spec.name, (), {}))
        module.__version__ = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class Afterwards(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as it is loaded."""

    def __init__(self, calls: dict[str, Callable[[types.ModuleType], None]]):
        self.calls = calls

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        call = self.calls.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if call else None
        if spec:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), call(module))
        return spec


def _seeded_attention(choices: types.ModuleType) -> None:
    """Plain torch attends to each row alone, so that it is as deterministic as those that SGLang lists."""
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def _seeded_sampling(operators: types.ModuleType) -> None:
    """Of the deterministic mode the seeds alone: its matrix products are Triton's."""
    import torch

    operators.enable_batch_invariant_mode = lambda: None
    kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
    kernels.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    kernels.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    operators.kernels = kernels  # they are there as long as this is


def _unpinned(pools: types.ModuleType) -> None:
    """CUDA alone can pin host memory."""
    pools._cuda_host_register = lambda *_, **__: None


def murmur_hash32(seed, positions, columns):
    """MurmurHash3 (Appleby 2011), 32 bits, of each row's seed (64 bits) and position and each column: uint32 [R, C]."""
    import torch

    low = 0xFFFFFFFF
    seed = seed.view(torch.int64)[:, None]
    hashed = torch.zeros(1, dtype=torch.int64)
    for block in (seed & low, (seed >> 32) & low, positions.long()[:, None] & low, columns.long() & low):
        block = _rotated(block * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        hashed = (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & low
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> shift)) * factor & low
    return hashed.to(torch.uint32)


def _rotated(value, by: int):
    return (value << by | value >> (32 - by)) & 0xFFFFFFFF


def _other_models() -> str:
    """The names of SGLang's other modules of models."""
    found = importlib.util.find_spec("sglang")
    folder = os.path.join(os.path.dirname(found.origin), "srt", "models") if found else None
    names = {name.removesuffix(".py") for name in os.listdir(folder)} if folder else set()
    return ",".join(sorted(names.difference(MODELS)))


os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", _other_models())
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # its compiler looks for Triton, and takes minutes
sys.meta_path.insert(0, Afterwards({"sglang.srt.arg_groups.choices": _seeded_attention,
                                    "sglang.srt.batch_invariant_ops": _seeded_sampling,
                                    "sglang.srt.mem_cache.pool_host.common": _unpinned}))
sys.meta_path.append(Nothing())
