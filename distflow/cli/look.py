"""`distflow watch`, `why` and `report`: look at runs that go on or have ended.

    watch    a run that goes on, on the terminal
    why      why a run is slow, stuck or dead, or what is wrong with its learning
    report   a page of one or several runs; with --trace what each rank of one did when
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from distflow import launch
from distflow.cli.common import Verb
from distflow.errors import InvalidInput


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs, as runs/grpo-1; several are compared")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder, of several here; with "
                                                      "--trace  trace.json.gz")
    parser.add_argument("--trace", action="store_true",
                        help="instead of the page, write what each rank did when, as a trace that Perfetto shows")
    parser.add_argument("--steps", metavar="FIRST:LAST", type=launch.step_range,
                        help="of a trace, only these steps, as 10:14 or 10; default: all")


def report(options: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in options.runs]
    if (options.trace or options.steps) and not (options.trace and len(folders) == 1):
        raise InvalidInput("a trace is of one run:  distflow report RUN --trace --steps 10:14")
    file = Path(options.out or (folders[0] if len(folders) == 1 else Path()) /
                ("trace.json.gz" if options.trace else "report.html"))
    try:
        for line in _trace(folders[0], file, options) if options.trace else _page(folders, file):
            print(line)
    except OSError as error:
        raise InvalidInput(f"{file} cannot be written: {error.strerror}. Name another file:  --out FILE") from None
    return 0


def _page(folders: list[Path], file: Path) -> Iterator[str]:
    from distflow.telemetry.report import write_report

    size = write_report(folders, file)
    yield f"wrote {file} ({size / 1e6:.1f} MB): open it in a browser, or send it; it needs no network"


def _trace(folder: Path, file: Path, options: argparse.Namespace) -> Iterator[str]:
    from distflow.telemetry import ettr, perfetto, timeline

    if not (folder / timeline.FOLDER).is_dir():
        raise InvalidInput(f"{folder} has no timeline: it is not the folder of a run, or no step of it has begun")
    run = timeline.read(folder, options.steps)
    if not run.spans:
        asked = f"--steps {options.steps[0]}:{options.steps[-1]}: " if options.steps else ""
        raise InvalidInput(f"{asked}the run has {_range(timeline.read(folder).steps())}")
    count = perfetto.write_trace(run, ettr.read(folder), file)
    yield (f"wrote {file}: {count} spans of {_range(run.steps())}. Open it at https://ui.perfetto.dev, which keeps it "
           "in your browser")
    for host, seconds in run.offsets.items():
        if seconds:
            yield f"note: the clock of {host} was corrected by {1e3 * seconds:+.1f} ms"


def _add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("--once", action="store_true", help="print it once; so it is where there is no terminal")


def watch(options: argparse.Namespace) -> int:
    from distflow.telemetry.watch import watch as show

    show(Path(options.run), options.once)
    return 0


def _add_why_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("--step", type=int, metavar="N", help="explain this step; default: what goes on now")


def why(options: argparse.Namespace) -> int:
    from distflow.recovery.checkpoint_files import complete_checkpoints
    from distflow.telemetry.why import explain

    for line in explain(Path(options.run), complete_checkpoints, options.step):
        print(line)
    return 0


def _range(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step that is done"


VERBS = {
    "watch": Verb("show how far a run is, what it learns, what each rank does, and what failed", _add_watch_arguments,
                  watch),
    "why": Verb("explain why a run is slow, stuck or dead, or what is wrong with its learning", _add_why_arguments,
                why),
    "report": Verb("write a page of one or several runs: curves, samples, time, failures, settings; or a trace of one",
                   _add_report_arguments, report),
}
