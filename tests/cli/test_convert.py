"""Configurations of verl, TRL and siiRL become a DAG and a run file that are valid and say the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from distflow.cli import main

MODEL = 'roles.actor.model={"architecture": "qwen3"}'
CASES = Path(__file__).parent / "conversions"
PPO, TRL = (yaml.safe_load((CASES / name / "theirs.yaml").read_text()) for name in ("verl_ppo", "trl"))
NOT_OF_THIS_MODEL = ("verl_frozen_parts",)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "heldout"):
        record = {"question": "1 + 1?", "prompt": "1 + 1?", "answer": "2"}
        (tmp_path / f"{name}.jsonl").write_text(200 * f"{json.dumps(record)}\n")
    asked = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    parquet.write_table(pyarrow.Table.from_pylist(200 * [asked]), tmp_path / "t.parquet")
    return tmp_path


@pytest.mark.parametrize("name", sorted(case.name for case in CASES.iterdir()))
def test_a_configuration_becomes_these_files(name, folder, capsys):
    """All that is written and printed, as it stands in conversions/. `dag.yaml` there is theirs.yaml of the answer."""
    (theirs,) = (CASES / name).glob("theirs.*")
    shutil.copy(theirs, folder)
    assert main(["convert", theirs.name]) == 0
    made = {file.name.replace("theirs", "dag"): file.read_text() for file in Path("theirs").iterdir()}
    made["printed.txt"] = capsys.readouterr().out
    assert made == {file.name: file.read_text() for file in (CASES / name).iterdir() if file.name != theirs.name}
    run = ["--run", "theirs/run.yaml", "--set", MODEL, "--set", "log=[]"] if "run.yaml" in made else \
        ["--set", "data={train: train.jsonl}", "--set", "validation=null"]
    assert main(["validate", "theirs/theirs.yaml", *run]) == (2 if name in NOT_OF_THIS_MODEL else 0)


def converted(content: Any, name: str = "theirs.yaml") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the DAG and the run file, once both have been found valid."""
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert main(["convert", name]) == 0
    without_loggers = ["--set", MODEL, "--set", "log=[]"]  # whose packages may be missing
    assert main(["validate", "theirs/theirs.yaml", "--run", "theirs/run.yaml", *without_loggers]) == 0
    return tuple(yaml.safe_load(Path("theirs", file).read_text()) for file in ("theirs.yaml", "run.yaml"))


def trl(**settings: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the DAG, the run file and what is listed as not converted, of TRL's defaults with these settings."""
    few = {"model_name_or_path": "m", "dataset_name": "train.jsonl", "num_generations": 4, "max_completion_length": 32}
    shutil.rmtree("theirs", ignore_errors=True)
    dag, run = converted({**few, **settings})
    left = Path("theirs/not_converted.txt")
    return dag, run, left.read_text().splitlines() if left.exists() else []


@pytest.mark.parametrize(("settings", "arguments"), [
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"update.loss": "cispo", "update.clip_high": 4.0,
                                                   "update.aggregate": "token_mean"}),
    ({"scale_rewards": "batch"}, {"advantage.scale": False, "update.normalize": "batch"}),
    ({"top_entropy_quantile": 0.2}, {"update.entropy_quantile": 0.8}), ({"top_entropy_quantile": 1.0}, {}),
    ({"scale_rewards": "none"}, {"advantage.scale": False}), ({"scale_rewards": "group"}, {}),
    ({"loss_type": "sapo"}, None), ({"loss_type": "luspo"}, None), ({"scale_rewards": "mean"}, None),
    ({"lr_scheduler_type": "polynomial"}, None), ({"report_to": "swanlab"}, None),
    ({"report_to": ["mlflow"]}, {"log": ["mlflow"]}), ({"report_to": "none"}, {}),
    ({"adam_beta2": 0.98}, {"betas": [0.9, 0.98]}),
    ({"loss_type": ["dr_grpo"]}, {"update.aggregate": "fixed_length_sum"})])
def test_each_value_of_trl_is_converted_or_listed(settings, arguments):
    dag, run, left = trl(**settings)
    made = {f"{node}.{key}": value for node in ("advantage", "update")
            for key, value in dag["nodes"][node].get("with", {}).items()}
    made |= {"log": run.get("log"), "betas": run["roles"]["actor"].get("betas")}
    assert left == ([f"{key}: {value}" for key, value in settings.items()] if arguments is None else [])
    assert {key: made.get(key) for key in arguments or {}} == (arguments or {})
    assert ("update.clip" in made) is (settings.get("loss_type") != "cispo"), "what a file does not say is the DAG's"


Q_AND_V = ["q_proj", "v_proj"]
"""What peft adapts of most models where TRL's file names nothing."""


