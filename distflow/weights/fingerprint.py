"""Checksums of weights as a policy: equal for equal values, however a library lays them out.

A tensor's sum mixes the bits of each entry to 32 bits and adds these up, modulo 2^64. The order of entries, fused
modules and padding by zeros do not change it, and cuts over ranks add up. So the sums that a trainer publishes can be
compared with the parameters that an engine of another library holds. Of two tensors that differ, about one pair in 2^32
has the same sum.

SGLang's processes import a copy of this file, which therefore needs nothing but torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

Sums = dict[str, int]
"""By a tensor's name, as signed integers of 64 bits."""
_IN_CACHE, _IN_KERNEL = 1 << 16, 1 << 24  # entries that are mixed at a time: on a CPU in a core's cache, on a GPU
_FACTOR = 0x9E3779B1 - (1 << 32)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def sums_of(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Sums:
    """Return the sums of tensors; those that are wider than `dtype` are rounded to it. Parts of one name add up."""
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        kind = dtype if tensor.dtype.itemsize > dtype.itemsize else tensor.dtype
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for entries in tensor.detach().reshape(-1).split(_IN_CACHE if tensor.device.type == "cpu" else _IN_KERNEL):
            bits = (entries.to(kind) + 0).view(_INTEGERS[kind.itemsize])  # + 0: a zero has no sign
            bits = bits if kind.itemsize >= 4 else bits.int()
            total += (bits + _FACTOR).mul_(bits).sum()  # a product of 32 bits, which wraps, in a sum of 64
        found[name] = found[name] + total if name in found else total
    return {name: int(total) for name, total in found.items()}


def add_up(values: Iterable[int]) -> int:
    return (sum(values) + (1 << 63)) % (1 << 64) - (1 << 63)


def fingerprint_of(sums: Mapping[str, int]) -> int:
    """Return one number for the weights of all names, above 0."""
    text = json.dumps(sorted(sums.items())).encode()
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


class HeldWeights:
    """Compares the sums of what an engine holds with published ones, from update to update.

    Tensors are compared by name; those of other names by the module that their modules are in, which has the fused ones
    too, or all together. Libraries keep some in another form (decay rates, scaled adapters): such a group need not be
    equal from the start, but it must change whenever what was published of it does.
    """

    def __init__(self) -> None:
        self.equal = set[str]()
        """Groups that have been equal before."""
        self.before: dict[str, tuple[int, tuple[int, ...]]] = {}

    def differing(self, published: Mapping[str, int], held: Mapping[str, int], ranks: int = 1) -> list[str]:
        """Return the names, as published, of tensors that are not held as published. `held`: added up over `ranks`."""
        odd: list[str] = []
        for key, (names, theirs) in _groups(published, held).items():
            sums = _possible([(name, published[name]) for name in names], ranks)
            own = add_up(held[name] for name in theirs)
            changed = self.before.get(key, (own, sums))
            if own in sums:
                self.equal |= {key} if own else set()
            elif key in self.equal or key in published or (changed[0] == own) != (changed[1] == sums):
                odd += names
            self.before[key] = own, sums
        return odd


def _groups(published: Mapping[str, int], held: Mapping[str, int]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the names on both sides of each group that is published."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for side, names in enumerate((published, held)):
        for name in names:
            key = name if name in published and name in held else _owner(name)
            groups.setdefault(key, ([], []))[side].append(name)
    alone = [key for key, sides in groups.items() if not all(sides)]
    rest: tuple[list[str], list[str]] = ([], [])
    for key in alone:
        for side, names in zip(rest, groups.pop(key)):
            side += names
    return groups | ({"": rest} if rest[0] else {})


def _owner(name: str) -> str:
    """Return the module that has a tensor's module; adapters' A and B are separate groups."""
    module, adapter, kind = name.partition(".lora_")
    return f"{module.rpartition('.')[0]}{adapter}{kind[:1]}" if adapter else ".".join(name.split(".")[:-2]) + "."


def _possible(parts: list[tuple[str, int]], ranks: int) -> tuple[int, ...]:
    """Return what tensors may add up to over ranks, each of which has a slice, or a copy of all or of keys and values
    alone."""
    times = [count for count in range(1, ranks + 1) if ranks % count == 0]
    return tuple(add_up(each * (heads if ".k_proj." in name or ".v_proj." in name else count) for name, each in parts)
                 for count in times for heads in times)


def write_sums(model: torch.nn.Module, request: list[tuple[str, Tensor]]) -> None:
    """Write the sums of a model's parameters to the working folder; `request`: a tensor called by the dtype, as SGLang
    hands it to a loader of weights."""
    sums = sums_of(model.named_parameters(), getattr(torch, request[0][0]))
    path = Path(f"sums-{os.getpid()}.json")
    path.with_suffix(".new").write_text(json.dumps(sums))
    path.with_suffix(".new").replace(path)
