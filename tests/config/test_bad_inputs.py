"""Every kind of bad input gives one message: what, where, and what to write instead. The files are in bad_inputs/, each
with what is said of it at its end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from distflow.config.load import load, load_for_planning
from distflow.errors import Diagnostic, InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
BAD = ROOT / "tests/bad_inputs"


@dataclass(frozen=True)
class Case:
    """A bad file; where its one mistake stands, what is underlined there, and parts of what is said."""

    file: str
    line: int
    under: str
    others: tuple[int, ...]
    """Lines of further mistakes, if there are any."""
    says: list[str]

    def __str__(self) -> str:
        return self.file


def cases(folder: str) -> list[Case]:
    """Return what the files of a folder say of themselves at their end: `#! LINE "UNDERLINED" OTHER LINES`, and below
    it a part of the message in each line."""
    found: list[Case] = []
    for path in sorted((BAD / folder).glob("*.yaml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if head := re.fullmatch(r'#! (\d+) (".*")((?: \d+)*)', line):
                others = tuple(map(int, head[3].split()))
                found.append(Case(path.stem, int(head[1]), json.loads(head[2]), others, []))
            elif line.startswith("#!   "):
                found[-1].says.append(line.removeprefix("#!   "))
    return found


OVERRIDES = [
    ("steps", "expected KEY=VALUE"),
    ("=3", "expected KEY=VALUE"),
    ("roles..learning_rate=1", "expected KEY=VALUE"),
    ("steps=[1", "`[` is opened here and never closed.\nInstead:  [1]"),
    ("seed={a: 1, a: 2}", "key `a` stands twice"),
    ("stepz=3", "unknown key `stepz`.\nDid you mean `steps`?"),
    ("steps=three", "`steps` must be a whole number, not 'three'"),
    ("steps.more=3", "`steps` is not a mapping, so it has no `more`"),
    ("roles.actor=5", "`roles.actor` must be a mapping, not 5"),
    ("nodes.rollout.with.group_sise=4", "has no setting `group_sise`.\nDid you mean `group_size`?"),
    ("nodes.update.dependencies=[reward, rollout]", "reads column `advantages`, which node `advantage` writes"),
    ("layouts={reward: {dp: 9}}", "node `reward` wants dp 9"),
    ("roles.critic.learning_rate=1", "DAG `bad` has no role `critic`, so that this would change nothing"),
    ("roles.reward.learning_rate=1", "DAG `bad` has no role `reward`, so that this would change nothing"),
    *((f"training_api={text}", "is no address, which is a host, or HOST:PORT") for text in (
        "http://localhost:8000", "localhost:8000/v1", "a@b:1", "'8000'", "0:8000", ":8000")),
    ("training_api=localhost:port", "`localhost:port` is no address: "),
]


@pytest.fixture(autouse=True)
def _in_bad_inputs(monkeypatch):
    monkeypatch.chdir(BAD)
    monkeypatch.syspath_prepend(str(BAD / "modules"))


def mistakes_of(dag: str = "good", run: str = "good", ranks: int = 2, **more) -> tuple[Diagnostic, ...]:
    with pytest.raises(InvalidInput) as caught:
        plan(load_for_planning(f"dags/{dag}.yaml", f"run_files/{run}.yaml", **more), ranks)
    return caught.value.mistakes


def check(expected: Case, file: str, mistakes: tuple[Diagnostic, ...]) -> None:
    at = [mistake for mistake in mistakes if (mistake.where.file, mistake.where.line) == (file, expected.line)]
    assert at, f"no mistake at {file}:{expected.line}: {mistakes}"
    first, text = at[0], str(at[0])
    assert text.startswith(f"{first.where}: ")
    assert first.where.text[first.where.column - 1 :][: first.where.length] == expected.under
    assert f"    {expected.line} |  " in text
    assert "^" * len(expected.under) in text
    for part in expected.says:
        assert part in text
    assert sorted(mistake.where.line for mistake in mistakes) == sorted((expected.line, *expected.others))


@pytest.mark.parametrize("expected", cases("dags"), ids=str)
def test_dag(expected):
    check(expected, f"dags/{expected.file}.yaml", mistakes_of(dag=expected.file))


@pytest.mark.parametrize("expected", cases("run_files"), ids=str)
def test_run_file(expected):
    check(expected, f"run_files/{expected.file}.yaml", mistakes_of(run=expected.file))


@pytest.mark.parametrize("expected", cases("clusters"), ids=str)
def test_cluster(expected):
    file = f"clusters/{expected.file}.yaml"
    check(expected, file, mistakes_of(ranks=4, cluster=file))


@pytest.mark.parametrize(("override", "says"), OVERRIDES)
def test_override(override, says):
    (mistake,) = mistakes_of(overrides=[override])
    assert str(mistake).startswith(f"--set {override}: ")
    assert says in str(mistake)


def test_every_file_is_tried():
    elsewhere = {"good", "empty", "list", "cycle", "cycle_of_three", "two_cycles", "several", "missing_steps",
                 "no_roles", "wrong_values", "validation_without_training", "broken_module",
                 "crashing_module", "missing_in_module", "wrong_marks", "wrong_rewards"}
    for folder in ("dags", "run_files", "clusters"):
        files = {path.stem for path in (BAD / folder).glob("*.yaml")}
        assert files - elsewhere == {each.file for each in cases(folder)}


def test_what_is_good_passes():
    assert plan(load("dags/good.yaml", "run_files/good.yaml"), 2).tasks


def test_wrong_values_are_all_shown():
    text = str(InvalidInput(mistakes_of(run="wrong_values")))
    for part in ("`steps` must be a whole number, not 'ten'", "`seed` must be at least 0, not -1",
                 "Did you mean `sync`?", "`wait_limit` must be a finite number, not inf",
                 "`roles.actor.learning_rate` must be greater than 0, not 0",
                 "`roles.actor.betas` must have at least 2 items",
                 "`roles.actor.max_grad_norm` must be a number, not true", "7 mistakes."):
        assert part in text


def test_missing_required_keys_of_a_run():
    (mistake,) = mistakes_of(run="missing_steps")
    assert str(mistake) == "run_files/missing_steps.yaml: `steps` is missing.\nAdd `steps:` here."
    assert "role `actor` has no model" in str(mistakes_of(run="no_roles")[0])


@pytest.mark.parametrize(("dag", "found"), [("empty", "nothing"), ("list", "a list")])
def test_not_a_mapping(dag, found):
    (mistake,) = mistakes_of(dag=dag)
    assert str(mistake) == f"dags/{dag}.yaml: expected `key: value` lines, found {found}."


def test_cycle_reads_as_in_the_style_guide():
    (mistake,) = mistakes_of(dag="cycle")
    assert str(mistake) == """\
