"""Rewards that are named: found in source, their settings and columns checked, every mistake with its line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.config.load import load
from distflow.errors import InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
BAD = ROOT / "tests/bad_inputs"
DAG = """\
name: good
imports: [{imports}]
roles:
  actor: {{trained: true}}
nodes:
  rollout:   {{role: actor, type: MODEL_INFERENCE, function: generate, with: {{group_size: 2}}}}
  reward:    {{role: reward, type: COMPUTE, function: score, dependencies: [rollout],
              with: {{reward: {reward}}}}}
  advantage: {{role: actor, type: COMPUTE, function: group_advantage, dependencies: [reward]}}
  update:    {{role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}}
"""
RUN = """\
steps: 1
roles: {{actor: {{model: {{architecture: qwen3}}}}}}
data: {{train: data/good.jsonl, columns: [{columns}]{more}}}
validation: {{data: {{heldout: data/good.jsonl}}, reward: {reward}}}
"""


@pytest.fixture(autouse=True)
def _in_bad_inputs(monkeypatch):
    monkeypatch.chdir(BAD)
    monkeypatch.syspath_prepend(str(BAD / "modules"))


@pytest.fixture
def planned(tmp_path):
    """The columns that the node `reward` reads, and from where, for a recipe."""

    def planned(reward: str, columns: str = "", validation: str = "math", imports: str = "rewards_of_ones_own",
                more: str = ""):
        (tmp_path / "dag.yaml").write_text(DAG.format(reward=reward, imports=imports))
        (tmp_path / "run.yaml").write_text(RUN.format(columns=columns, reward=validation, more=more))
        made = plan(load(str(tmp_path / "dag.yaml"), str(tmp_path / "run.yaml")), 2)
        task = next(task for task in made.tasks if task.node == "reward")
        return {column.parameter: (column.producer, column.form) for column in task.reads}

    return planned


TWO = """\
name: two
roles: {actor: {trained: true}}
nodes:
  first: {role: actor, type: MODEL_INFERENCE, function: generate, with: {group_size: 8}}
  second: {role: actor, type: MODEL_INFERENCE, function: generate, with: {group_size: 8},
           writes: {responses: r2, rollout_logprobs: l2, versions: v2, completions: c2}}
  scored: {role: reward, type: COMPUTE, function: score, dependencies: [first]}
  judged: {role: reward, type: COMPUTE, function: score, dependencies: [second], reads: {completions: c2},
           writes: {rewards: s2}}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [scored, judged]}
  update: {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
"""
MISTAKES = [
    (8, "maths", "node `a`: there is no reward `maths`", "Did you mean `math`? Rewards: code,"),
    (9, "formt", "node `b`: there is no reward `formt`", "Did you mean `format`?"),
    (10, "lenght", "node `c`: there is no reward `lenght`", "Did you mean `length`?"),
    (11, "5", "a reward cannot be 5", "reward: {math: 1.0, length: 0.2}"),
    (12, "[]", "a reward cannot be []", ""),
    (13, "math", "reward `math` stands twice", "reward: {math: 2.0}"),
    (14, "lots", "the weight of reward `math` must be a number, not 'lots'", "math: {weight: 1.0, …}"),
    (15, "0", "the timeout of reward `math` must be a number of seconds above 0, not 0", ""),
    (16, "0.5", "the retries of reward `math` must be a whole number of at least 0, not 0.5", ""),
    (17, "patern", "reward `format` has no setting `patern`", "Did you mean `pattern`?"),
    (18, "'(x'", "setting `pattern` of reward `format` is not a regular expression: missing )", ""),
    (19, "long", "setting `target` of reward `length` must be a whole number or null, not 'long'", ""),
    (20, "judge", "reward `judge` needs the setting `address`", "reward: {judge: {address: …}}   (str)"),
    (20, "judge", "reward `judge` needs the setting `model`", ""),
    (21, "math", "`rewards` must say the reward for each value of `answers`", "reward: {by: source, rewards: {gsm8k:"),
    (22, "{rewards: {a: math}}", "`by` must name a column of text", ""),
    (23, "reward", "unknown key `reward` beside `by` and `rewards`", "Did you mean `rewards`?"),
    (23, "{by: answers, reward: {a: math}}", "`rewards` must say the reward for each value of `answers`", ""),
    (24, "mth", "there is no reward `mth`", "Did you mean `math`?"),
    (25, "'['", "setting `pattern` of reward `passes` is not a regular expression", ""),
]


def test_every_mistake_has_its_line():
    with pytest.raises(InvalidInput) as raised:
        load("dags/wrong_rewards.yaml", "run_files/good.yaml")
    found = raised.value.mistakes
    assert len(found) == len(MISTAKES)
    for line, under, what, hint in MISTAKES:
        (mistake,) = [each for each in found if each.where.line == line and what in each.what]
        assert mistake.where.text[mistake.where.column - 1 :][: mistake.where.length] == under
        assert hint in mistake.hint


def test_columns_of_rewards_become_reads_of_the_node(planned, monkeypatch):
    monkeypatch.delitem(sys.modules, "rewards_of_ones_own", raising=False)
    own = {"completions": ("rollout", "list[str]"), "answers": ("source", "list[str]"), "row": ("source", "Tensor"),
           "group": ("source", "Tensor")}
    assert planned("math") == {**own, "cut_thoughts": ("rollout", "Tensor")}
    assert planned("{passes: {most: 1}}", "tests") == {**own, "tests": ("source", "list[str]")}
    assert planned("{passes: {most: 1}}", "tests, hints") == {
        **own, "tests": ("source", "list[str]"), "hints": ("source", "list[str]")}
    assert planned("[math, polite]") == {**own, "cut_thoughts": ("rollout", "Tensor"),
                                         "rollout_logprobs": ("rollout", "Ragged")}
    assert planned("{length: {cap: 9}}") == {**own, "responses": ("rollout", "Ragged")}
    assert planned("{by: topic, rewards: {a: math, b: {passes: {most: 1}}}}", "tests, topic") == {
        **own, "cut_thoughts": ("rollout", "Tensor"), "topic": ("source", "list[str]"),
        "tests": ("source", "list[str]")}
    assert "rewards_of_ones_own" not in sys.modules


@pytest.mark.parametrize(("dag", "wanted"), [
    ("remax", {"baseline": "greedy", "reward": "rollout"}), ("grpo", {"reward": "rollout"}),
    ("solver_reviser", {"solved": "solve", "revised": "revise"}),
    ("two", {"scored": "first", "judged": "second"}), ("older", {"scored": "first", "judged": "second"})])
def test_rewards_read_which_of_their_own_responses_are_cut_off_in_thoughts(tmp_path, dag, wanted):
    """A name that a DAG gives them says nothing: they go with the completions."""
    (tmp_path / "two.yaml").write_text(TWO)
    (tmp_path / "older.yaml").write_text(TWO.replace("completions: c2", "completions: c2, cut_thoughts: t2"))
    made = plan(load(str(tmp_path / f"{dag}.yaml") if dag in ("two", "older") else dag), 1)
    assert {task.node: next((read.producer for read in task.reads if read.parameter == "cut_thoughts"), None)
            for task in made.tasks if task.node in wanted} == wanted


def test_names_that_nothing_goes_by_are_refused_and_others_are_kept(tmp_path):
    (tmp_path / "named.yaml").write_text(TWO.replace("versions: v2", "versions: v2, completions.cut_thoughts: t2"))
    (second,) = [task for task in plan(load(str(tmp_path / "named.yaml")), 1).tasks if task.node == "second"]
    assert {"c2", "t2"} <= {*second.writes}
    (tmp_path / "idle.yaml").write_text(TWO.replace("group_advantage", "group_advantage, reads: {cut_thoughts: t}"))
    with pytest.raises(InvalidInput, match="function `group_advantage` reads no `cut_thoughts`"):
        plan(load(str(tmp_path / "idle.yaml")), 1)


def test_a_reward_is_named_with_its_module_and_not_imported(planned, monkeypatch):
    monkeypatch.delitem(sys.modules, "rewards_of_ones_own", raising=False)
    reads = planned("{'rewards_of_ones_own:passes': {most: 1}}", "tests", "rewards_of_endings:ended", imports="")
    assert reads["tests"] == ("source", "list[str]")
    assert "rewards_of_ones_own" not in sys.modules


@pytest.mark.parametrize(("reward", "what", "hint"), [
    ("no_module:near", "node `reward`: module `no_module` cannot be found", "It was looked for in"),
    ("rewards_of_ones_own:passed", "node `reward`: module `rewards_of_ones_own` has no reward `passed`", "`passes`?"),
    ("rewards_of_ones_own:math", "node `reward`: module `rewards_of_ones_own` has no reward `math`", "Rewards in it"),
    ("['rewards_of_endings:ended', 'bounded:ended']", "node `reward`: module `bounded` has no reward `ended`",
     "rewards_of_endings.py:"),
    ("workers:math", "node `reward`: module `workers` has no reward `math`", "Write  reward: math"),
    ("missing_imports:near", "module `missing_imports` imports ", "It was looked for in"),
    ("broken_module:near", "module `broken_module` is not valid Python", "")])
def test_mistakes_in_a_module_of_a_reward(planned, reward, what, hint):
    with pytest.raises(InvalidInput) as caught:
        planned(reward, imports="")
    mistake = caught.value.mistakes[0]
    assert mistake.what.startswith(what)
    assert mistake.where.line
    assert hint in mistake.hint


@pytest.mark.parametrize("imports", ["", "rewards_of_endings"])
def test_check_rewards_takes_one_that_its_module_imports(planned, imports):
    assert planned("rewards_imported:ended", imports=imports)["finished"] == ("rollout", "Tensor")


@pytest.mark.parametrize(("reward", "spelling"), [
    ("['rewards_of_endings:ended', ended, math]", "ended"),
    ("[ended, math, 'rewards_of_endings:ended']", "rewards_of_endings:ended"),
    ("{'rewards_of_endings:ended': 1.0, ended: 1.0}", "ended"),
    ("[math, 'workers.isolation.rewards.texts:math']", "workers.isolation.rewards.texts:math")])
def test_one_reward_under_two_spellings(planned, reward, spelling):
    with pytest.raises(InvalidInput) as caught:
        planned(reward, imports="rewards_of_endings")
    (mistake,) = caught.value.mistakes
    assert mistake.what.startswith(f"node `reward`: reward `{spelling}` stands twice, as `")
    assert mistake.where.line == 8
    assert mistake.where.text[mistake.where.column - 1 :].lstrip("'").startswith(spelling)


def test_two_rewards_of_one_run_with_one_name(planned):
    with pytest.raises(InvalidInput) as caught:
        planned("'rewards_named_badly:length'", imports="")
    (mistake,) = caught.value.mistakes
    assert "texts.py:" in mistake.what
    assert "two rewards of one run cannot have one name, also where each is named with its module" in mistake.what
    assert mistake.hint == "Rename one of them:  def length_2(…)  , named  reward: rewards_named_badly:length_2"


def test_a_field_of_the_data_named_like_a_column_of_the_rollout(planned):
    with pytest.raises(InvalidInput) as caught:
        planned("ended", "finished", imports="rewards_of_endings")
    (mistake,) = caught.value.mistakes
    assert mistake.what == "node `rollout` writes column `finished`, which comes from the dataset"
    assert mistake.hint == "Rename it:  rollout: {…, writes: {finished: rollout_finished}}"


def test_a_misspelt_parameter_is_mended_where_it_stands(planned, tmp_path, monkeypatch):
    (tmp_path / "rewards_misspelt.py").write_text(
        "from distflow import reward\n\n@reward\ndef misspelt(completion, answr):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        planned("misspelt", imports="rewards_misspelt")
    (mistake,) = caught.value.mistakes
    assert "Did you mean `answer`?" in mistake.hint
    assert "reads: {" not in mistake.hint
    assert ", cut_thoughts, " in mistake.hint


def test_a_column_that_does_not_exist(planned, tmp_path):
    with pytest.raises(InvalidInput) as caught:
        planned("{passes: {most: 1}}", "test")
    (mistake,) = caught.value.mistakes
    assert mistake.where.line == 7
    text = str(mistake)
    assert "node `reward`: reward `passes` reads column `tests`, which no node writes" in text
    assert "Did you mean `test`?" in text
    assert "reward: {…, reads: {tests: test}}" in text
    assert "data: {…, columns: [test, tests]}" in text
    with pytest.raises(InvalidInput, match=r"`by` reads column `topic`, which no node writes"):
        planned("{by: topic, rewards: {a: math}}")


@pytest.mark.parametrize(("parameters", "meant"), [("completion, answr", "answer"), ("completions, answrs", "answers")])
def test_a_misspelt_parameter_of_a_reward_is_told_the_name_of_its_kind(planned, tmp_path, monkeypatch, parameters,
                                                                        meant):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"spelt_{meant}.py").write_text(
        f"from distflow import reward\n\n@reward\ndef near({parameters}): return 1.0\n")
    for settings in ({"reward": f"'spelt_{meant}:near'"}, {"reward": "math", "validation": f"'spelt_{meant}:near'"}):
        with pytest.raises(InvalidInput, match=f"Did you mean `{meant}`. Columns: "):
            planned(**settings, imports="")


@pytest.mark.parametrize(("parameters", "says"), [
    ("data_source, solution_str, ground_truth", "What TRL and verl call so is `completion` here."),
    ("solution_str, ground_truth, extra_info=None", "What TRL and verl call so is `answer` here."),
    ("completion, prompt", "What TRL and verl call so is `question` here."),
    ("completions, prompts, **kwargs", "takes `prompts`, which are tokens.(.|\n)*questions  for their texts")])
def test_parameters_of_other_frameworks_are_told_their_names_here(planned, tmp_path, monkeypatch, parameters, says):
    monkeypatch.syspath_prepend(str(tmp_path))
    name, source = f"ported_{len(parameters)}", f"@reward\ndef near({parameters}): return 1.0\n"
    (tmp_path / f"{name}.py").write_text(f"from distflow import reward\n\n{source}")
    with pytest.raises(InvalidInput, match=says):
        planned(f"'{name}:near'", imports="")


def test_validation_takes_the_same_forms_and_has_no_nodes(planned):
    assert planned("math", "tests", "{math: 1.0, passes: {weight: 0.5, most: 1}, length: {cap: 9}}")
    assert planned("math", validation="ended", imports="rewards_of_endings")
    with pytest.raises(InvalidInput) as caught:
        planned("math", "test", "[maths, polite, {x: 1}]")
    texts = [str(mistake) for mistake in caught.value.mistakes]
    assert len(texts) == 3
    assert any("run.yaml:4: `validation`: there is no reward `maths`" in text for text in texts)
    assert any("`validation`: a list of rewards holds names, not {'x': 1}" in text for text in texts)
    assert any("reward `polite` reads column `rollout_logprobs`, which the data does not" in text for text in texts)


@pytest.mark.parametrize(("reward", "match"), [
    ("rewards_mixed:mixed", r"mixed\.py:7: reward `mixed` has parameter `completion`, of one sample, beside"),
    ("rewards_of_numbers:wants_numbers", r"numbers\.py:7: reward `wants_numbers` takes `answer` as float, but it is"),
    ("rewards_of_all:mean", r"all\.py:7: a reward cannot be called `mean`"),
    ("rewards_named_badly:length", r"badly\.py:7: reward `length` has the name of another one \(.*texts\.py:")])
def test_rewards_that_cannot_be(planned, reward, match):
    with pytest.raises(InvalidInput, match=match):
        planned(reward, imports=reward.partition(":")[0])


def test_a_reward_that_cannot_be_stops_no_other_of_its_module(planned, tmp_path, monkeypatch):
    (tmp_path / "mine_of_two.py").write_text(
        "from distflow import reward\n@reward\ndef odd(completions, answer):\n    return [1.0]\n"
        "@reward\ndef good(completion, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "passing_on.py").write_text("from mine_of_two import good\n")
    assert "answers" in planned("mine_of_two:good", imports="mine_of_two")
    assert "answers" in planned("passing_on:good", imports="passing_on")
    with pytest.raises(InvalidInput, match="reward `odd` has parameter `answer`, of one sample"):
        planned("mine_of_two:odd", imports="mine_of_two")


def test_the_list_of_functions_has_the_rewards(capsys):
    assert main(["nodes", "length"]) == 0
    text = capsys.readouterr().out
    assert "length  (a reward" in text
    assert "reads   responses" in text
    assert "with    cap: int | None  (default None)" in text


@pytest.mark.parametrize(("recipe", "what"), [
    ("length", "reward `length` needs a `cap` or a `target`"),
    ("{length: {cap: 8, margin: -1}}", "`margin` from 0 to its cap of 8, not -1"),
    ("{length: {target: 0}}", "a `target` of at least 1"),
    ("{format: {pattern: x, tags: [a]}}", "a `pattern` or `tags`, not both"),
    ("{code: {seconds: 0}}", "setting `seconds` of reward `code` must be above 0, not 0"),
    ("{judge: {address: 'localhost:1', model: m}}", "setting `address` of reward `judge` must be text that matches ^https?://"),
    ("{judge: {address: 'http://a', model: m, prompt: '{answer}'}}", "a `prompt` without `{completion}`"),
    ("{judge: {address: 'http://a', model: m, score: 'a'}}", "`score` without its one group"),
    ("{judge: {address: 'http://a', model: m, highest: 0}}", "setting `highest` of reward `judge` must be above 0"),
    ("{judge: {address: 'http://a', model: m, key_variable: NO_SUCH_KEY}}", "variable NO_SUCH_KEY, which is not set"),
    ("{judge: {address: 'http://a', model: m, max_calls: 9}}", "`max_calls` without the file that counts them"),
    ("{rubric: {address: 'http://a', model: m, key_variable: NO_SUCH_KEY}}", "export NO_SUCH_KEY=…"),
    ("{rubric: {address: 'http://a', model: m, weights: {a: 1}}}", "a weight for `a`, which is no criterion"),
    ("{rubric: {address: 'http://a', model: m, criteria: {a: b}, weights: {a: -1}}}", "no criterion with a weight"),
    ("{rubric: {address: 'http://a', model: m, criteria: {a: 3}}}", "setting `criteria` of reward `rubric`"),
    ("{rubric: {address: 'http://a', model: m, prompt: '{completion}'}}", "a `prompt` without `{criteria}`")])
def test_settings_that_no_call_could_use_are_found_before_the_start(planned, recipe, what):
    with pytest.raises(InvalidInput) as caught:
        planned(recipe, columns="tests")
    text = str(caught.value)
    assert what in text
    assert "dag.yaml:8" in text


def test_a_parameter_with_the_name_of_the_field_of_the_answer(planned, tmp_path):
    """`data.answer: tests` is read by the parameter `answer`."""
    with pytest.raises(InvalidInput) as caught:
        planned("{passes: {most: 1}}", "test", more=", answer: tests")
    hint = next(mistake.hint for mistake in caught.value.mistakes if "reads column `tests`" in mistake.what)
    assert hint.startswith("`data.answer` is `tests`, which a parameter `answer` reads: rename it.\n")
    assert "reward: {…, reads: {tests: answers}}" in hint
