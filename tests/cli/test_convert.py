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
VERL = """
set -x
MODEL=${MODEL:-Qwen/Qwen3-8B}
n=5
# comments and options of the shell do not count
python3 -m verl.trainer.main_ppo --config-name ppo_trainer \\
    algorithm.adv_estimator=grpo data.train_files="['train.jsonl']" data.val_files=heldout.jsonl \\
    data.train_batch_size=100 data.max_response_length=64 actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.rollout.name=hf \\
    actor_rollout_ref.rollout.n=${n} +actor_rollout_ref.rollout.val_kwargs.n=4 trainer.test_freq=5 \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \\
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 trainer.save_freq=-1 trainer.rollout_data_dir=out \\
    trainer.logger='["console","tensorboard"]' trainer.nnodes=1 trainer.n_gpus_per_node=2 \\
    actor_rollout_ref.actor.entropy_coeff=0.001 actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \\
    trainer.total_epochs=15 data.filter_overlong_prompts=True data.truncation=error $@
"""
PPO = {"algorithm": {"adv_estimator": "gae", "lam": 0.9, "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.05}},
       "data": {"train_files": "train.jsonl", "train_batch_size": 64, "prompt_key": "question"},
       "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": "1e-6"}},
                             "rollout": {"n": 2, "top_k": -1, "response_length": "${data.max_response_length}"}},
       "critic": {"optim": {"lr": "1e-5"}, "ppo_mini_batch_size": "${actor_rollout_ref.actor.ppo_mini_batch_size}"},
       "trainer": {"total_training_steps": 20, "critic_warmup": 5}}
TRL = {"model_name_or_path": "m", "dataset_name": "train.jsonl", "num_generations": 4, "max_completion_length": 32,
       "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "learning_rate": "1e-6", "beta": 0.04,
       "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dr_grpo", "scale_rewards": False, "max_steps": 30,
       "report_to": ["tensorboard"], "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7},
       "logging_steps": 10, "lora_r": 8, "min_p": 0.05, "mask_truncated_completions": True}
SIIRL: dict[str, Any] = {"dag_id": "grpo_pipeline", "nodes": [
    {"node_id": "rollout", "node_type": "MODEL_INFERENCE", "node_role": "ROLLOUT", "dependencies": []},
    {"node_id": "function_reward", "node_type": "COMPUTE", "node_role": "REWARD", "dependencies": ["rollout"]},
    {"node_id": "advantages", "node_type": "COMPUTE", "node_role": "ADVANTAGE", "dependencies": ["function_reward"]},
    {"node_id": "old", "node_type": "MODEL_TRAIN", "node_role": "ACTOR", "only_forward_compute": True,
     "dependencies": ["advantages"]},
    {"node_id": "ref", "node_type": "MODEL_TRAIN", "node_role": "REFERENCE", "dependencies": ["old"]},
    {"node_id": "train", "node_type": "MODEL_TRAIN", "node_role": "ACTOR", "dependencies": ["ref"]}]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "heldout"):
        record = {"question": "1 + 1?", "prompt": "1 + 1?", "answer": "2"}
        (tmp_path / f"{name}.jsonl").write_text(200 * f"{json.dumps(record)}\n")
    return tmp_path


