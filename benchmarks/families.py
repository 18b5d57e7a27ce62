"""What distflow makes of every causal language model that transformers registers: the table of docs/models.md.

Each family is a tiny model with random weights, of `tests/engines/families.py`, in a process of its own; the checks are
those of `tests/engines/family_checks.py`. The results go to benchmarks/results/families.json after each family, and
those that are there are not measured again:

    python -m benchmarks.families              # all that are not there yet
    python -m benchmarks.families gemma3_text  # these again
    python -m benchmarks.families gemma3_text --device cuda --dtype bfloat16 --results elsewhere.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path[:2]), "OMP_NUM_THREADS": "1",
               "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
RESULTS = ROOT / "benchmarks/results/families.json"
SECONDS = 120  # of one check


def main() -> int:
    """Measure the families that are named, or all without a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of distflow's side")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of distflow's side")
    given = parser.parse_args()
    os.environ |= {"FAMILIES_DEVICE": given.device, "FAMILIES_DTYPE": given.dtype}
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import transformers
    from engines.families import FAMILIES, kind_of

    results = json.loads(given.results.read_text())["families"] if given.results.exists() else {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engines.family_checks", "workers.engines.adapters"])
    for family in given.families or [family for family in FAMILIES if family not in results]:
        with tempfile.TemporaryDirectory() as folder:
            results[family] = {"kind": kind_of(family), **measure(family, Path(folder), context)}
        print(family, json.dumps(results[family], ensure_ascii=False), flush=True)
        ordered = {name: results[name] for name in FAMILIES if name in results}
        text = json.dumps({"transformers": transformers.__version__, "families": ordered}, indent=1, ensure_ascii=False)
        given.results.write_text(text + "\n")
    return 0


def measure(family: str, folder: Path, context: Any) -> dict[str, Any]:
    """Return what each check says of a family, see `outcome`; `built` is why there is no model to be checked."""
    from engines import family_checks

    with ProcessPoolExecutor(1, mp_context=context) as pool:
        if error := pool.submit(family_checks.write, family, folder).exception(SECONDS):
            return {"built": f"{type(error).__name__}: {_line(error, folder)}"}
        return {name: outcome(pool.submit(check, folder), folder) for name, check in family_checks.CHECKS.items()}


def outcome(future: Any, folder: Path) -> dict[str, Any]:
    """Return a check's numbers, the sentence of its refusal as `refused`, or what it died of as `failed`."""
    from distflow.errors import DistflowError
    from workers.engines.saved_model import ModelDamaged

    if (error := future.exception(SECONDS)) is None:
        return {name: float(f"{value:.1e}") if isinstance(value, float) else value
                for name, value in future.result().items()}
    if isinstance(error, DistflowError) and not isinstance(error, ModelDamaged):  # found too late for a refusal
        return {"refused": _line(error, folder)}
    return {"failed": f"{type(error).__name__}: {_line(error, folder)}"}


def _line(error: BaseException, folder: Path) -> str:
    return " ".join(str(error).replace(str(folder), "FOLDER").replace(folder.name, "FOLDER").split())[:400]


if __name__ == "__main__":
    sys.exit(main())
