"""The package: built as users build it and run away from the clone; its name, version and licence; its command."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys

import pytest
from harness import ROOT, environment

import distflow
from distflow import cli
from distflow.config.extras import DISTRIBUTION, pip_line


def test_the_package_list_is_complete():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {".".join(path.parent.relative_to(ROOT).parts)
             for top in ("distflow", "planners", "workers") for path in (ROOT / top).rglob("__init__.py")}
    assert listed == found | {"distflow.dags", "distflow.deploy"}


def test_a_renamed_public_name_still_works_and_says_the_new_one():
    with pytest.warns(FutureWarning, match=r"distflow\.Alarm is now called distflow\.Alert"):
        assert distflow.Alarm is distflow.Alert


def test_an_extra_is_installed_from_a_checkout_or_by_the_name_of_the_distribution(tmp_path, monkeypatch):
    assert pip_line("vllm", tmp_path) == "pip install 'distflow-rl[vllm]'"
    (tmp_path / "setup.cfg").touch()
    assert pip_line("vllm", tmp_path) == f"pip install -e '{tmp_path}[vllm]'"
    monkeypatch.chdir(tmp_path)
    assert pip_line("vllm", tmp_path) == "pip install -e '.[vllm]'"


def test_no_file_names_the_package_of_another_project():
    """Whatever is said to be installed is a distribution of ours, with an extra that setup.cfg has."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["metadata"]["name"] == DISTRIBUTION
    texts = {path: (ROOT / path).read_text(errors="replace") for path in tracked() if path != "tests/test_package.py"}
    foreign = {path: found for path, text in texts.items()
               if (found := re.findall(r"distflow\[\w+\]|install '?distflow(?![-\w])", text))}
    assert foreign == {}
    extras = {extra for text in texts.values() for extra in re.findall(r"(?:pip_line\([\"']|-e '\.\[)(\w+)", text)}
    assert {"vllm", "megatron", "exact", "ucx"} <= extras <= set(config["options.extras_require"])


@pytest.mark.parametrize("line", ["-m distflow --version", "-m distflow.cli --version"])
def test_the_version_is_said(line):
    done = subprocess.run([sys.executable, *line.split()], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"distflow {distflow.__version__}\n"


@pytest.mark.parametrize(("arguments", "said"), [
    (["valdate", "grpo"], "no command `valdate`. Did you mean `validate`? Commands: demo, validate,"),
    (["--debug", "rnu"], "no command `rnu`. Did you mean `run`?"),
    (["validate", "gropo"], "DAG `gropo` is neither a file nor a shipped DAG.\nDid you mean `grpo`? Shipped: cispo,"),
    (["validate", "dags/gropo.yaml"], "Did you mean `grpo.yaml`? Shipped: cispo.yaml,"),
])
def test_a_misspelt_name_of_a_command_or_dag_is_recognised(arguments, said, capsys):
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.run
def test_an_installed_package_validates_and_runs(workspace):
    target = workspace / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--target", str(target), str(_clean_copy(workspace))], check=True, env=environment())
    place = {**environment(), "PYTHONPATH": str(target)}
    check = subprocess.run([sys.executable, "-m", "distflow.cli", "validate", "sft"], cwd=workspace, env=place,
                           capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    assert "site/distflow/dags/sft.yaml" in check.stdout
    assert (target / "distflow/py.typed").is_file()
    metadata = next(target.glob("distflow_rl-*.dist-info/METADATA")).read_text()
    for line in (f"Version: {distflow.__version__}", "License-Expression: Apache-2.0", "License-File: LICENSE"):
        assert f"\n{line}\n" in metadata
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
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def tracked() -> list[str]:
    """The files that git tracks or would track."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]