def converted(content: Any, name: str = "theirs.yaml") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the DAG and the run file, once both have been found valid."""
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert main(["convert", name]) == 0
    without_loggers = ["--set", MODEL, "--set", "log=[]"]  # whose packages may be missing
    assert main(["validate", "theirs/theirs.yaml", "--run", "theirs/run.yaml", *without_loggers]) == 0
    return tuple(yaml.safe_load(Path("theirs", file).read_text()) for file in ("theirs.yaml", "run.yaml"))


def test_a_script_of_verl(capsys):
    dag, run = converted(VERL, "theirs.sh")
    printed = capsys.readouterr().out
    assert dag["nodes"]["rollout"]["with"] == {"group_size": 5}
    assert dag["nodes"]["update"]["with"] == {"clip": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "entropy": 0.001,
                                              "aggregate": "seq_mean_token_mean", "mini_batches": 4}
    assert "reference" not in dag["nodes"], "without use_kl_loss nothing needs one"
    assert run == {"steps": 100, "ranks": 2, "log": ["tensorboard"],
                   "roles": {"actor": {"model": "Qwen/Qwen3-8B", "rollout": "hf", "learning_rate": 1e-6,
                                       "weight_decay": 0.01, "betas": [0.9, 0.999],
                                       "generation": {"max_new_tokens": 64}, "schedule": "cosine",
                                       "min_learning_rate": pytest.approx(1e-7)}},
                   "data": {"train": "train.jsonl", "batch": 100, "max_prompt_tokens": 512, "long_prompts": "drop"},
                   "validation": {"data": {"set1": "heldout.jsonl"}, "every": 5, "samples": 4, "temperature": 0.6,
                                  "top_p": 0.95},
                   "samples": "all"}
    assert "steps: 100 is a guess. The file counts epochs, 15" in printed
    assert Path("theirs/not_converted.txt").read_text() == "config_name: ppo_trainer\n" \
                                                           "data.truncation: error\n"


def test_a_file_of_verl_with_a_critic():
    dag, run = converted(PPO)
    assert dag["nodes"]["advantage"]["with"] == {"gamma": 1.0, "lam": 0.9, "kl": 0.05}
    assert dag["nodes"]["update"]["with"]["mini_batches"] == dag["nodes"]["critic"]["with"]["mini_batches"] == 4
    assert dag["nodes"]["update"]["with"]["critic_warmup"] == 4, "there the actor begins in step 5"
    assert run["roles"]["critic"] == {"learning_rate": 1e-5, "weight_decay": 0.01, "betas": [0.9, 0.999]}
    assert run["steps"] == 20
    left = Path("theirs/not_converted.txt").read_text()
    assert left == "critic.ppo_mini_batch_size: 16\n", "what only refers to another setting is left out"


def test_what_verls_ppo_leaves_out_is_verls_own_default(capsys):
    dag, run = converted({"algorithm": {"adv_estimator": "gae"}, "data": {"train_files": "train.jsonl",
                                                                          "train_batch_size": 64}})
    printed = capsys.readouterr().out
    assert dag["nodes"]["rollout"]["with"] == {"group_size": 1}
    assert dag["nodes"]["advantage"]["with"] == {"gamma": 1.0, "lam": 1.0, "kl": 0.0}
    assert dag["nodes"]["critic"]["with"] == {"clip": 0.5}
    assert dag["nodes"]["update"]["with"] == {"clip": 0.2, "normalize": "batch", "dual_clip": 3.0,
                                              "aggregate": "token_mean"}
    assert run["roles"]["actor"]["generation"]["max_new_tokens"] == 512
    assert run["roles"]["critic"]["learning_rate"] == 1e-5
    said = next(line for line in printed.splitlines() if "the other project's defaults" in line)
    for default in ("rollout.n: 1", "algorithm.lam: 1.0", "critic.cliprange_value: 0.5", "clip_ratio_c: 3.0"):
        assert default in said
    assert not Path("theirs/not_converted.txt").exists()


@pytest.mark.parametrize(("estimator", "group"), [("grpo", 8), ("rloo", 4), ("remax", 1), ("reinforce_plus_plus", 1)])
def test_algorithms_that_compare_answers_keep_several(estimator, group, capsys):
    dag, _ = converted({"algorithm": {"adv_estimator": estimator}, "data": {"train_files": "train.jsonl",
                                                                            "train_batch_size": 64}})
    printed = capsys.readouterr().out
    assert dag["nodes"]["rollout"]["with"]["group_size"] == group
    assert ("has nothing to compare" in printed) is (group > 1)
    assert ("rollout.n: 1" in printed) is (group == 1)
    assert dag["nodes"]["update"]["with"]["aggregate"] == "token_mean"


def test_frozen_parts_of_verl_are_patterns():
    actor = {**PPO["actor_rollout_ref"]["actor"], "freeze_vision_tower": True}
    Path("theirs.yaml").write_text(yaml.safe_dump({**PPO, "actor_rollout_ref": {**PPO["actor_rollout_ref"],
                                                                                "actor": actor}}))
    assert main(["convert", "theirs.yaml"]) == 0
    assert yaml.safe_load(Path("theirs/run.yaml").read_text())["roles"]["actor"]["freeze"] == ["visual.*"]


def test_a_file_of_trl():
    dag, run = converted(TRL)
    assert dag["nodes"]["update"]["with"] == {"clip": 0.2, "clip_high": 0.28, "aggregate": "fixed_length_sum",
                                              "fixed_length": 32, "kl": 0.04}
    assert dag["nodes"]["advantage"]["with"] == {"scale": False}
    assert run["data"] == {"train": "train.jsonl", "batch": 8, "question": "prompt"}
    assert run["roles"]["actor"]["lora"] == {"rank": 8}
    assert run["roles"]["actor"]["schedule"] == "cosine"
    assert run["roles"]["actor"]["min_learning_rate"] == 1e-7
    assert run["roles"]["actor"]["generation"]["min_p"] == 0.05
    assert dag["nodes"]["untruncated"]["function"] == "drop_truncated"
    assert list(dag["nodes"]) == ["rollout", "reward", "reference", "advantage", "untruncated", "update"]
    assert Path("theirs/not_converted.txt").read_text() == "logging_steps: 10\n"


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


def test_tables_of_verl_are_read_as_they_are(folder):
    asked = [{"role": "user", "content": "1 + 1?"}]
    parquet.write_table(pyarrow.Table.from_pylist(200 * [{"prompt": asked, "reward_model": {"ground_truth": "2"}}]),
                        folder / "t.parquet")
    data = {"train_files": "t.parquet", "prompt_key": "prompt", "train_batch_size": 64}
    run = converted({"algorithm": {"adv_estimator": "grpo"}, "data": data})[1]
    assert (run["data"]["question"], run["data"]["answer"]) == ("prompt", "reward_model.ground_truth")


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


def test_what_to_dict_of_trl_has():
    """Settings as `GRPOConfig.to_dict()` has them: unset ones are null, enumerations are text, some are mappings."""
    theirs = {"output_dir": "trainer_output", "max_steps": -1, "num_train_epochs": 3.0,
              "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
              "generation_batch_size": 16, "steps_per_generation": 1, "seed": 42,
              "learning_rate": 1e-06, "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
              "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0, "beta": 0.0,
              "epsilon": 0.2, "epsilon_high": None, "delta": None, "num_iterations": 1, "loss_type": "dapo",
              "scale_rewards": "group", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "eval_steps": None,
              "report_to": ["none"], "gradient_checkpointing": True, "use_vllm": False, "save_steps": 500,
              "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "mask_truncated_completions": False,
              "chat_template_kwargs": None, "accelerator_config": {"split_batches": False}, "fsdp": [], "bf16": True}
    dag, run, left = trl(**theirs)
    assert left == ["accelerator_config.split_batches: False", "bf16: True", "fsdp: []"]
    assert dag["nodes"]["update"]["with"] == {"clip": 0.2, "aggregate": "token_mean", "epochs": 1}
    assert "reference" not in dag["nodes"]
    assert run["roles"]["actor"]["betas"] == [0.9, 0.999]
    assert (run["steps"], run["data"]["batch"], run["output"]) == (100, 4, "trainer_output")


def test_rewards_of_theirs_are_named_with_their_module(capsys):
    trl(reward_funcs=["near", "far"])
    assert "the DAG names them  reward: [MODULE:NAME, …]" in capsys.readouterr().out
    shutil.rmtree("theirs")
    converted(f"{VERL.rstrip()} custom_reward_function.path=near.py\n", "theirs.sh")
    assert "the DAG names it  reward: MODULE:NAME" in capsys.readouterr().out


def test_a_push_of_trl_is_a_command_after_the_run(capsys):
    _, _, left = trl(push_to_hub=True, hub_model_id="me/tuned", hub_private_repo=True)
    assert left == []
    assert "hf upload --private me/tuned RUN/model" in capsys.readouterr().out


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


def test_a_dag_of_siirl(folder):
    (folder / "theirs.yaml").write_text(yaml.safe_dump(SIIRL))
    assert main(["convert", "theirs.yaml"]) == 0
    run = ["--set", 'data={"train": "train.jsonl"}', "--set", "validation=null"]
    assert main(["validate", "theirs/theirs.yaml", "--run", "embedded", *run]) == 0
    nodes = yaml.safe_load((folder / "theirs/theirs.yaml").read_text())["nodes"]
    assert {name: node["function"] for name, node in nodes.items()} == {
        "rollout": "generate", "function_reward": "score", "advantages": "group_advantage", "old": "logprobs",
        "ref": "logprobs", "train": "policy_update"}


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


def test_what_only_the_script_can_fill_in_is_listed(folder, capsys):
    _, run = converted("NODES=\nlong=$((16 * 4))\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
                       "data.train_files=train.jsonl data.train_batch_size=8 data.max_response_length=$long "
                       "trainer.nnodes=$MACHINES_OF_NOBODY trainer.n_gpus_per_node=2", "theirs.sh")
    assert run["roles"]["actor"]["generation"]["max_new_tokens"] == 64
    assert run["ranks"] == 2
    assert "set these by hand: trainer.nnodes: $MACHINES_OF_NOBODY" in capsys.readouterr().out
    assert Path("theirs/not_converted.txt").read_text() == "trainer.nnodes: $MACHINES_OF_NOBODY\n"


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
