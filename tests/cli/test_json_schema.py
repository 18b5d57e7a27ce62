"""JSON schemas that editors use: shipped files fit them, misspelt keys do not, and the shipped schemas are fresh."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from harness import ROOT

from distflow.cli import main
from distflow.cli.json_schema import KINDS, schema
from distflow.config.yaml_source import parse, read

jsonschema = pytest.importorskip("jsonschema")
FILES = {"dag": [*(ROOT / "dags").glob("*.yaml"), *(ROOT / "examples").glob("*/*.yaml")],
         "run": [*(ROOT / "dags/runs").glob("*.yaml")], "cluster": [*(ROOT / "dags/clusters").glob("*.yaml")]}
EVERY = [pytest.param(kind, file, id=f"{kind}-{file.stem}") for kind, files in FILES.items() for file in sorted(files)]


@pytest.fixture(scope="module")
def validators():
    found = {kind: jsonschema.Draft202012Validator(schema(kind)) for kind in KINDS}
    for validator in found.values():
        validator.check_schema(validator.schema)
    return found


@pytest.mark.parametrize(("kind", "file"), EVERY)
def test_shipped_files_fit_and_misspelt_keys_do_not(validators, kind, file):
    content = read(file).data
    assert [error.message for error in validators[kind].iter_errors(content)] == []
    for key in content:
        wrong = copy.deepcopy(content)
        wrong[f"{key}x"] = wrong.pop(key)
        assert not validators[kind].is_valid(wrong), key


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [pytest.param(text, id=f"{page.stem}-{number}") for page in PAGES for number, text in
          enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))]


@pytest.fixture(scope="module")
def validators_of_parts():
    """Of parts of files, which need not have what a whole file must."""
    return {kind: jsonschema.Draft202012Validator({name: part for name, part in schema(kind).items()
                                                   if name != "required"}) for kind in KINDS}


@pytest.mark.parametrize("text", BLOCKS)
def test_what_the_pages_print_fits(validators_of_parts, text):
    """Parts of files fit their part: nodes stand below `nodes`."""
    content = parse(text, "page").data
    if all(isinstance(value, dict) and "type" in value for value in content.values()):
        content = {"nodes": content}
    if set(content) == {"reference"}:
        content = {"roles": content}
    wrong = {kind: [error.message for error in validator.iter_errors(content)]
             for kind, validator in validators_of_parts.items()}
    assert not all(wrong.values()), wrong


def test_a_copied_dag_is_told_where_its_schema_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "dags/grpo.yaml").read_text()
    Path("mine.yaml").write_text(text)
    assert main(["validate", "mine.yaml"]) == 0
    note = next(line for line in capsys.readouterr().out.splitlines() if "for editors" in line)
    right = note.partition("Instead:  ")[2]
    Path("mine.yaml").write_text(text.replace("# yaml-language-server: $schema=schema/dag.json", right))
    assert json.loads(Path(right.partition("$schema=")[2]).read_text())["title"] == "distflow dag file"
    assert main(["validate", "mine.yaml"]) == 0
    assert "for editors" not in capsys.readouterr().out


def test_settings_of_functions_are_checked(validators):
    dag = yaml.safe_load((ROOT / "dags/grpo.yaml").read_text())
    for settings in ({"klip": 0.2}, {"clip": "much"}, {"clip": -1}):
        dag["nodes"]["update"]["with"] = settings
        assert not validators["dag"].is_valid(dag), settings
    dag["nodes"]["update"] |= {"function": "my_rl.losses:update", "with": {"klip": 0.2}}
    assert validators["dag"].is_valid(dag), "a function of the user's own has settings that are not known here"


@pytest.mark.parametrize("generation", [{"stop": "\n"}, {"stop": ["\n", "END"]}])
def test_shorthands_are_taken(validators, generation):
    run = {"steps": 1, "data": {"train": "x.jsonl"},
           "roles": {"actor": {"model": "models/mine", "lora": {"targets": "all-linear"}, "generation": generation}}}
    assert [error.message for error in validators["run"].iter_errors(run)] == []
    run["roles"]["actor"]["model"] = 3
    assert not validators["run"].is_valid(run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_schemas_are_what_the_command_prints(kind, capsys):
    assert main(["schema", kind]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["title"] == f"distflow {kind} file"
    assert (ROOT / f"dags/schema/{kind}.json").read_text() == shown, "make docs writes it anew"


@pytest.mark.parametrize(("kind", "file"), [each for each in EVERY if "examples" not in each.values[1].parts])
def test_shipped_files_name_their_schema(kind, file):
    line = next(line for line in file.read_text().splitlines() if line.startswith("# yaml-language-server: "))
    assert (file.parent / line.partition("$schema=")[2]).resolve() == ROOT / f"dags/schema/{kind}.json"