@pytest.mark.parametrize(("settings", "lora"), [
    ({"lora_r": 8, "lora_alpha": 16}, None), ({"use_peft": False, "lora_r": 8}, None),
    ({"use_peft": True}, {"rank": 16, "alpha": 32, "targets": Q_AND_V}),
    ({"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_target_modules": "all-linear", "use_rslora": True},
     {"rank": 4, "alpha": 16.0, "targets": "all-linear"})])
def test_adapters_of_trl_are_those_that_it_would_train(settings, lora, capsys):
    _, run, left = trl(**settings)
    assert (run["roles"]["actor"].get("lora"), left) == (lora, [])
    assert ("TRL trains the whole model" in capsys.readouterr().out) == ("lora_r" in settings and lora is None)


def test_adapters_of_a_script_have_all_of_its_layers():
    _, run = converted("trl grpo --model_name_or_path m --dataset_name train.jsonl --num_generations 4 --use_peft "
                       "--lora_target_modules q_proj k_proj --lora_r 8\n", "theirs.sh")
    assert run["roles"]["actor"]["lora"] == {"rank": 8, "alpha": 32, "targets": ["q_proj", "k_proj"]}


def test_defaults_of_adapters_are_told(capsys):
    trl(use_peft=True, lora_r=8)
    assert "lora_alpha: 32, lora_target_modules: ['q_proj', 'v_proj']" in capsys.readouterr().out
    _of_verl({"lora_rank": 8, "target_modules": Q_AND_V})
    printed = capsys.readouterr().out
    assert "actor_rollout_ref.model.lora_alpha: 16" in printed
    assert "target_modules" not in printed


@pytest.mark.parametrize("names", ["model.layers.*.(q_proj|v_proj)", ["q_proj", ".*v_proj"]])
def test_an_expression_for_layers_is_listed(names):
    assert "targets" not in _of_verl({"lora_rank": 8, "target_modules": names})
    assert f"actor_rollout_ref.model.target_modules: {names}" in Path("theirs/not_converted.txt").read_text()


def _of_verl(settings: dict[str, Any]) -> Any:
    """Return the adapters of the run file, of PPO with these settings of the model."""
    shutil.rmtree("theirs", ignore_errors=True)
    _, run = converted({**PPO, "actor_rollout_ref": {**PPO["actor_rollout_ref"], "model": {
        **PPO["actor_rollout_ref"]["model"], **settings}}})
    return run["roles"]["actor"].get("lora")


@pytest.mark.parametrize(("settings", "lora"), [
    ({"lora_rank": 0, "lora_alpha": 16}, None), ({"lora_rank": 32}, {"rank": 32, "alpha": 16, "targets": "all-linear"}),
    ({"lora_rank": 8, "lora_alpha": 32, "target_modules": Q_AND_V}, {"rank": 8, "alpha": 32, "targets": Q_AND_V})])
def test_adapters_of_verl_are_converted(settings, lora):
    assert _of_verl(settings) == lora


@pytest.mark.parametrize(("settings", "follow"), [
    ({"sync_ref_model": True}, {"every": 512, "mix": 0.6}),
    ({"sync_ref_model": True, "ref_model_sync_steps": 64, "ref_model_mixup_alpha": 1.0, "num_iterations": 2,
      "gradient_accumulation_steps": 1, "steps_per_generation": 4}, {"every": 8, "mix": 1.0}),
    ({"sync_ref_model": False}, None)])
def test_a_reference_of_trl_follows_in_steps_of_this_run(settings, follow):
    dag, _, left = trl(beta=0.1, lora_r=None, **settings)
    assert dag["roles"]["reference"].get("follow") == follow
    assert left == []


@pytest.mark.parametrize(("settings", "steps", "warmup", "saved"), [
    ({"max_steps": 30, "warmup_steps": 3}, 30, 3, None), ({"max_steps": 30, "warmup_ratio": 0.05}, 30, 2, None),
    ({"max_steps": 200, "warmup_steps": 0.1, "save_steps": 0.25}, 200, 20, 50),  # transformers#41326, trl#4983
    ({"max_steps": 30, "warmup_steps": 6, "save_steps": 10, "num_iterations": 2}, 15, 3, 5),  # SkyRL#873
    ({"max_steps": 30, "warmup_ratio": 0.1, "gradient_accumulation_steps": 1, "steps_per_generation": 4}, 8, 1, None)])
def test_steps_of_trl_are_counted_in_steps_of_this_run(settings, steps, warmup, saved):
    _, run, left = trl(**settings)
    assert (run["steps"], run["roles"]["actor"].get("warmup_steps")) == (steps, warmup)
    assert (run.get("checkpoint", {}).get("every"), left) == (saved, [])


def test_a_share_of_unknown_steps_is_listed():
    assert trl(warmup_ratio=0.1, max_steps=-1)[2] == ["warmup_ratio: 0.1"]


