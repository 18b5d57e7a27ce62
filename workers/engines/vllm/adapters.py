"""Low-rank adapters in vLLM: it reads the base from the model's files, and each version of the adapters from a folder.

vLLM takes adapters from folders in peft's format alone. They lie in memory and are removed once they are read; one
adapter is replaced in place, so that rows under way go on with the new one, as they do with whole weights.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.config.run import Lora
from distflow.errors import EngineError
from workers.engines.adapters import NAME, is_adapter, peft_name

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core_client import EngineCoreClient

_ID = 1  # of the only adapter
_MEMORY = Path("/dev/shm")


def write_base(model: PreTrainedModel, folder: str) -> None:
    """Put the weights of a model without its adapters into a folder: links to its files, if it was read from some."""
    source = model.name_or_path or ""  # none of a model that was built here
    files = [*Path(source).glob("*.safetensors*")] if source else []
    for file in files:
        (Path(folder) / file.name).symlink_to(file.resolve())
    if not files:
        save_file({name.replace(".base_layer.", "."): parameter.detach().cpu().contiguous()
                   for name, parameter in model.named_parameters() if not is_adapter(name)},
                  Path(folder) / "model.safetensors", metadata={"format": "pt"})


def arguments(lora: Lora) -> dict[str, object]:
    """Return what vLLM's start is told. It has room for ranks of some sizes only."""
    from vllm.config.lora import MaxLoRARanks

    room = [rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank]
    if not room:
        raise EngineError(f"vLLM takes adapters of rank {max(get_args(MaxLoRARanks))} at most, and `lora` has "
                          f"{lora.rank}. Lower it, or  rollout: hf")
    return {"enable_lora": True, "max_lora_rank": room[0], "max_loras": 1, "max_cpu_loras": 1}


def request(folder: str = "read before", load: bool = False) -> LoRARequest:
    """Return a request for the adapter; `load`: of a new version, from a folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, _ID, folder, load_inplace=load)


def load(core: EngineCoreClient, lora: Lora, weights: Mapping[str, Tensor]) -> None:
    """Replace the adapter. weights: by their names in the trainer."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        save_file({peft_name(name).replace(f".{NAME}.", "."): tensor for name, tensor in weights.items()},
                  Path(folder) / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha,
                  "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in weights})}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        core.add_lora(request(folder, load=True))


def adapters_of(model: nn.Module, lora: Lora | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of the adapter in vLLM's only slot, by their names in the trainer; none if none is in use.
    vLLM has B times the scale, which is undone where that is exact."""
    scale = lora.alpha / lora.rank if lora else 1.0
    exact = math.frexp(scale)[0] == 0.5
    for name, module in model.named_modules() if lora else ():
        for kind in ("a", "b"):
            for matrix in getattr(module, f"lora_{kind}_stacked", ()):
                whole = matrix[0] / scale if kind == "b" and exact else matrix[0]
                yield f"{name}.lora_{kind.upper()}.{NAME}.weight{'' if exact or kind == 'a' else ' scaled'}", whole
