"""Loaded by every Python of SGLang's environment: packages with kernels for GPUs only are there by name.

SGLang imports them wherever it runs and calls none of them on a CPU with the flags that distflow sets there. Their
own builds need a CUDA driver or a CUDA build of torch as soon as they are imported.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types

ABSENT = ("sgl_kernel", "triton", "torchvision")


class Absent(type):
    """Anything of such a package is a class of this kind: as a decorator it changes nothing, as a function it gives
    itself, nothing is an instance of it."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("__") or name == "active":  # of Triton's drivers none is, without a GPU
            raise AttributeError(name)
        return Absent(name, (), {})

    def __call__(cls, *values: object, **settings: object) -> object:
        return values[0] if len(values) == 1 and isinstance(values[0], types.FunctionType) else cls


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


sys.meta_path.append(Finder())