@pytest.mark.parametrize(("optim", "warmup"), [  # verl#418, verl#564
    ({"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.1}, 2),
    ({"lr_warmup_steps": 5, "lr_warmup_steps_ratio": 0.1}, 5),
    ({"lr_warmup_steps_ratio": 0.0}, None)])
def test_the_warmup_of_verl_may_be_a_share(optim, warmup):
    content = {**PPO, "actor_rollout_ref": {**PPO["actor_rollout_ref"], "actor": {"optim": optim}}}
    assert converted(content)[1]["roles"]["actor"].get("warmup_steps") == warmup


@pytest.mark.parametrize(("settings", "prompts", "mini_batches"), [
    ({"gradient_accumulation_steps": 4}, 8, None),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 16, 4),
    ({"gradient_accumulation_steps": 2, "num_processes": 2}, 8, None),
    ({"gradient_accumulation_steps": 4, "steps_per_generation": 4, "generation_batch_size": 128}, 32, None),
    ({"gradient_accumulation_steps": 2, "generation_batch_size": 64}, 16, 4)])
def test_the_batch_of_trl_is_what_is_sampled_at_once(settings, prompts, mini_batches, capsys):
    dag, run, left = trl(per_device_train_batch_size=8, max_steps=-1, num_train_epochs=3.0, **settings)
    assert (run["data"]["batch"], dag["nodes"]["update"]["with"].get("mini_batches")) == (prompts, mini_batches)
    assert left == []
    printed = capsys.readouterr().out
    assert run["steps"] == 100
    assert "The file counts epochs, 3.0" in printed
    known = {"num_processes", "generation_batch_size"} & settings.keys()
    assert ("those of one process" in printed) is (not known)
    assert ("is that of one process" in printed) is (known == {"generation_batch_size"} and mini_batches is not None)


@pytest.mark.parametrize(("setting", "arguments"), [
    ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
     {"aggregate": "fixed_length_sum", "fixed_length": 64}),
    ("actor_rollout_ref.actor.loss_agg_mode=other", None), ("actor_rollout_ref.actor.strategy=torchtitan", None),
    ("actor_rollout_ref.actor.strategy=fsdp2", {}), ("trainer.logger=swanlab", None)])
def test_each_value_of_verl_is_converted_or_listed(setting, arguments):
    dag, _ = converted("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_response_length=64 "
                       f"data.train_files=train.jsonl data.train_batch_size=8 {setting}", "theirs.sh")
    left = Path("theirs/not_converted.txt")
    assert left.exists() is (arguments is None)
    assert not left.exists() or left.read_text() == setting.replace("=", ": ") + "\n"
    assert (arguments or {}).items() <= dag["nodes"]["update"]["with"].items()


def test_what_cannot_be_converted_is_told(folder, capsys):
    agents = {"nodes": [{"node_id": "env", "node_type": "COMPUTE", "node_role": "ENVIRONMENT"}]}
    for content, said in ((agents, "node `env` (COMPUTE, ENVIRONMENT)"), ({"a": 1}, "is no configuration of verl"),
                          ({"algorithm": {"adv_estimator": "opo"}}, "opo is not converted"), ("[1", "cannot be read")):
        (folder / "theirs.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        assert main(["convert", "theirs.yaml"]) == 2
        assert said in capsys.readouterr().err
        assert not (folder / "theirs").exists()
    (folder / "theirs").mkdir()
    (folder / "theirs.yaml").write_text(yaml.safe_dump(TRL))
    assert main(["convert", "theirs.yaml"]) == 2
    assert "theirs exists" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "content", "said"), [
    ("theirs.yaml", "seed: 1\nnum_generations: eight\n", "theirs.yaml:2: `num_generations` must be a number, not "
     "'eight'.\n\n    2 |  num_generations: eight\n         ^^^^^^^^^^^^^^^"),
    ("theirs.yaml", "model_name_or_path: m\nloss_type: sigmoid\n", "of TRL's DPOTrainer, as loss_type: sigmoid says"),
    ("theirs.yaml", "model_name_or_path: m\nloss_type: [sigmoid, bco_pair]\n", "of TRL's DPOTrainer"),
    ("theirs.py", "config = GRPOConfig()\n", "then:  distflow convert theirs.yaml")])
def test_what_is_wrong_with_a_file_is_told(folder, capsys, name, content, said):
    (folder / name).write_text(content)
    assert main(["convert", name]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "theirs").exists()


def test_a_file_that_is_not_there_is_told_before_the_folder(folder, capsys):
    (folder / "theirs.yaml").write_text("a: 1")
    (folder / "theirs").mkdir()
    assert main(["convert", "theirs.yml"]) == 2
    assert "there is no file `theirs.yml`.\nDid you mean `theirs.yaml`?" in capsys.readouterr().err
