"""Makes the pictures of the README and the pages from runs of the demo: `make screenshots`. It needs Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import distflow  # noqa: E402 - needs the path above
from benchmarks.charts import BLUE, RED, Axes, picture, text  # noqa: E402 - needs the path above
from distflow.telemetry.report import write_report  # noqa: E402 - needs the path above
from distflow.telemetry.watch import RunView, page  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_STEPS = 40  # of a run that is watched
PICTURES = ROOT / "docs/pictures"
REPORT = {"report.png": (1280, 1060), "report_telephone.png": (390, 1400)}
_FRAME = """<body style="margin: 0"><iframe src="{}" style="border: 0; width: {}px; height: {}px"></iframe></body>"""


def main() -> None:
    """Draw the report of the newest run of the demo, a run that goes on, of which one rank is killed, what its ranks
    did in a step, and the documentation."""
    runs = sorted(Path("runs").glob("demo-grpo-*"), key=lambda folder: folder.stat().st_mtime)
    if not runs:
        sys.exit("There is no run to draw. First:  make demo")
    if BROWSER is None:
        sys.exit("Pages are drawn by Chromium, which is not here. Debian:  apt install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page_of(runs[-1], Path(scratch))
        for name, size in REPORT.items():
            draw(f"{scratch}/report.html", name, *size)
        watched = watch(scratch)
        (PICTURES / "killed.svg").write_text(killed_picture(watched))
        page_of(watched, Path(scratch))
        draw(f"{scratch}/report.html#ranks-title", "timeline.png", 1280, 330)
        build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", f"{scratch}/site"]
        subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        draw(f"{scratch}/site/tutorial/index.html", "documentation.png", 1280, 900)


def page_of(run: Path, folder: Path) -> None:
    write_report([run], folder / "report.html")


def draw(address: str, name: str, width: int, height: int) -> None:
    """Draw a page as a window of this size shows it. In a frame: Chromium's own windows are 500 wide at least."""
    with tempfile.TemporaryDirectory() as scratch:
        frame = Path(scratch, "frame.html")
        frame.write_text(_FRAME.format(f"file://{address}", width, height))
        subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        "--virtual-time-budget=8000", f"--user-data-dir={scratch}/profile",
                        f"--window-size={max(width, 500)},{height}", f"--screenshot={PICTURES / name}",
                        frame.as_uri()], check=True, capture_output=True, timeout=300)
    if width < 500:
        with Image.open(PICTURES / name) as whole:
            whole.crop((0, 0, width, height)).save(PICTURES / name)
    print(PICTURES / name)


def watch(scratch: str) -> Path:
    """Start a run, wait until it has gone on after its failure, and draw it on a terminal. Return its folder."""
    settings = {"mode": "async", "groups.rollout": 1, "steps": 200, "validation.every": 10, "output": scratch,
                "faults": [{"kind": "kill", "group": "rollout", "step": 12}]}
    run = distflow.run("grpo", set=settings, ranks=2, name="grpo-1", quiet=True)
    view = None
    while view is None or view.step < _STEPS:
        time.sleep(0.5)
        if not run.running:
            run.wait()
            sys.exit(f"{run.folder} has ended before step {_STEPS}, at which it is drawn: give it more `steps`")
        if view is None and (run.folder / "plan.json").is_file():
            view = RunView(run.folder)
        elif view is not None:
            view.look()
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115 - until this process ends
    console.print(page(view))
    console.save_svg(str(PICTURES / "watch.svg"), title="distflow watch runs/grpo-1")
    run.stop()
    print(PICTURES / "watch.svg")
    return run.folder


_WIDE, _LEFT = 800, 90  # pixels
_LANES = {"trainer": 240, "rollout": 270}  # where the bars of ranks 0 and 1 are, in pixels from the top


def killed_picture(run: Path) -> str:
    """Return an SVG that draws a run's reward while its ranks work, of which rank 1 is killed and restarts.

    A step stands at the time at which its weights were published.
    """
    events, metrics = ([json.loads(line) for line in (run / name).read_text().splitlines()]
                       for name in ("events.jsonl", "metrics.jsonl"))
    published = {each["version"]: each["time"] for each in events if each["event"] == "weights_published"}
    steps = [(published[each["step"]], each["reward/mean"]) for each in metrics
             if each["step"] in published and "reward/mean" in each]
    died = next(each["time"] for each in events if each["event"] == "failure" and each["group"].startswith("rollout"))
    back = next(each["time"] for each in events
                if each["event"] == "worker_ready" and each["rank"] == 1 and each["time"] > died)
    first, last, highest = steps[0][0], steps[-1][0], max(reward for _, reward in steps)

    axes = Axes(_LEFT, 40, _WIDE - _LEFT - 20, 170, last, highest * 17 / 16, first)
    bars = [("trainer", first, last, BLUE), ("rollout", first, died, BLUE), ("rollout", died, back, RED),
            ("rollout", back, last, BLUE)]
    lanes = [f'<rect x="{axes.x(begin):.1f}" y="{_LANES[name]}" height="16" fill="{color}" '
             f'width="{axes.x(end) - axes.x(begin):.1f}"/>' for name, begin, end, color in bars]
    names = [text(_LEFT - 10, top + 13, name, "end") for name, top in _LANES.items()]
    seen = _WIDE - _LEFT  # pixels that the animation uncovers
    return picture(_WIDE, 300, [
        f'<clipPath id="past"><rect x="{_LEFT}" width="{seen}" height="300"><animate attributeName="width" '
        f'values="0;{seen};{seen}" keyTimes="0;0.8;1" dur="9s" repeatCount="indefinite"/></rect></clipPath>',
        text(_LEFT, 24, f"reward of {len(steps)} steps in {last - first:.0f} seconds; 0 to {highest:.2f}"),
        *names, axes.frame(), '<g clip-path="url(#past)">', axes.curve(steps, BLUE), *lanes,
        f'<path d="M{axes.x(died):.1f} 40V286" stroke="{RED}" stroke-dasharray="4"/>',
        text(axes.x(died) + 8, 232, f"killed; back after {back - died:.1f} s", more=f'fill="{RED}"'), "</g>"], 14)


if __name__ == "__main__":
    main()
