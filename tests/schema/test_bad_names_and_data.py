"""Bad names, datasets and run folders: one message, exit code 2, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow import cli, launch
from distflow.data.records import check_records, open_records
from distflow.schema.errors import InvalidInput
from distflow.schema.spec import load
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
BAD = ROOT / "tests/bad_inputs"


@pytest.fixture(autouse=True)
def _in_bad_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)


@pytest.mark.parametrize(("load_it", "says"), [
    (lambda: load("grp.yaml"), "DAG `grp.yaml` is neither a file nor a shipped DAG.\nDid you mean `grpo.yaml`? Ship"),
    (lambda: load("grpo", "embeded"), "run file `embeded` is neither"),
    (lambda: load("grpo", cluster="h900"), "cluster `h900` is neither"),
    (lambda: load("no/dag.yaml", "no/run.yaml"), "2 mistakes."),
], ids=["DAG", "run", "cluster", "both"])
def test_unknown_names_list_what_is_shipped(load_it: Callable, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(load_it(), 2)
    assert says in str(caught.value)


@pytest.mark.parametrize(("file", "says"), [
    ("empty.jsonl", ("data/empty.jsonl: there is no record in it.",)),
    ("blank.jsonl", ("data/blank.jsonl: there is no record in it.",)),
    ("malformed.jsonl", ("data/malformed.jsonl:3: not valid JSON: Expecting ',' delimiter.", '3 |  {"question"',
                         "\n" + " " * 31 + "^")),
    ("not_an_object.jsonl", ("data/not_an_object.jsonl:2: each line must be a JSON object",
                             '2 |  ["1 + 1?", "#### 2"]')),
    ("missing_field.jsonl", ("data/missing_field.jsonl:2: the record has no field `answer`.", "Did you mean `answr`?",
                             "--set data.answer=FIELD")),
    ("empty_text.jsonl", ("empty_text.jsonl:2: field `question` must be text that is not empty, not '  '.",
                          "empty_text.jsonl:3: field `answer` must be text, not 2.", "2 mistakes.")),
    ("many.jsonl", ("data/many.jsonl:1: field `question` must be text, not 1.",)),
    ("unknown_kind.csv", ("data/unknown_kind.csv: unknown kind of data: `.csv`.", ".parquet")),
    ("not_parquet.parquet", ("data/not_parquet.parquet: not a Parquet file",)),
])
def test_data(file: str, says: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(Path("data") / file), ["question", "answer"])
    for part in says:
        assert part in str(caught.value)
    assert len(caught.value.mistakes) == (2 if file == "empty_text.jsonl" else 1)


def test_mistakes_in_data_stop_after_ten(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("question: 1 + 1?\n" * 3000)
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(tmp_path / "all.jsonl"), ["question"])
    assert str(caught.value).endswith("There may be more behind it.\n\n10 mistakes.")


def test_each_rank_finds_the_mistakes_of_its_share(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"question": "1 + 1?"}\n' * 5000 + "{\n" + '{"question": "1 + 1?"}\n')
    records = open_records(tmp_path / "one.jsonl")
    for share in (0, 1):
        check_records(records, ["question"], share, 3)
    with pytest.raises(InvalidInput, match=r"one\.jsonl:5001: not valid JSON"):
        check_records(records, ["question"], 2, 3)


def test_fields_of_ones_own_are_asked_of_the_training_data_alone(capsys: pytest.CaptureFixture) -> None:
    """Validation answers questions; it needs no pairs. The shipped run of `dpo` validates on problems without any."""
    assert cli.main(["validate", "dpo"]) == 0
    assert cli.main(["validate", "dpo", "--set", "data.columns=[chosen, rejected, third]"]) == 2
    assert "preferences.jsonl:1: the record has no field `third`" in capsys.readouterr().err


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    return ["--dag", "dags/good.yaml", "--run-file", "run_files/good.yaml", "--set", f"output={tmp_path / 'out'}"]


def test_existing_run_name(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "out/mine").mkdir(parents=True)
    assert launch.main([*good, "--name", "mine"]) == 2
    assert "a run named `mine` exists in" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_run_folder_below_a_file(good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "out").write_text("a file")
    assert launch.main(good) == 2
    message = capsys.readouterr().err
    assert "the run folder cannot be written" in message
    assert "is not a folder" in message
    assert (tmp_path / "out").read_text() == "a file"


@pytest.mark.parametrize("more", [["--set", "steps=no"], ["--set", "data.train=../data/malformed.jsonl"],
                                  ["--dag", "dags/cycle.yaml"]])
def test_launch_gives_one_message_and_exit_code_2(good: list[str], tmp_path: Path, more: list[str]) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "distflow/launch.py"), *good, *more], cwd=BAD, check=False,
                          capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "something was written"
