"""The package: built as users build it and run away from the clone; its name, version and licence; its command."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

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
def test_a_misspelt_name_of_a_command_or_dag_is_recognised(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The distribution of sources, of which wheels are built."""
    folder = tmp_path_factory.mktemp("sources")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=_clean_copy(folder), check=True, env=environment(),
                   stdout=subprocess.DEVNULL)
    return next(folder.glob("distflow_rl-*.tar.gz"))


def wheel_of(sources, folder, **variables):
    """Build the wheel of the sources in a folder; `variables` of the environment are added."""
    wheel = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", *wheel, str(sources)], check=True, env=environment() | variables)
    return next(folder.glob("distflow_rl-*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory, sources):
    """The folder of an environment with the wheel in it, and of other packages those that are here."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = wheel_of(sources, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv/lib").glob("python*/site-packages"))
    (site / "here.pth").write_text(sysconfig.get_path("purelib"))
    install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python"), *install], check=True)
    return folder / "venv"


@pytest.fixture
def far(installed, tmp_path):
    """Run the installed command in an empty folder, with nothing of the clone in reach."""
    outside = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run([str(installed / "bin/distflow"), *arguments], cwd=tmp_path, env=outside,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert str(ROOT) not in done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.run
def test_the_wheel_has_all_that_its_command_needs(far, installed):
    assert "validate" in far("--help")
    site = next((installed / "lib").glob("python*/site-packages"))
    assert f"{site}/distflow/dags/grpo.yaml" in far("validate", "grpo.yaml")
    assert "\n#SBATCH --nodes=2\n" in far("run", "grpo", "--slurm", "gpus-per-node=1")
    far("plan", "grpo", "--ranks", "2", "--cluster", "h200")


@pytest.mark.run
def test_the_wheel_runs_the_demo_and_reports(far, tmp_path):
    assert "held-out accuracy of runs/demo-grpo-1" in far("demo", "--steps", "1", "--ranks", "1")
    summary = json.loads((tmp_path / "runs/demo-grpo-1/summary.json").read_text())
    assert (summary["steps"], summary["versions"][DISTRIBUTION]) == (1, distflow.__version__)
    assert "wrote runs/demo-grpo-1/report.html" in far("report", "runs/demo-grpo-1")


@pytest.mark.run
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_the_wheel_has_compiled_copies_for_every_python(far, installed):
    assert "\ncopies of rows: compiled\n" in far("engines")
    site = next((installed / "lib").glob("python*/site-packages"))
    assert [path.name for path in site.glob("distflow/data/compiled*")] == ["compiled_copies.abi3.so"]
    assert "\nTag: cp311-abi3-linux_" in next(site.glob("distflow_rl-*.dist-info/WHEEL")).read_text()


@pytest.mark.run
def test_the_wheel_is_built_without_a_compiler_too(sources, tmp_path):
    zipfile.ZipFile(wheel_of(sources, tmp_path, CC="/no/compiler")).extractall(tmp_path / "site")
    assert [*tmp_path.rglob("*.so")] == []
    select = "Ragged.from_rows([torch.arange(3), torch.arange(2)]).select(torch.tensor([1, 0])).values.tolist()"
    for command, said in ((["-m", "distflow", "engines"], "copies of rows: in Python"),
                          (["-c", f"import torch\nfrom distflow.data.batch import Ragged\nprint({select})"],
                           "[0, 1, 0, 1, 2]")):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True,
                              env=environment() | {"PYTHONPATH": str(tmp_path / "site")})
        assert said in done.stdout


@pytest.mark.run
def test_the_wheel_says_what_it_is(installed):
    site = next((installed / "lib").glob("python*/site-packages"))
    metadata = next(site.glob("distflow_rl-*.dist-info/METADATA")).read_text()
    for line in (f"Version: {distflow.__version__}", "License-Expression: Apache-2.0", "License-File: LICENSE"):
        assert f"\n{line}\n" in metadata
    assert (site / "distflow/py.typed").is_file()


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
