"""What distflow makes of every causal language model that transformers registers: the table of docs/models.md.

Each family is a tiny model with random weights, of `tests/engines/families.py`; the checks are those of
`tests/engines/family_checks.py`, each in a process of its own. The results go to benchmarks/results/families.json after
each family, and those that are there are not measured again. `make families` measures what is missing:

    python -m benchmarks.families              # all that are not there yet
    python -m benchmarks.families gemma3_text  # these again
    python -m benchmarks.families gemma3_text --device cuda --dtype bfloat16 --results elsewhere.json
    python -m benchmarks.families --rollout vllm    # sampling by vLLM, with a Python that has it
    python -m benchmarks.families --rollout sglang  # sampling by the SGLang of DISTFLOW_SGLANG_PYTHON
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1",
               "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
RESULTS = ROOT / "benchmarks/results/families.json"
SECONDS = 240  # of one check
PRELOAD = ["engines.family_checks", "workers.engines.adapters", "workers.preflight.model"]
ASK = """
import json, os, pkgutil
from importlib.metadata import version
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ""
import sglang.srt.models as models
from sglang.srt.models.registry import ModelRegistry
known = {name: ModelRegistry.models[name].__module__.rpartition(".")[2] for name in ModelRegistry.get_supported_archs()}
print(json.dumps([version("sglang"), known, [each.name for each in pkgutil.iter_modules(models.__path__)]]))
"""
"""What SGLang's Python is asked: its version, the module of each architecture that its registry has, all modules."""


def main() -> int:
    """Measure the families that are named, or all without a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rollout", choices=("hf", "vllm", "sglang"), default="hf", help="the engine that samples")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of distflow's side")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of distflow's side")
    given = parser.parse_args()
    os.environ |= {"FAMILIES_DEVICE": given.device, "FAMILIES_DTYPE": given.dtype}
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers
    from engines.families import FAMILIES, kind_of

    data = json.loads(given.results.read_text()) if given.results.exists() else {}
    results, own = data.get("families", {}), given.rollout == "hf"
    measure_one = measure if own else Sampling(given.rollout)
    versions = {name: data[name] for name in ("transformers", "vllm", "sglang") if name in data} | (
        {given.rollout: measure_one.version} if isinstance(measure_one, Sampling) else
        {"transformers": transformers.__version__})
    context = multiprocessing.get_context("spawn" if given.rollout == "sglang" else "forkserver")  # by the environment
    context.set_forkserver_preload([*PRELOAD, *(["vllm.v1.engine.llm_engine"] if given.rollout == "vllm" else [])])
    for family in given.families or [name for name in FAMILIES if ("kind" if own else given.rollout)
                                     not in results.get(name, {})]:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure_one(family, Path(folder), context)
        results[family] = {"kind": kind_of(family), **results.get(family, {}), **measured}
        print(family, json.dumps(results[family] if own else measured, ensure_ascii=False), flush=True)
        ordered = {name: results[name] for name in FAMILIES if name in results}
        text = json.dumps({**versions, "families": ordered}, indent=1, ensure_ascii=False)
        given.results.write_text(text + "\n")
    return 0


def measure(family: str, folder: Path, context: Any) -> dict[str, Any]:
    """Return what each check says of a family, see `outcome`; `built` is why there is no model to be checked."""
    from engines import family_checks

    written = outcome(context, folder, family_checks.write, family)
    if "failed" in written:
        return {"built": written["failed"]}
    return {name: outcome(context, folder, check) for name, check in family_checks.CHECKS.items()}


class Sampling:
    """Measures how an engine of another library samples, in its own environment."""

    def __init__(self, rollout: str):
        from distflow.config.models import ROLLOUTS, installed

        self.rollout, self.modules = rollout, list[str]()
        if rollout == "vllm":
            from vllm.model_executor.models.registry import ModelRegistry

            self.version = installed(ROLLOUTS[rollout])
            self.known = {name: ModelRegistry.models[name].module_name for name in ModelRegistry.get_supported_archs()
                          if not ModelRegistry.models[name].class_name.startswith("Transformers")}
        else:
            asked = subprocess.run([os.environ["DISTFLOW_SGLANG_PYTHON"], "-c", ASK], check=True, capture_output=True,
                                   text=True, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}).stdout
            self.version, self.known, self.modules = json.loads(asked.splitlines()[-1])

    def __call__(self, family: str, folder: Path, context: Any) -> dict[str, Any]:
        """Return whether the engine's registry `knows` the family, and what comes of sampling with it. What is sampled
        wrongly, the proofs of a run's start have to refuse."""
        from engines import family_checks
        from engines.families import ARCHITECTURES

        from workers.engines.rounding import LOOSE_SHARE

        module = self.known.get(ARCHITECTURES[family])
        if self.modules:  # it reads all that are not disabled whenever it starts
            os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join({*self.modules} - {module, "transformers"})
        found = outcome(context, folder, family_checks.write, family, 2)
        if "failed" not in found:
            found = outcome(context, folder, family_checks.sampled, self.rollout)
        if any(isinstance(value, float) and not value <= LOOSE_SHARE for value in found.values()):
            found |= outcome(context, folder, family_checks.proved, self.rollout)
        return {self.rollout: {"knows": module is not None, **found}}


def outcome(context: Any, folder: Path, check: Callable[..., Any], *more: Any) -> dict[str, Any]:
    """Return a check's numbers, the sentence of its refusal as `refused`, or what it died of as `failed`."""
    from distflow.errors import DistflowError
    from workers.engines.saved_model import ModelDamaged

    with ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(check, folder, *more)
        try:
            error = future.exception(SECONDS)
        except TimeoutError:
            for process in pool._processes.values():
                process.kill()
            return {"failed": f"no end within {SECONDS} s"}
    if error is None:
        return {name: float(f"{value:.1e}") if isinstance(value, float) else value
                for name, value in future.result().items()}
    if isinstance(error, DistflowError) and not isinstance(error, ModelDamaged):  # found too late for a refusal
        return {"refused": _line(error, folder)}
    return {"failed": f"{type(error).__name__}: {_line(error, folder)}"}


def _line(error: BaseException, folder: Path) -> str:
    """Return what was said in one line; of a server's last words the last error."""
    text = re.sub(r"/tmp/[\w./-]+", "FOLDER", str(error)).replace(folder.name, "FOLDER")
    begin, last_words, log = text.partition(" It said last:")
    errors = [f"{kind}: {said or line}" for line, kind, said in
              re.findall(r"^ *(.+)\n(?:[ ^~]+\n)? *([\w.]*Error)(?:: (.+))?$", log, re.MULTILINE)]
    return " ".join(f"{begin}{last_words} {errors[-1]}".split() if errors else text.split())[:400]


if __name__ == "__main__":
    sys.exit(main())
