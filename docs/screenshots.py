"""Makes the pictures of the README and the pages from runs of the demo: `make screenshots`. It needs Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import distflow  # noqa: E402 - needs the path above
from distflow.telemetry.report import write_report  # noqa: E402 - needs the path above
from distflow.telemetry.watch import RunView, page  # noqa: E402

_STEPS = 40  # of a run that is watched
PICTURES = ROOT / "docs/pictures"
SIZES = {"report.png": (1280, 1060, ""), "report_telephone.png": (390, 1400, "")}


def main() -> None:
    """Draw the report of the newest run of the demo, and a run that goes on, of which one rank is killed."""
    runs = sorted(Path("runs").glob("demo-grpo-*"), key=lambda folder: folder.stat().st_mtime)
    if not runs:
        sys.exit("There is no run to draw. First:  make demo")
    PICTURES.mkdir(exist_ok=True)
    report(runs[-1])
    with tempfile.TemporaryDirectory() as scratch:
        watch(scratch)


def report(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("The report is drawn by Chromium, which is not here. Debian:  apt install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "report.html")
        write_report([folder], file)
        for name, (width, height, fragment) in SIZES.items():
            subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                            "--virtual-time-budget=8000", f"--user-data-dir={scratch}/profile",
                            f"--window-size={width},{height}", f"--screenshot={PICTURES / name}",
                            f"{file.as_uri()}{fragment}"], check=True, capture_output=True)
            print(PICTURES / name)


def watch(scratch: str) -> None:
    """Start a run, wait until it has gone on after its failure, and draw it."""
    settings = {"mode": "async", "groups.rollout": 1, "steps": 200, "validation.every": 10, "output": scratch,
                "faults": [{"kind": "kill", "group": "rollout", "step": 12}],
                "roles.actor.model": "runs/demo-sft-1/model"}
    run = distflow.run("grpo", set=settings, ranks=2, name="grpo-1", quiet=True)
    view = None
    while view is None or view.step < _STEPS:
        time.sleep(0.5)
        if view is None and (run.folder / "plan.json").is_file():
            view = RunView(run.folder)
        elif view is not None:
            view.look()
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115 - until this process ends
    console.print(page(view))
    console.save_svg(str(PICTURES / "watch.svg"), title="distflow watch runs/grpo-1")
    run.stop()
    print(PICTURES / "watch.svg")


if __name__ == "__main__":
    main()
