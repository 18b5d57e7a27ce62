"""Every kind of bad input gives one message: what, where, and what to write instead. The files are in bad_inputs/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from distflow.config.load import load, load_for_planning
from distflow.errors import Diagnostic, InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]
BAD = ROOT / "tests/bad_inputs"
NODE_KEYS = "Known: role, type, function, dependencies, with, reads, writes."


@dataclass(frozen=True)
class Case:
    """A bad file; where its one mistake stands, what is underlined there, and parts of what is said."""

    file: str
    line: int
    under: str
    says: tuple[str, ...]
    others: tuple[int, ...] = ()
    """Lines of further mistakes, if there are any."""

    def __str__(self) -> str:
        return self.file


def case(file: str, line: int, under: str, *says: str, others: tuple[int, ...] = ()) -> Case:
    return Case(file, line, under, says, others)


DAGS = [
    case("unknown_key_top", 5, "node", "unknown key `node`", "Did you mean `nodes`?",
         "Known: name, roles, nodes, imports."),
    case("unknown_key_role", 4, "train", "unknown key `train`", "Did you mean `trained`?"),
    case("unknown_key_node", 7, "functon", "unknown key `functon`", "Did you mean `function`?", NODE_KEYS),
    case("misspelt_required_key", 7, "typ", "unknown key `typ`", "Did you mean `type`?"),
    case("missing_key", 7, "reward", "`nodes.reward.type` is missing", "Add `type:` here."),
    case("duplicate_key", 9, "reward", "key `reward` stands twice", "    7 |  reward:", "    9 |  reward:",
         "first on line 7"),
    case("wrong_type", 6, "[group_size]", "`nodes.rollout.with` must be a mapping, not a list", others=(8,)),
    case("wrong_type_in_list", 8, "1", "`nodes.advantage.dependencies.0` must be text, not 1"),
    case("wrong_choice", 7, "COMPUT", "must be one of 'MODEL_INFERENCE', 'MODEL_TRAIN' or 'COMPUTE'",
         "Did you mean `COMPUTE`?"),
    case("bad_syntax", 7, "[", "`[` is opened here and never closed", "dependencies: [rollout]}"),
    case("tab", 4, "\t", "a tab stands here", "Indent with spaces alone."),
    case("complex_key", 7, "{role}", "a key must be one word", 'Put quotes around a name with braces'),
    case("alias_in_itself", 7, "&them [*them]", "stands inside what it stands for"),
    case("no_model_used", 3, "nodes", "no node runs a model", "Add a node of type MODEL_INFERENCE or MODEL_TRAIN."),
    case("no_nodes", 6, "{}", "`nodes` must have at least 1 item"),
    case("unknown_role", 9, "acter", "node `update`: there is no role `acter`", "Did you mean `actor`? Roles: actor."),
    case("unknown_role_elsewhere", 10, "teacher", "there is no role `teacher`", "declare it:  roles: {teacher: {}}"),
    case("unknown_role_no_function", 7, "rewrd", "there is no role `rewrd`", "Did you mean `reward`?"),
    case("unknown_function", 7, "scor", "node `reward`: there is no function `scor`", "Did you mean `score`?",
         "imports: [MODULE]"),
    case("unknown_dependency", 9, "advantag", "node `update` depends on `advantag`, which is not a node.",
         "Did you mean `advantage`?", "Nodes: rollout, reward, advantage."),
    case("unknown_dependency_of_a_function", 8, "rewrd", "node `advantage` depends on `rewrd`, which is not a node.",
         "Did you mean `reward`?", "Nodes: rollout, reward, update."),
    case("dependency_is_a_column", 9, "advantages", "node `update` depends on `advantages`, which is not a node.",
         "Did you mean `advantage`?  (`advantages` is a column that it writes.)"),
    case("ambiguous_function", 8, "reward", "several are the default for role `reward` and type COMPUTE",
         "It may be one of: score, another_score."),
    case("no_default_function", 8, "advantage", "none is the default for role `actor` and type COMPUTE",
         "Add  function: NAME.", "group_advantage"),
    case("self_dependency", 9, "update", "node `update` depends on itself",
         "Instead:  update: {…, dependencies: [advantage]}"),
    case("not_upstream", 9, "[reward]",
         "reads column `advantages`, which node `advantage` writes, but does not wait for it",
         "Instead:  update: {…, dependencies: [reward, advantage]}"),
    case("only_downstream", 7, "reward", "which only node `advantage` writes, and that waits for `reward`"),
    case("nobody_writes", 7, "advantage", "function `group_advantage` reads column `rewards`, which no node writes",
         "Columns: advantages, answers,", "advantage: {…, reads: {rewards: COLUMN}}"),
    case("unordered_writers", 8, "other", "nodes `reward` and `other` both write column `rewards`", "    7 |  reward:",
         "    8 |  other:", "Rename it:  other: {…, writes: {rewards: other_rewards}}"),
    case("writes_dataset_column", 7, "reward", "writes column `answers`, which comes from the dataset", "Rename it:"),
    case("writes_twice", 6, "rollout", "node `rollout` writes column `responses` twice"),
    case("unknown_setting", 8, "epsilom", "function `group_advantage` has no setting `epsilom`",
         "Did you mean `epsilon`? Settings: epsilon, scale."),
    case("no_settings_at_all", 9, "x", "has no setting `x`", "It has no settings at all.", others=(11,)),
    case("wrong_setting_type", 9, "wide", "setting `clip` of `policy_update` must be a number or null, not 'wide'",
         "Its default is None.", others=(9,)),
    case("missing_setting", 8, "reward", "function `scaled` needs the setting `by`", "with: {by: …}   (float)"),
    case("group_of_none", 6, "0", "setting `group_size`", "must be a whole number above 0, not 0", "{group_size: 8}"),
    case("group_of_minus", 6, "-8", "must be a whole number above 0, not -8"),
    case("settings_out_of_bounds", 15, "-1", "setting `clip` of `policy_update` must be at least 0, not -1",
         "Take `clip` out, or give a number at least 0.", others=(6, 6, 8, 16, 17, 18, 18, 19, 20)),
    case("length_missing", 9, "fixed_length_sum", "`aggregate: fixed_length_sum` needs the setting `fixed_length`",
         "with: {aggregate: fixed_length_sum, fixed_length: …}   (above 0)"),
    case("length_without_use", 9, "fixed_length", "`fixed_length` says nothing with `aggregate: token_mean`",
         "with: {aggregate: fixed_length_sum, fixed_length: 64}"),
    case("setting_of_ones_own", 8, "0", "setting `share` of `cut` must be above 0 and at most 1, not 0",
         "Instead:  with: {share: 1}"),
    case("form_mismatch", 9, "advantage", "wants column `rewards` as Ragged, but node `reward` gives Tensor"),
    case("unknown_rename", 8, "reward", "function `group_advantage` reads no `reward`", "It reads: rewards, group.",
         others=(8,)),
    case("clip_without_use", 10, "dual_clip", "`dual_clip` says nothing with `loss: gspo`, only with `ppo`",
         "Take `dual_clip` out, or instead:  with: {loss: ppo, dual_clip: 3}"),
    case("k1_in_loss", 11, "k1", "setting `kl_kind` of `policy_update` must be one of ['k2', 'k3'], not 'k1'",
         "The gradient of k1 in a loss is zero on average", "function: kl_in_reward"),
    case("kl_without_reference", 9, "kl", "setting `kl` needs column `reference_logprobs`", "or set  kl: 0"),
    case("type_mismatch", 7, "MODEL_TRAIN", "but its function `score` is COMPUTE", "Instead:  type: COMPUTE"),
    case("not_trained", 4, "actor", "trains role `actor`, which is not declared as trained", "actor: {trained: true}"),
    case("never_trained", 5, "critic", "role `critic` is declared as trained, but no MODEL_TRAIN node trains it"),
    case("unknown_copy", 5, "acto", "role `reference` is a copy of `acto`, which is not a role", "mean `actor`?"),
    case("copies_in_a_circle", 4, "reference", "in a circle: actor → reference → actor", others=(6,)),
    case("unordered_samples", 7, "again", "nodes `rollout` and `again` both write column `finished`"),
    case("independent_fans", 10, "update", "`rollout` and of `again`, which repeat the same rows independently"),
    case("values_of_a_policy", 8, "actor", "node `values`: function `values` needs a model that gives one number for "
         "each token (head: value), and that of role `actor` gives a vocabulary (head: lm)",
         "Give the node another role (`critic`), or instead:  actor: {…, head: value}"),
    case("logprobs_of_a_critic", 7, "reference", "`supervised_update` needs a model that gives a vocabulary (head: lm)",
         "Give the node another role (`actor`), or instead:  reference: {…, head: lm}"),
    case("frozen_without_head", 5, "reward", "role `reward` is not trained, and its model has no value head",
         "--set roles.reward.model=FOLDER"),
    case("wrong_head", 4, "valu", "must be one of 'lm' or 'value'", "Did you mean `value`?"),
    case("smoothing_without_use", 11, "label_smoothing", "says nothing with `loss: ipo`, only with `sigmoid`"),
    case("node_called_source", 6, "source", "a node cannot be called `source`", "Give it another name"),
    case("nameless_node", 8, '""', "a node must have a name, not ''"),
    case("nameless_role", 5, '" "', "a role must have a name, not ' '"),
    case("really_a_run", 2, "steps", "this is a run file, given as the DAG: it has `steps`, `data`",
         "Instead:  --run-file dags/really_a_run.yaml"),
    case("missing_module", 3, "no_such_module", "module `no_such_module` cannot be found",
         "It was looked for in modules, ", "run_files, . and among the installed packages"),
    case("undecorated_function", 8, "undecorated:plain", "module `undecorated` has no function `plain` with @node"),
]


RUNS = [
    case("unknown_key_top", 2, "stepz", "unknown key `stepz`", "Did you mean `steps`?"),
    case("unknown_key_nested", 5, "layer", "unknown key `layer`", "Did you mean `layers`?", others=(6, 7)),
    case("really_a_dag", 5, "nodes", "this is a DAG, given as the run file: it has `nodes`",
         "Instead:  --dag run_files/really_a_dag.yaml"),
    case("really_a_cluster", 4, "memory_gib", "this is a cluster, given as the run file", "--cluster run_files/"),
    case("no_model", 4, "actor", "role `actor` has no model in run_files/no_model.yaml",
         "actor: {model: path/to/model}"),
    case("two_models", 5, "{architecture: qwen3, path: ../models/no_config}", "either the path of a model folder or",
         "{architecture: qwen3}"),
    case("odd_heads", 5, "{architecture: qwen3, heads: 4, kv_heads: 3}",
         "heads (4) must be a multiple of kv_heads (3)"),
    case("missing_model", 5, "no/such/model", "there is no model folder `no/such/model`", "config.json, *.safetensors"),
    case("model_without_config", 5, "../models/no_config", "it has no config.json"),
    case("model_of_an_adapter", 5, "../models/adapter", "has an adapter, and not the model", "merge_and_unload()"),
    case("model_with_bad_config", 5, "../models/bad_config", "not the configuration of a language model"),
    case("model_with_partial_config", 5, "../models/partial", "it has no 'num_hidden_layers'"),
    case("model_of_unknown_family", 5, "../models/unknown", "does not know its `model_type: unheard-of`",
         "AutoModelForCausalLM"),
    case("unknown_role", 4, "actr", "the run file has a role `actr`, but DAG `bad` does not", "Did you mean `actor`?"),
    case("unknown_layout", 3, "rollot", "`layouts` names `rollot`, which is not a node", "Did you mean `rollout`?"),
    case("dp_too_big", 3, "4", "node `reward` wants dp 4, but there are only 2 ranks", "layouts: {reward: {dp: 2}}"),
    case("dp_of_training", 3, "1", "node `update` trains on 1 of 2 ranks", "Leave `update` out of `layouts`."),
    case("values_out_of_bounds", 2, "18446744073709551616", "`seed` must be less than 18446744073709551616",
         "Its default is 0.", others=(3, 6, 7, 8, 9, 9, 9, 10)),
    case("impossible_faults", 4, "4", "faults[0]: there is no step 4 in a run of 3", others=(5, 6, 7, 8)),
    case("impossible_faults", 5, "2", "faults[1]: rank 2 is not one of the trainer's", "It has 0 to 1; without `rank`",
         others=(4, 6, 7, 8)),
    case("impossible_faults", 6, "rollout", "faults[2]: mode sync has no group `rollout`", "Take `group` out",
         others=(4, 5, 7, 8)),
    case("impossible_faults", 7, "starting", "faults[3]: a worker that starts has no step yet", others=(4, 5, 6, 8)),
    case("impossible_faults", 8, "corrupt", "faults[4]: only a trainer's copies in memory can be changed",
         others=(4, 5, 6, 7)),
    case("unknown_detector", 5, "stuck", "there is no detector `stuck`", "Detectors: ", "under @detector",
         others=(6, 7, 8, 9)),
    case("unknown_detector", 6, "second", "detector `stalled` has no setting `second`", "Did you mean `seconds`?",
         others=(5, 7, 8, 9)),
    case("unknown_detector", 7, "{restart: 1}", "detector `loss_spike` takes a word", "note, off, restart",
         others=(5, 6, 8, 9)),
    case("unknown_detector", 8, "true", "setting `factor` of detector `straggler` must be a number, not true",
         others=(5, 6, 7, 9)),
    case("unknown_detector", 9, "restart", "detector `straggler` has no setting `restart`", "during", "factor",
         others=(5, 6, 7, 8)),
    case("empty_stop", 6, '["</answer>", ""]', "an empty text would end every response at once. Take it out",
         others=(7,)),
    case("rising_schedule", 4, "1e-5", "`roles.actor.min_learning_rate`: 1e-05 is above learning_rate (1e-06), from",
         "min_learning_rate: 1e-07"),
    case("minimum_of_constant", 4, "1e-7", "it changes nothing in a constant schedule. Instead:  schedule: cosine"),
    case("template_setting", 5, "{tools: search}", "`tools` has a key of its own. Instead:  data: {tools: …}"),
    case("reserved_column", 6, "prompts", "`data.columns` names `prompts`, but every dataset gives a column of that"),
    case("missing_data", 6, "no/such.jsonl", "there is no data `no/such.jsonl`", ".jsonl", others=(7,)),
]


CLUSTERS = [
    case("tiny_memory", 3, "0.015625", "a rank needs 0.69 GiB and has 0.015625 GiB",
         "largest memory item is `actor: activations` with ", "Lower  roles.actor.micro_batch_tokens"),
    case("two_ranks", 3, "machines", "cluster `two_ranks` has 2 ranks, and the plan is for 4"),
    case("unknown_device", 5, "fats", "machines `hopper`: there is no device `fats`", "Did you mean `fast`?"),
    case("unknown_dtype", 3, "bfloat", "'bfloat16' or 'float32'"),
    case("zero_bandwidth", 5, "0", "`machines.hopper.inside.gb_s` must be greater than 0, not 0"),
    case("disconnected", 6, "far", "machines `near` and `far` are not linked",
         "Add  links: {region: {gb_s: …}}  , or  links: {a-b: {gb_s: …}}"),
    case("unlinked_alike", 5, "hopper", "machines `hopper` are not linked with each other",
         "Add  links: {zone: {gb_s: …}}."),
    case("unlinked_inside", 5, "hopper", "the devices of a machine `hopper` are not linked"),
    case("unknown_place", 8, "east-wst", "link `east-wst` is of no distance, and not between two zones or regions",
         "Did you mean `east-west`?"),
    case("path_to_itself", 7, "zone-zone", "link `zone-zone` leads from a place to itself"),
    case("ambiguous_path", 9, "us-east-eu", "link `us-east-eu` may be between `us` and `east-eu` or `us-east` and `eu`",
         "Name these places otherwise, without `-`"),
    case("two_paths", 9, "west-east", "links `east-west` and `west-east` are between the same places",
         "Keep one:  west-east: {gb_s: 2}  or  east-west: {gb_s: 1}"),
    case("memory_in_mib", 3, "81920", "`memory_gib: 81920` is 80 TiB for one device; it was probably counted in MiB",
         "Write  memory_gib: 80"),
    case("zone_like_region", 7, "east", "zone `east` is named like a region",
         "zones: {east-1: east}"),
    case("unused_device", 4, "slow", "no machine has a device `slow`", "Take `slow` out"),
    case("unknown_zone", 6, "eats", "no machine stands in zone `eats`", "Zones of machines: east."),
    case("two_ways", 2, "memory_gib", "`memory_gib` is for alike ranks, and `devices` say it too"),
    case("no_machines", 2, "devices", "devices are described, but no machine has them"),
    case("unknown_key", 3, "memory", "unknown key `memory`", "Did you mean `memory_gib`?"),
]


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


@pytest.mark.parametrize("expected", DAGS, ids=str)
def test_dag(expected):
    check(expected, f"dags/{expected.file}.yaml", mistakes_of(dag=expected.file))


@pytest.mark.parametrize("expected", RUNS, ids=str)
def test_run_file(expected):
    check(expected, f"run_files/{expected.file}.yaml", mistakes_of(run=expected.file))


@pytest.mark.parametrize("expected", CLUSTERS, ids=str)
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
    for folder, cases in (("dags", DAGS), ("run_files", RUNS), ("clusters", CLUSTERS)):
        files = {path.stem for path in (BAD / folder).glob("*.yaml")}
        assert files - elsewhere == {each.file for each in cases}


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
