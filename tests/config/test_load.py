"""Loading: overrides, the way back from a run folder, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distflow.cli import main
from distflow.config.load import load, load_for_planning, reload
from distflow.config.run import Lora, Model
from distflow.config.shipped import SHIPPED
from distflow.errors import InvalidInput
from planners import plan

ROOT = Path(__file__).resolve().parents[2]


def test_an_override_goes_where_its_key_belongs():
    spec = load("grpo.yaml", None, ["roles.actor.learning_rate=1e-6", "nodes.rollout.with.group_size=4", "steps=7",
                                    "roles.reference.copy_of=actor", "layouts.reward.dp=1", "output=elsewhere"])
    assert spec.run.roles["actor"].learning_rate == 1e-6
    assert spec.dag.nodes["rollout"].settings == {"group_size": 4}
    assert (spec.run.steps, spec.run.output, spec.run.layouts["reward"].dp) == (7, "elsewhere", 1)
    assert spec.dag.roles["reference"].copy_of == "actor"
    assert not spec.mistakes


@pytest.mark.parametrize("dag", sorted(path.stem for path in (ROOT / "dags").glob("*.yaml")))
def test_a_run_folder_gives_the_same_plan(dag, tmp_path, monkeypatch):
    spec = load(dag, None, ["data.batch=7", "seed=3"])
    for kind, content in spec.resolved().items():
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    monkeypatch.chdir(tmp_path)  # relative paths must not matter any more
    again = reload(tmp_path)
    assert plan(again, 2).digest == plan(spec, 2).digest
    assert again.resolved() == spec.resolved()


def test_reload_passes_over_removed_keys_that_said_nothing(tmp_path):
    """Those of a run that an older version has written."""
    spec = load("grpo", None, ["robust={snapshots: local, restarts: 0}"])
    kinds = spec.resolved()
    run = kinds["run"]
    run["robust"] |= {"restart": "role", "peer_replica": True}
    run["groups"] |= {"trainers": {}}
    run["data"] |= {"enable_thinking": None, "filter": [], "strict": False}
    run["validation"] |= {"group": "rollout", "stop_at": None, "patience": None}
    run["roles"]["actor"]["generation"] |= {"quantization": "none", "batch_invariant": False}
    run |= {"timeline": True, "backend": "auto", "trajectories": 16, "all_samples": False}
    for kind, content in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    again = reload(tmp_path)
    assert not again.mistakes
    assert again.resolved() == spec.resolved()


def test_removed_keys_count_with_the_defaults_of_models_and_adapters():
    """`removed_keys` repeats them, as documents import it."""
    defaults = [kind.model_fields[name].default for kind, name in (
        (Model, "hidden"), (Model, "heads"), (Lora, "rank"), (Lora, "alpha"))]
    assert defaults == [128, 4, 16, 32]


@pytest.mark.parametrize(("written", "named"), [
    ("b.jsonl", {"b": "b.jsonl"}), ("[in/a.jsonl.gz, b.jsonl]", {"a": "in/a.jsonl.gz", "b": "b.jsonl"}),
    ("[a.en.jsonl, a.de.jsonl]", {"a.en": "a.en.jsonl", "a.de": "a.de.jsonl"}),
    ("[in/*.jsonl, a-*.jsonl]", {"in": "in/*.jsonl", "a": "a-*.jsonl"}),
    ("[in/a.jsonl, out/a.jsonl]", "two files have one name"), ("3", "`validation.data` must be a mapping")])
def test_load_names_validation_sets_as_their_files(written, named):
    if isinstance(named, dict):
        assert load_for_planning("grpo", None, [f"validation.data={written}"]).run.validation.data == named
        return
    with pytest.raises(InvalidInput, match=named):
        load("grpo", None, [f"validation.data={written}"])


def with_lines(folder: Path, text: str) -> str:
    """The run file of the embedded run, with lines of an older version."""
    (folder / "run.yaml").write_text(f"{(ROOT / 'dags/runs/embedded.yaml').read_text()}{text}\n")
    return str(folder / "run.yaml")


@pytest.mark.parametrize(("text", "today"), [
    ("timeline: false", ""), ("timeline: true", ""), ("training_api: {max_body_mib: 128}", ""),
    ("switch_at: 0.5", ""), ("groups: {share_gpus: true}", ""), ("all_samples: true", "samples: all"),
    ("fuse: true", ""), ("log: [{wandb: {entity: null, group: null, tags: [], mode: offline}}]",
                         "log: [{wandb: {mode: offline}}]"),
    ("log: [{mlflow: {experiment: distflow}}]", "log: [mlflow]"),
    ("robust: {neighbour: false}", "robust: {snapshots: local}"), ("robust: {restart: task}", "robust: {restarts: 0}"),
    ("robust: {peer_replica: false}", "robust: {snapshots: local}")])
def test_load_reads_older_keys_as_what_says_the_same_today(tmp_path, text, today):
    older, newer = (load("grpo", with_lines(tmp_path, each)) for each in (text, today))
    assert not older.mistakes
    if not text.startswith("training_api"):
        assert older.resolved() == newer.resolved()


@pytest.mark.parametrize(("written", "address"), [("localhost", "localhost:0"), ("0.0.0.0:8000", "0.0.0.0:8000"),
                                                  ("'[::1]:80'", "[::1]:80")])
def test_load_reads_an_address_with_its_port(written, address):
    assert load("grpo", None, [f"training_api={written}"]).run.training_api == address


@pytest.mark.parametrize(("text", "hint"), [
    ("switch_at: 0.7", "Take it out"), ("robust: {restart: tsk}", ""), ("all_samples: some", ""),
    ("groups: {trainers: {critic: 1}}", "Instead, by a node of the role:  layouts: {critic: {first: N}}"),
    ("fuse: false", "with  generation: {batch_rows: 1}"),
    ("log: [{wandb: {entity: us}}]", "export WANDB_ENTITY"),
    ("log: [{mlflow: {uri: x.db}}]", "export MLFLOW_TRACKING_URI"),
    ("faults: [{kind: kill, share: 0.1}]", "Instead, a fault for each step")])
def test_load_refuses_a_removed_key_with_the_line_to_write_instead(tmp_path, text, hint):
    with pytest.raises(InvalidInput, match=f"(?s)unknown key `.*{hint}"):
        load("grpo", with_lines(tmp_path, text))


def test_load_tells_a_run_file_what_is_an_option_of_the_command(tmp_path: Path):
    with pytest.raises(InvalidInput) as raised:
        load("grpo", with_lines(tmp_path, "name: mine"))
    assert [mistake.hint for mistake in raised.value.mistakes] == [
        "It is an option of the command:  distflow run … --name NAME"]


def test_set_reads_older_keys_too():
    spec = load_for_planning("grpo", None, ["data.enable_thinking=false", "all_samples=true", "timeline=true",
                                            "robust.detectors.weight_decay=stop",
                                            "robust.detectors.gradient_vanishes=note"])
    assert spec.run.robust.detectors == {"unusual_setting": "stop", "policy_stuck": "note"}
    assert spec.run.data.chat_template_kwargs == {"enable_thinking": False}
    assert spec.run.samples == "all"
    with pytest.raises(InvalidInput, match="It was removed. Take it out"):
        load("grpo", None, ["on_new_weights=restart"])


@pytest.mark.parametrize(("sizes", "fits"), [("heads: 2, head_dim: 32", True), ("heads: 4, head_dim: 32", False)])
def test_load_passes_over_a_head_dim_that_follows_from_the_other_sizes(sizes, fits):
    model = f"roles.actor.model={{architecture: qwen3, layers: 2, hidden: 64, kv_heads: 1, {sizes}}}"
    if fits:
        assert not load("grpo", None, [model]).mistakes
        return
    with pytest.raises(InvalidInput, match="The width of a head of a tiny model is  hidden / heads"):
        load("grpo", None, [model])
    with pytest.raises(InvalidInput, match="heads` must be greater than 0"):
        load("grpo", None, ["roles.actor.model={architecture: qwen3, heads: 0, head_dim: 32}"])


@pytest.mark.parametrize(("lora", "alpha"), [
    ("rank: 4, rslora: true", 64), ("rank: 4, alpha: 8, rslora: true", 16), ("alpha: 8, rslora: false", 8)])
def test_load_reads_rslora_as_the_alpha_that_scales_alike(lora, alpha):
    assert load_for_planning("grpo", None, [f"roles.actor.lora={{{lora}}}"]).run.roles["actor"].lora.alpha == alpha


@pytest.mark.parametrize(("lora", "wrong"), [
    ("rank: -4", "rank` must be greater than 0"), ("rank: four", "rank` must be a whole number"),
    ("alpha: -8", "alpha` must be greater than 0")])
def test_load_tells_only_what_is_wrong_beside_rslora(lora, wrong):
    (mistake,) = load_for_planning("grpo", None, [f"roles.actor.lora={{{lora}, rslora: true}}"]).mistakes
    assert wrong in mistake.what


def test_load_reads_the_cluster_of_a_run_that_an_older_version_has_begun(tmp_path):
    """Its file says every key, also where it says nothing."""
    own = load_for_planning("grpo", None, [], "h200_a100").cluster
    content = own.model_dump(mode="json")
    content |= {"name": "mine", "links": {"zone": None, "region": None, "world": None, **content["links"]},
                "paths": [{"between": ["here", "there"], "gb_s": 3, "efficiency": None}]}
    content["machines"] = {name: {**kind, "zone": zone} for (name, kind), zone in
                           zip(content["machines"].items(), ("here", "there"), strict=True)}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    spec = load_for_planning("grpo", None, [], str(tmp_path / "cluster.yaml"))
    assert not spec.mistakes
    assert {name: link.gb_s for name, link in spec.cluster.links.items()} == \
        {"here-there": 3, **{name: link.gb_s for name, link in own.links.items()}}


def test_load_passes_over_fuse_false_where_rows_are_sampled_alone():
    """As runs were set for equal bits; they can be resumed."""
    alone = "roles.actor.generation.batch_rows=1"
    spec = load_for_planning("grpo", None, ["fuse=false", alone])
    assert spec.resolved() == load_for_planning("grpo", None, [alone]).resolved()


def test_a_dag_with_data_of_its_own_has_its_own_run():
    assert load("dpo.yaml").run_source.file.endswith("embedded_dpo.yaml")
    assert load("ppo").run_source.file.endswith("embedded.yaml")
    assert load("reward_model", "embedded_reward_model").run == load(str(ROOT / "dags/reward_model.yaml")).run


def test_loading_and_planning_import_no_torch():
    script = ("import distflow, sys, time; from distflow.config.load import load; from planners import plan; "
              "from distflow.data import dataset; from distflow.telemetry import run_folder; import distflow.launch; "
              "plan(load('grpo.yaml'), 2); print(time.process_time()); "
              "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules); "
              "sys.exit(', '.join(heavy) or None)")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    print(f"load and plan: {float(done.stdout):.2f} s of one core, interpreter included")


@pytest.mark.parametrize(("given", "meant"), [
    ("clip=0.3", "nodes.update.with.clip=0.3"), ("update.with.clip=0.3", "nodes.update.with.clip=0.3"),
    ("update.clip=0.3", "nodes.update.with.clip=0.3"), ("nodes.update.clip=0.3", "nodes.update.with.clip=0.3"),
    ("node.update.with.clip=0.3", "nodes.update.with.clip=0.3"), ("lr=1e-5", "roles.actor.learning_rate=1e-5"),
    ("learning_rate=1e-5", "roles.actor.learning_rate=1e-5"), ("actor.dtype=float32", "roles.actor.dtype=float32")])
def test_a_key_that_is_set_in_another_place_is_named_whole(given, meant):
    with pytest.raises(InvalidInput) as caught:
        load("grpo", overrides=[given])
    assert str(caught.value).startswith(f"--set {given}: unknown key `")
    assert f"Instead:  --set {meant}" in str(caught.value)
    load("grpo", overrides=[meant])


def test_a_node_that_is_not_there_is_not_begun_by_a_setting():
    with pytest.raises(InvalidInput) as caught:
        load("grpo", overrides=["nodes.rewad.with.reward=math"])
    assert str(caught.value).startswith("--set nodes.rewad.with.reward=math: there is no node `rewad`.\n"
                                        "Did you mean `reward`?")


def test_a_run_is_not_resumed_with_another_dag(capsys):
    assert main(["resume", "runs/x", "--dag", "mine.yaml"]) == 2
    assert "begin another run with its model:  distflow run DAG" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "meant"), [
    (("grpo", "--run", "embeded.yaml"), "embedded.yaml"),  # not `embed.yaml`, which is a DAG
    (("grpo", "--run", "embeded"), "embedded"),
    (("grpo", "--run", "my_rum"), "my run.yaml"),
    (("grpp.yaml",), "grpo.yaml"),
    (("embde.yaml",), "embed.yaml"),
    (("grpo", "--run", "embde.yaml"), "embedded.yaml"),
    (("grpo", "--run", "r2.yaml"), "r2.yml"),
    (("grpo", "--cluster", "h20_a100.yaml"), "h200_a100.yaml"),
    (("grpo", "--cluster", "our.yaml"), "ours.yaml"),
    (("grpo", "--run", "my run.yaml"), "train.jsonl"),
])
def test_the_file_that_is_meant_is_of_the_kind_that_is_asked_for(line, meant, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("embed.yaml").write_text((SHIPPED / "grpo.yaml").read_text())
    run = (SHIPPED / "runs/embedded.yaml").read_text()
    for name in ("my run.yaml", "r2.yml"):
        Path(name).write_text(run.replace("arithmetic/train.jsonl", "train.json"))
    Path("ours.yaml").write_text((SHIPPED / "clusters/h200.yaml").read_text())
    Path("train.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 99)
    assert main(["validate", *line]) == 2
    said = capsys.readouterr().err
    assert f"Did you mean `{meant}`?" in said
    assert meant == "train.jsonl" or "Shipped: " in said


def test_a_function_of_a_module_here_is_found_for_whoever_named_it_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("mine.py").write_text("from distflow import loss, node, reward\n\n@reward\ndef near_by(completion): ...\n\n"
                               "@node(writes='advantages')\ndef half(rewards): ...\n\n@loss\ndef soft(logprobs): "
                               "...\n\ndef plain(completion): ...\n")
    for given, said in (
            ("nodes.reward.with.reward=near_by", "mine.py has it. Name its module:  reward: mine:near_by"),
            ("nodes.reward.with.reward=mine.near_by", "imports: [mine]"),
            ("nodes.reward.with.reward=plain", "mine.py:12 has `plain`, without  @reward  above it"),
            ("nodes.advantage.function=half", "mine.py has it. Instead:  function: mine:half"),
            ("nodes.advantage.function=mine.half", "Instead:  function: mine:half"),
            ("nodes.advantage.function=mine:plain", "mine.py:12 has `plain`, without  @node  above it"),
            ("nodes.update.with.loss=soft", "mine.py has it. Instead:  loss: mine:soft"),
            ("nodes.update.with.loss=mine:plain", "mine.py:12 has `plain`, without  @loss  above it")):
        with pytest.raises(InvalidInput) as caught:
            load("grpo", overrides=[given])
        assert said in str(caught.value), given


def test_a_module_next_to_the_run_file_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "rewards_next_door.py").write_text("from distflow import reward\n\n@reward\n"
                                                 "def near_by(completion): ...\n")
    run = folder / "my_run.yaml"
    run.write_text((SHIPPED / "runs/embedded.yaml").read_text())
    spec = load("grpo", str(run), overrides=["validation.reward=rewards_next_door:near_by"])
    assert spec.mistakes == []
    assert "near_by" in [each.split(":")[-1] for each in spec.rewards]
