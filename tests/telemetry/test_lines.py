"""Lines that cannot be written: dropped as a whole, counted, and the file stays valid."""

import json
import subprocess
import sys

from harness import ROOT, environment

LIMITED = """
import json, resource, signal, sys
from pathlib import Path
from distflow.telemetry import events

path = Path(sys.argv[1])
events.add_or_drop(path, [json.dumps({"number": 0})])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(1, 40):
    events.add_or_drop(path, [json.dumps({"number": number, "filler": "x" * 100})])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
events.add_or_drop(path, [json.dumps({"number": 40})])
print(events.dropped())
"""
FULL = """
import sys
from pathlib import Path
from distflow.telemetry import events
from distflow.telemetry.run_folder import RunFolder
from distflow.telemetry.progress import StepProgress
from distflow.telemetry.trajectories import Trajectories

folder = Path(sys.argv[1])
for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "turns.jsonl"):
    (folder / name).symlink_to("/dev/full")
(folder / "summary.json").mkdir()
(folder / "tensorboard").write_text("a file is in the way")
run = RunFolder(folder)
for step in (1, 2):
    run.write_metrics(step, {"loss": 1.0})
run.write_samples(1, [{"text": "a"}, {"text": "b"}])
events.current().open(folder / "events.jsonl", 0)
events.record("lost")
turns = Trajectories()
turns.open(folder / "turns.jsonl", 8)
turns.write(0, 1, {"text": "a"})
(folder / "metrics.jsonl").unlink()
run.close({})
StepProgress("grpo", 4, 0).step({"loss": 1.0})
print(f"dropped {events.dropped()}", file=sys.stderr)
events.leave(0)
"""


def test_a_short_write_is_undone_and_later_lines_are_written(tmp_path):
    """The kernel writes what still fits below the limit, and refuses the rest."""
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], cwd=ROOT, env=environment(), capture_output=True,
                          text=True, timeout=60, check=True)
    written = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert (written[0], written[-1]) == (0, 40)
    assert len(written) + int(done.stdout) == 41
    assert 1 < len(written) < 12
    assert done.stderr.count("cannot be written: File too large") == 1


def test_a_full_disk_ends_nothing_that_tells_of_a_run(tmp_path):
    """Nor a full screen: standard output is a file on it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, env=environment(), stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "dropped 7" in done.stderr, "two of metrics, two samples, an event, a turn, a line on the screen"
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "turns.jsonl"):
        assert done.stderr.count(f"{name} cannot be written: No space left on device") == 1
    assert done.stderr.count("summary.json cannot be written: Is a directory") == 1
    assert done.stderr.count("`tensorboard` of `log` has failed") == 1
