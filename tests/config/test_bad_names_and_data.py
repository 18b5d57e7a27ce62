"""Bad names, datasets and run folders: one message, exit code 2, nothing written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distflow import cli
from distflow.config.load import load
from distflow.data.checks import check_data
from distflow.data.dataloader import UsableRecords
from distflow.data.dataset import RequiredFields, check_records, open_records
from distflow.errors import InvalidInput
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
BAD = ROOT / "tests/bad_inputs"
FIELDS = RequiredFields("question", ["answer"], imitated={"answer"})


@pytest.fixture(autouse=True)
def _in_bad_inputs(monkeypatch):
    monkeypatch.chdir(BAD)


@pytest.mark.parametrize(("load_it", "says"), [
    (lambda: load("grp.yaml"), "DAG `grp.yaml` is neither a file nor a shipped DAG.\nDid you mean `grpo.yaml`? Ship"),
    (lambda: load("grpo", "embeded"), "run file `embeded` is neither"),
    (lambda: load("grpo", cluster="h900"), "cluster `h900` is neither"),
    (lambda: load("no/dag.yaml", "no/run.yaml"), "2 mistakes."),
], ids=["DAG", "run", "cluster", "both"])
def test_unknown_names_list_what_is_shipped(load_it, says):
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
    ("empty_text.jsonl", ("empty_text.jsonl:3: field `answer` must be text or a number, not [2].",)),
    ("messages.jsonl", ('messages.jsonl:2: field `question` must be text, or a list of messages as {"role": "user", '
                        '"content": …}, not [{\'content\': \'1 + 1?\'}]',
                        "messages.jsonl:3: field `answer` must be a finite number, not nan", "2 mistakes.")),
    ("many.jsonl", ("data/many.jsonl:1: field `question` must be text, or a list of messages",)),
    ("unknown_kind.xlsx", ("data/unknown_kind.xlsx: unknown kind of data: `.xlsx`.", ".parquet")),
    ("latin.jsonl", ("data/latin.jsonl:2: not UTF-8: byte 0xe9.", "\n" + " " * 26 + "^\n",
                     "iconv -f ISO-8859-1 -t UTF-8 data/latin.jsonl > data/latin-utf8.jsonl")),
    ("utf16.jsonl", ("data/utf16.jsonl: not UTF-8: it begins as UTF-16 does.", "iconv -f UTF-16 -t UTF-8")),
    ("not_parquet.parquet", ("data/not_parquet.parquet: not a Parquet file",)),
])
def test_data(file, says):
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(Path("data") / file), FIELDS)
    for part in says:
        assert part in str(caught.value)
    assert len(caught.value.mistakes) == (2 if file == "messages.jsonl" else 1)


def test_the_commands_that_mend_a_file_do(tmp_path):
    for file, made in (("latin.jsonl", "latin-utf8.jsonl"), ("utf16.jsonl", "utf16-utf8.jsonl")):
        shutil.copy(Path("data") / file, tmp_path)
        with pytest.raises(InvalidInput) as caught:
            check_records(open_records(tmp_path / file), FIELDS)
        command = re.sub(r"^.*:  python ", f"{sys.executable} ", str(caught.value).splitlines()[-1])
        subprocess.run(re.sub(r"^.*:  ", "", command), shell=True, check=True)
        assert check_records(open_records(tmp_path / made), FIELDS) == []


@pytest.mark.parametrize(("record", "answer", "said"), [
    ({"question": "1 + 1?", "answer": "2"}, "solution", "Say which field to take:  --set data.answer=answer"),
    ({"Question": "1 + 1?", "Answer": "2"}, "answer", "--set data.question=Question --set data.answer=Answer"),
    ({"question": "1 + 1?", "answer_type": "n", "final_answer": "2"}, "answer", "--set data.answer=final_answer"),
    ({"problem": "1 + 1?", "generated_solution": "…", "expected_answer": "2"}, "answer",
     "--set data.question=problem --set data.answer=expected_answer"),
    ({"query": "1 + 1?", "response": "2", "original_question": "1 + x?"}, "answer",
     "--set data.question=query --set data.answer=response"),
    ({"prompt": "1 + 1?", "solution": "#### 2"}, "answer", "It has: prompt, solution.\nSay which fields to take:  "
     "--set data.question=prompt --set data.answer=solution"),
    ({"question": "1 + 1?", "colour": "red"}, "answer", "It has: question, colour.\nSay which field to take:  --set "
     "data.answer=FIELD")])
def test_the_likeliest_field_is_proposed(tmp_path, record, answer, said):
    (tmp_path / "all.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(tmp_path / "all.jsonl"), RequiredFields("question", [answer]))
    assert said in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_a_run_file_with_the_name_of_a_shipped_dag_is_to_be_renamed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dpo.yaml").write_text((BAD / "run_files/good.yaml").read_text())
    with pytest.raises(InvalidInput, match=r"Rename it:  mv dpo\.yaml dpo_run\.yaml$"):
        load("dpo", "dpo.yaml")


def test_an_empty_question_is_passed_over_and_counted(tmp_path, capsys):
    """One blank question among many ended a run of days."""
    asked = ["1 + 1?", "", "2 + 2?", None]
    lines = [json.dumps({"question": question, "answer": number}) for number, question in enumerate(asked)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    validate = ["validate", "dags/good.yaml", "--run-file", "run_files/good.yaml", "--set", "data.batch=3",
                "--set", f"data.train={tmp_path / 'train.jsonl'}"]
    assert cli.main(validate) == 0
    assert f"note: 2 of the 4 records of {tmp_path / 'train.jsonl'} that were read have an empty field, as " \
           f"{tmp_path / 'train.jsonl'}:2: others take their place" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text(lines[1])
    assert cli.main([*validate, "--set", "data.batch=1"]) == 2
    assert "must be text that is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(("sets", "said"), [
    ("{}", "`data.train` must have at least 1 item"),
    ("{same.jsonl: 0.123456789}", ""),
    ("{same.jsonl: 0.123456789, other.jsonl: 1}", "meet only every 1,123,456,789 prompts; 100,000 is the most"),
    ("{same.jsonl: -1, other.jsonl: 1}", "`data.train.same.jsonl` must be greater than 0, not -1"),
    ("{same.jsonl: 1, less.jsonl: 1}", "there is no data `less.jsonl`"),
    ("{$HOME/some.jsonl: 1}", "Variables of the environment are not read in a file."),
    ("{same.jsonl: 1, wrong.jsonl: 1}", "wrong.jsonl:1: the record has no field `answer`"),
])
def test_several_training_sets(tmp_path, monkeypatch, capsys, sets, said):
    for name in ("same", "other"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
    (tmp_path / "wrong.jsonl").write_text('{"question": "1 + 1?"}')
    monkeypatch.chdir(tmp_path)
    given = ["--set", f"data.train={sets}", "--set", "data.batch=1"]
    ended = cli.main(["validate", str(BAD / "dags/good.yaml"), "--run-file", str(BAD / "run_files/good.yaml"), *given])
    assert ended == (2 if said else 0)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("record", "said"), [
    ({"question": [{"role": "user", "content": ["hello"]}], "answer": "2"}, "field `question` must be text, or a list"),
    ({"question": "1 + 1?", "answer": [{"value": 2}]}, "field `answer` must be text or a number, not [{'value': 2}]"),
    ({"question": "1 + 1?", "answer": [{"content": ""}]}, "field `answer` must be text or a number"),
])
def test_what_has_a_wrong_form_is_not_passed_over_as_empty(tmp_path, record, said):
    good = {"question": "1 + 1?", "answer": "2"}
    (tmp_path / "one.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
    with pytest.raises(InvalidInput, match=r"one\.jsonl:2: ") as caught:
        check_records(open_records(tmp_path / "one.jsonl"), RequiredFields("question", ["answer"],
                                                                           imitated={"answer"}))
    assert said in str(caught.value)


def test_what_takes_the_place_of_an_empty_question(tmp_path):
    texts = ["", "a", "", "b", ""]
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"question": text, "answer": "0"}) for text in texts))
    (tmp_path / "none.jsonl").write_text('{"question": "", "answer": "0"}\n' * 2)
    events.current().open(tmp_path / "events.jsonl", 0)
    try:
        fields = RequiredFields("question", ["answer"])
        records = UsableRecords(open_records(tmp_path / "some.jsonl"), fields)
        current().take()
        assert [record["question"] for record in records.get(range(5))] == ["b", "a", "b", "b", "b"]  # by steps of 3
        assert current().collect(lambda mine: [mine])["data/records_skipped"] == 6  # 1, 3 and 1, 5 and 3 and 1
    finally:
        events.current().path = None
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["where"].rpartition(":")[2]) for event in told] == [("record_skipped", line)
                                                                                       for line in "135"]
    with pytest.raises(InvalidInput, match="no record can be used: field `[a-z]*` of this one is empty"):
        UsableRecords(open_records(tmp_path / "none.jsonl"), RequiredFields("question")).get([0])
    records = UsableRecords(open_records(tmp_path / "some.jsonl"), RequiredFields("question", ["answer"]),
                            lambda record: record["question"] == "a")
    assert [record["question"] for record in records.get(range(5))] == ["b"] * 5
    (tmp_path / "long.jsonl").write_text('{"question": "a", "answer": "0"}\n' * 2)
    with pytest.raises(InvalidInput, match="field `question` of this one is too long a prompt") as caught:
        UsableRecords(open_records(tmp_path / "long.jsonl"), RequiredFields("question"), lambda record: True).get([0])
    assert "Without images prompts can be cut:  data: {long_prompts: cut}" in str(caught.value)


def test_a_batch_far_beyond_the_records_is_refused_at_once(tmp_path, capsys):
    validate = ["validate", "dags/good.yaml", "--run-file", "run_files/good.yaml"]
    assert cli.main([*validate, "--set", "data.batch=100000000"]) == 2
    said = capsys.readouterr().err
    assert "--set data.batch=100000000: `data.batch` asks for 100,000,000 questions in each step, and the data has 2." \
        in said
    assert "Instead:  data: {batch: 2}" in said
    assert cli.main([*validate, "--set", "data.batch=3"]) == 0
    assert "note: data.batch (3) is more than the 2 records" in capsys.readouterr().out
    assert cli.main([*validate, "--set", "data.batch=256"]) == 0, "to learn one prompt by heart is a first check"
    assert "note: data.batch (256) is more than the 2 records" in capsys.readouterr().out


def test_fields_of_ones_own_are_asked_of_the_training_data_alone(capsys):
    """Validation answers questions; it needs no pairs. The shipped run of `dpo` validates on problems without any."""
    assert cli.main(["validate", "dpo"]) == 0
    assert cli.main(["validate", "dpo", "--set", "data.columns=[chosen, rejected, third]"]) == 2
    said = capsys.readouterr().err
    assert "preferences.jsonl:1: the record has no field `third`" in said
    assert "`data.columns` or the validation asks for `third`" in said
    assert "data.question" not in said, "another question would not help"


@pytest.mark.parametrize(("arguments", "says"), [
    (["grpo", "--run-file", "ppo"], "`ppo` is a shipped DAG, given as the run file.\n"
     "Instead:  --dag ppo\n"),
    (["embedded.yaml"], "`embedded.yaml` is a shipped run file, given as the DAG.\n"
     "Instead:  --dag grpo --run-file embedded.yaml\n"),
    (["h200"], "Instead:  --dag grpo --cluster h200\n"),
    ([], "which DAG?\nGive one:  --dag grpo\n"),
    (["grpo", "--ranks", "1", "--set", "layouts.update.tp=2"], "splits its model over 2 ranks (tp: 2), which do not"),
    (["grpo", "--set", "roles.actor.replicas=4"], "wants 4 replicas, which do not divide the 2 ranks"),
])
def test_what_was_confused_is_named(arguments, says, capsys):
    assert cli.main(["validate", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["planners", "workers"])
def test_a_project_with_packages_of_our_names(name, tmp_path):
    """One in the current folder does not matter; one that Python finds before ours is named."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    command = [str(Path(sys.executable).with_name("distflow")), "validate", "grpo"]
    clean = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # the command may be another checkout's
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first = {**clean, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=first, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"`{name}` is found at {tmp_path / name}, but distflow's own lies at {ROOT / name}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["resume", "evaluate", "set"])
def test_half_a_launch_file_is_named(verb, tmp_path, capsys):
    (tmp_path / "launch.json").write_text('{"search": [')
    (tmp_path / "dag.yaml").write_text("name: a\nroles: {actor: {trained: true, copy_of: null}}\nnodes: {}\n")
    (tmp_path / "run.yaml").write_text("data: {}\nroles: {}\n")
    (tmp_path / "model").mkdir()
    assert cli.main([verb, str(tmp_path), *(["samples=3"] if verb == "set" else [])]) == 2
    assert "launch.json is damaged" in capsys.readouterr().err


@pytest.fixture
def good(tmp_path):
    return ["--dag", "dags/good.yaml", "--run-file", "run_files/good.yaml", "--set", f"output={tmp_path / 'out'}"]


@pytest.mark.parametrize("more", [["--set", "steps=no"], ["--set", "data.train=../data/malformed.jsonl"],
                                  ["--dag", "dags/cycle.yaml"]])
def test_launch_gives_one_message_and_exit_code_2(good, tmp_path, more):
    done = subprocess.run([sys.executable, str(ROOT / "distflow/launch.py"), *good, *more], cwd=BAD, check=False,
                          capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "something was written"


@pytest.mark.parametrize(("written", "noted"), [
    ("End with #### and the number.", '{file}:4:  prompt_suffix: "End with #### and the number."'),
    ("End with it. # as GSM8K does", ""), ('"End with #### and the number."', ""), ("End with#it", "")])
def test_a_text_that_a_comment_cuts_is_noted(tmp_path, written, noted):
    file = tmp_path / "run.yaml"
    (tmp_path / "sums.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    file.write_text(f"steps: 1\nroles: {{actor: {{model: {{architecture: qwen3}}}}}}\n"
                    f"data: {{train: {tmp_path}/sums.jsonl, batch: 1,\n  prompt_suffix: {written}\n  }}\n")
    notes = [note for note in check_data(load("grpo", str(file))) if "comment" in note]
    assert len(notes) == bool(noted)
    assert all(noted.format(file=file) in note for note in notes)
