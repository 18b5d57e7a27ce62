"""The installed package: built as users build it, run away from the clone."""

from __future__ import annotations

import configparser
import subprocess
import sys

from harness import ROOT, environment


def test_the_package_list_is_complete():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {".".join(path.parent.relative_to(ROOT).parts)
             for top in ("distflow", "planners", "workers") for path in (ROOT / top).rglob("__init__.py")}
    assert listed == found | {"distflow.dags"}


def test_an_installed_package_validates_and_runs(workspace):
    target = workspace / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", str(target), str(_clean_copy(workspace))], check=True, env=environment())
    place = {**environment(), "PYTHONPATH": str(target)}
    check = subprocess.run([sys.executable, "-m", "distflow.cli", "validate", "sft"], cwd=workspace, env=place,
                           capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert "site/distflow/dags/sft.yaml" in check.stdout
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
            str(target / "distflow/launch.py"), "--dag", "sft", "--run-file", "tiny", "--name", "far",
            "--set", "steps=1"]
    done = subprocess.run(line, cwd=workspace, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (workspace / "runs/far/summary.json").is_file()


def _clean_copy(workspace):
    """Only what git tracks or would track, since a build writes into its source."""
    copy = workspace / "source"
    copy.mkdir()
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy
