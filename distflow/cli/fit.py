"""`distflow plan --fit`: settings of a run that fit the memory of its devices and are fastest by the cost model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli.calibration import spec_of
from distflow.cli.common import noted, table
from distflow.config.spec import Spec
from distflow.config.yaml_source import dump
from distflow.errors import InvalidInput
from distflow.options import load_and_plan
from distflow.plan import TRAINER, MemoryItem
from distflow.telemetry.run_folder import read_plan
from distflow.telemetry.run_reader import RunReader

if TYPE_CHECKING:
    from planners.heterogeneous.fit import Fit

_GIB = 2**30
_SHOWN = 4
_PEAK = "memory/gpu_reserved_gib"


def main(options: argparse.Namespace) -> int:
    from planners.heterogeneous.fit import fit

    margin = 0.1 if options.margin is None else options.margin
    if not 0 <= margin < 1:
        raise InvalidInput(f"--margin {margin:g} is no share of a device's memory; give one, as 0.1")
    factor, said = _measured(Path(options.runs[-1])) if options.runs else (1.0, "")
    if options.runs:
        spec, notes = spec_of(options)
    else:
        spec, plan = load_and_plan(options, elsewhere=True)
        notes = plan.notes
    print("\n".join(_described(spec, _unlike(spec, fit(spec, margin, factor)), said)))
    if notes:
        print("\n".join(noted(notes)), file=sys.stderr)  # what stands in the output is a part of a run file
    return 0


def _unlike(spec: Spec, found: Iterable[Fit]) -> dict[tuple[str, ...], Fit]:
    """Return the first few of what fits, by their rows of the table, without those that look and take the same."""
    rows: dict[tuple[str, ...], Fit] = {}
    for each in found:
        rows.setdefault(_row(spec, each), each)
        if len(rows) == _SHOWN:
            break
    return rows


def _row(spec: Spec, found: Fit) -> tuple[str, ...]:
    from planners.heterogeneous.explain import duration
    from planners.heterogeneous.fit import lines

    chosen = found.settings
    written = {role["generation"]["batch_rows"] for role in lines(spec, chosen)["roles"].values()
               if "generation" in role}
    return (str(chosen.micro_batch_tokens), ", ".join(map(str, sorted(written))) or "as it is",
            *map(_word, (chosen.recompute, chosen.swap, chosen.offload)), str(chosen.sample_tp), str(chosen.train_tp),
            str(chosen.rollout or "all"), duration(chosen.seconds),
            f"{found.need / _GIB:.1f} of {found.limit / _GIB:.1f} GiB")


def _described(spec: Spec, rows: dict[tuple[str, ...], Fit], said: str) -> Iterator[str]:
    from planners.heterogeneous.fit import lines

    found = list(rows.values())
    best, device = found[0], next(iter(spec.cluster.devices))
    yield (f"{spec.dag.name} on {spec.cluster.size} × {device}, mode {spec.run.mode} (predictions of the memory plan "
           "and the cost model, not measurements)")
    if said:
        yield said
    head = ("micro_batch_tokens", "batch_rows", "recompute", "swap", "offload", "tp to sample", "tp to train",
            "sampling ranks", "an iteration", "memory of a rank")
    yield from ("", f"what fits, fastest first (the best {len(found)})", *table(list(rows), head))
    if best.settings.offload:
        yield "nothing fits without `offload`, whose traffic to host memory is not in these seconds"
    yield from ("", "write into the run file", "")
    yield dump(lines(spec, best.settings), default_flow_style=None, width=110).rstrip()


def _word(value: bool) -> str:
    return "yes" if value else "no"


def _measured(folder: Path) -> tuple[float, str]:
    """Return the bytes that a run's ranks have taken at their fullest over those of its plan, at least 1, and this as a
    sentence. Raises InvalidInput if it has measured nothing."""
    from planners.memory import needed

    if not (folder / "plan.json").is_file():
        raise InvalidInput(f"{folder} has no plan.json, so it is not the folder of a run")
    peaks = [line[_PEAK] for line in RunReader(folder).steps() if _PEAK in line]
    if not peaks:
        raise InvalidInput(f"{folder} has no `{_PEAK}` in its metrics: it has done no step yet, or it ran without "
                           "GPUs, where memory is not measured. Let it do some steps on such a device, or leave --from "
                           "out.")
    planned = read_plan(folder)
    planned = next((group["plan"] for group in planned["groups"] if group["name"] == TRAINER), planned)
    expected = needed([MemoryItem(**item) for item in planned["memory"]]) / _GIB
    if not expected:
        raise InvalidInput(f"the plan of {folder} says nothing of memory, since the sizes of its models are not known")
    factor = max(1.0, max(peaks) / expected)
    counted = f"{factor:.2f} times" if factor > 1 else "as planned, since other rows may be longer"
    return factor, (f"{folder} took {max(peaks):.1f} GiB at its fullest in {len(peaks)} steps, and its plan said "
                    f"{expected:.1f}: memory is counted {counted}")