dags/cycle.yaml: these nodes wait for each other, so none can run:

    8 |  advantage   waits for  update
    9 |  update      waits for  advantage

A DAG describes one step; roles keep their weights between steps, so `advantage` probably needs no dependency \
on `update`.
Instead:  advantage: {…, dependencies: [reward]}"""


def test_cycle_of_three_proposes_the_edge_that_points_down():
    (mistake,) = mistakes_of(dag="cycle_of_three")
    assert "    6 |  rollout     waits for  advantage\n    7 |  reward      waits for  rollout\n    8 |" in str(mistake)
    assert "Instead:  rollout: {…}  without `dependencies`" in str(mistake)


def test_two_cycles_are_both_shown():
    first, second = mistakes_of(dag="two_cycles")
    assert "8 |  advantage   waits for  update" in str(first)
    assert "10 |  ping   waits for  pong" in str(second)


def test_several_mistakes_of_both_files_are_counted():
    text = str(InvalidInput(mistakes_of(dag="several", run="unknown_layout")))
    for part in ("several.yaml:7: unknown key `dependson`", "several.yaml:8: node `advantage`: there is no function",
                 "several.yaml:9: node `update` depends on `advantages`",
                 "several.yaml:9: node `update`: setting `clip`", "unknown_layout.yaml:3: `layouts` names `rollot`"):
        assert text.count(part) == 1
    assert text.endswith("\n\n5 mistakes.")


def test_module_with_a_syntax_error():
    (mistake,) = mistakes_of(dag="broken_module")
    assert str(mistake).startswith("modules/broken_module.py:3: module `broken_module` is not valid Python: ")
    assert "    3 |  def broken(:\n" in str(mistake)
    assert str(mistake).endswith("dags/broken_module.yaml:3 names the module.")


def test_what_a_module_imports_and_is_not_there():
    """Found without running it. What a function or a `try` imports may be missing."""
    (mistake,) = mistakes_of(dag="missing_in_module")
    text = str(mistake)
    assert text.startswith("modules/missing_imports.py:6: module `missing_imports` imports `no_such_package.deep`, "
                           "which cannot be found.\n\n    6 |  import no_such_package.deep\n")
    assert "It was looked for in modules, " in text
    assert "PYTHONPATH=FOLDER" in text
    assert text.endswith("dags/missing_in_module.yaml:3 names the module.")


@pytest.mark.parametrize(("imported", "says"), [
    ("./brevity.py", "Write a module as Python imports it:  brevity"),
    ("brevty", "Did you mean `brevity`?"),
    ("workers.mine", "`workers` is a package of distflow itself: give yours another name."),
    ("kept.main", "module `kept.there` imports `kept.gone`, which cannot be found"),
])
def test_how_a_module_is_probably_named(imported, says, tmp_path):
    (tmp_path / "brevity.py").write_text("")
    (tmp_path / "kept").mkdir()
    for name, text in (("__init__", ""), ("main", "from . import there\nfrom .there import it\n"),
                       ("there", "from kept.gone import it\n")):
        (tmp_path / f"kept/{name}.py").write_text(text)
    dag = tmp_path / "dag.yaml"
    dag.write_text(Path("dags/good.yaml").read_text() + f"imports: [{imported}]\n")
    with pytest.raises(InvalidInput) as caught:
        plan(load(str(dag), "run_files/good.yaml"), 2)
    assert says in str(caught.value)


def test_module_that_fails_when_imported():
    (mistake,) = mistakes_of(dag="crashing_module")
    text = str(mistake)
    assert text.startswith("modules/crashing_module.py:4: module `crashing_module` fails when it is imported: "
                           "KeyError: 'rows'.")
    assert '    4 |  LIMIT = LIMITS["rows"]' in text
    assert "dags/crashing_module.yaml:8 names the module." in text


def test_marks_that_do_not_fit_their_function():
    text = str(InvalidInput(mistakes_of(dag="wrong_marks")))
    for part in ("modules/wrong_marks.py:13: @node of `muddled`: `type` is 'COMPUT'", "`repeats` names `copies`",
                 "`requires` names column `reference_logprobs`", "`keep_together` is 'episode'",
                 "modules/wrong_marks.py:13: setting `kl` of `muddled` has `Field(min=0)` in its annotation",
                 "setting `epsilon` of `muddled` has a default that must be above 0, not 0.0",
                 "`belongs_to` of `kl` is 'clip'",
                 "`refills` is for a function that says which rows stay",
                 "`only_with` of `epsilon` is ('kl', 0.1)",
                 "`refuses` of `kl` is 'k1'", "`head` is 'number'", "It is one of: lm, value.",
                 "`row_wise` is for a MODEL_INFERENCE function", "12 mistakes."):
        assert part in text


def test_validation_needs_a_trained_role(tmp_path):
    dag = tmp_path / "dag.yaml"
    dag.write_text("name: only\nroles: {actor: {}}\nnodes: {a: {role: actor, type: MODEL_INFERENCE}}\n")
    with pytest.raises(InvalidInput, match=r"training\.yaml:7: `validation` asks how well .* DAG `only` trains none"):
        plan(load(str(dag), "run_files/validation_without_training.yaml"), 2)


def test_validation_needs_a_role_that_answers(tmp_path):
    dag = tmp_path / "dag.yaml"
    dag.write_text("name: only\nroles: {actor: {trained: true, head: value}}\nnodes:\n"
                   "  pairs: {role: actor, type: MODEL_INFERENCE, function: labelled_pairs}\n"
                   "  update: {role: actor, type: MODEL_TRAIN, function: reward_update, dependencies: [pairs]}\n")
    run = "run_files/validation_without_training.yaml"
    columns = ["data.columns=[chosen, rejected]"]
    with pytest.raises(InvalidInput, match="DAG `only` trains none that has a vocabulary to answer with") as caught:
        plan(load(str(dag), run, columns), 2)
    assert len(caught.value.mistakes) == 1
    assert plan(load(str(dag), "run_files/good.yaml", columns), 2).tasks


def test_no_ranks():
    assert str(mistakes_of(ranks=0)[0]) == "a plan needs at least 1 rank, not 0."


def test_of_many_mistakes_the_first_are_shown():
    said = str(InvalidInput([Diagnostic(f"key {number} is unknown") for number in range(1000)]))
    assert "key 49 is" in said
    assert "key 50 is" not in said
    assert said.endswith("1000 mistakes. The first 50 are shown.")
