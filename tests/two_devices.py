"""A made-up second device, on which tensors of the CPU and of the GPU must not meet: for machines without a GPU.

Its tensors are wrappers around those of the CPU. Every operation checks that its tensors are on one device, by torch's
own rules: a tensor of the CPU without a dimension may meet any, an index may be on the CPU, copies cross.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_CROSSING = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
            aten._unsafe_index.Tensor}


_READING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
            aten._unique2.default, aten.unique_consecutive.default}
READS: list[str] = []
"""Operations that stop a process until the device is done, in the order in which they were made."""


class Cuda(torch.Tensor):
    """A tensor of the made-up device."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Cuda:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=inner.dtype,
                                                   storage_offset=inner.storage_offset(), device="cpu")
        made.inner = inner
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def tolist(self) -> Any:
        READS.append("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        _refuse_both(func, args, kwargs)
        _note_read(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if func is aten.copy_.default or (func._schema.is_mutable and args and isinstance(args[0], Tensor)
                                          and isinstance(out, Tensor)):
            return args[0]
        down = func is aten._to_copy.default and device is not None and torch.device(device).type == "cpu"
        return out if down else tree_map(lambda each: Cuda(each) if isinstance(each, Tensor) else each, out)


def _inner(each: Any) -> Any:
    return each.inner if isinstance(each, Cuda) else each


def _note_read(func: Any, args: tuple, kwargs: dict) -> None:
    masks = func in _INDEXED and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1] or ())
    sizes = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if func in _READING or masks or sizes:
        READS.append(str(func))


def _refuse_both(func: Any, args: tuple, kwargs: dict) -> None:
    checked = [args[0], *args[2:]] if func in _INDEXED else [args, kwargs]
    tensors = [each for each in tree_leaves(checked) if isinstance(each, Tensor)]
    kinds = {isinstance(each, Cuda) for each in tensors if isinstance(each, Cuda) or each.dim() > 0}
    if func not in _CROSSING and len(kinds) > 1:
        raise RuntimeError(f"two devices in {func}: {[(type(each).__name__, tuple(each.shape)) for each in tensors]}")


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, dtype: torch.dtype | None) -> Cuda:
        return Cuda(tensor.detach().to(dtype) if dtype else tensor.detach().clone())


class TwoDevices(TorchFunctionMode):
    """Inside of it `cuda` may be asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return _moved(func, args[0], args[1:], kwargs)
        if func is torch.Tensor.cpu:
            READS.extend(["cpu"] * isinstance(args[0], Cuda))
            return args[0].inner.clone() if isinstance(args[0], Cuda) else args[0]
        if _is_cuda(kwargs.get("device")):
            if any(isinstance(each, Cuda) for each in args):
                return args[0] if func is torch.as_tensor else func(*args, **kwargs)
            kwargs["device"] = "cpu"
            return Cuda(func(*args, **kwargs))
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _moved(func: Any, tensor: Tensor, asked: tuple, named: dict) -> Tensor:
    dtype, device = named.get("dtype"), named.get("device")
    for each in asked:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, (str, torch.device)):
            device = each
    here = isinstance(tensor, Cuda)
    if here and device is not None and not _is_cuda(device):
        return tensor.inner.to(dtype, copy=True) if dtype else tensor.inner.clone()
    if not here and _is_cuda(device):
        return _Up.apply(tensor, dtype)
    return func(tensor, dtype) if dtype else tensor.clone() if named.get("copy") else tensor


def to_cuda(model: nn.Module) -> nn.Module:
    """Put all parameters and buffers on the made-up device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.setdefault(id(parameter), nn.Parameter(Cuda(parameter.data.clone()), parameter.requires_grad))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else Cuda(buffer.clone())
    return model
