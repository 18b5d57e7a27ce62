"""`distflow convert`: makes a DAG and a run file from a configuration of verl, TRL or siiRL.

    it has                                       it is of       made from it
    nodes: with node_id                          siiRL          the DAG, node by node
    keys as actor_rollout_ref.model.path         verl, siiRL    a shipped DAG with its settings, and the run file
    keys as num_generations                      TRL (GRPO)     the same

A file is YAML, or a shell script with the command. Nothing is dropped in silence: what has no counterpart here is
listed in not_converted.txt. The keys of the other projects are those of their documentation in 2026.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from distflow.cli.common import Verb
from distflow.cli.conversion import Conversion, flat, nested
from distflow.cli.shell_script import shell_settings
from distflow.config.shipped import SHIPPED
from distflow.config.yaml_source import dump
from distflow.config.yaml_syntax import BoundedLoader
from distflow.errors import Diagnostic, InvalidInput, nearest

_UNKNOWN_STEPS = 100
_ESTIMATORS = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_pp"}
_AGGREGATES = {"token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum",
               "seq-mean-token-mean": "seq_mean_token_mean", "seq-mean-token-sum-norm": "fixed_length_sum"}
_LOSSES = {"grpo": "seq_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length_sum",
           "cispo": "token_mean"}
_KL_NODES = {"ppo": "advantage", "rloo": "penalty", "reinforce_pp": "tokens"}  # where a DAG has KL in the reward
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine"}
_SCALES = {True: True, "group": True, False: False, "none": False, "batch": False}
_KL_KINDS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
_ENGINES = {"fsdp": None, "fsdp2": None, "megatron": "megatron"}
_FROZEN = {"actor_rollout_ref.actor.freeze_vision_tower": "visual.*",
           "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": "mlp.gate.*"}
_LAYER = re.compile(r"[\w.-]+")  # a name, and no expression for names
_LOGGERS = ("tensorboard", "wandb", "mlflow")
_NO_LOGGERS = ("console", "none")  # what a run prints in any case
_FUNCTIONS = {  # siiRL: node_role, and whether the node trains; here: role, type, function
    ("ROLLOUT", False): ("actor", "MODEL_INFERENCE", "generate"),
    ("REWARD", False): ("reward", "COMPUTE", "score"),
    ("ACTOR", False): ("actor", "MODEL_INFERENCE", "logprobs"),
    ("ACTOR", True): ("actor", "MODEL_TRAIN", "policy_update"),
    ("REFERENCE", False): ("reference", "MODEL_INFERENCE", "logprobs"),
    ("CRITIC", False): ("critic", "MODEL_INFERENCE", "values"),
    ("CRITIC", True): ("critic", "MODEL_TRAIN", "value_update"),
}


_VERL_DEFAULTS = {
    "data.train_batch_size": 1024, "data.max_prompt_length": 512, "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999], "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0, "actor_rollout_ref.actor.loss_agg_mode": "token-mean"}
"""What verl fills in where a configuration says nothing, and distflow does not: of verl 0.9's `ppo_trainer`."""
_VERL_SINGLE = {"actor_rollout_ref.rollout.n": 1}  # for algorithms that do not compare the answers to a prompt
_VERL_CRITIC = {"algorithm.gamma": 1.0, "algorithm.lam": 1.0, "critic.cliprange_value": 0.5, "critic.optim.lr": 1e-5,
                "critic.optim.weight_decay": 0.01, "critic.optim.betas": [0.9, 0.999]}
_TRL_DEFAULTS = {"seed": 42, "adam_beta2": 0.999}  # of TRL 1.16's GRPOConfig
_TRL_EPSILON = 1e-4
"""What TRL adds to the deviation of a group's rewards; it is no setting there."""


_OTHER_TRAINERS = {
    "DPO": {"sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair",
            "discopop", "apo_zero", "apo_down", "sft", "sigmoid_norm"},
    "KTO": {"kto", "apo_zero_unpaired"}, "SFT": {"nll", "dft"}}
"""Values of `loss_type` of TRL's trainers that are not converted."""
_FROM_PYTHON = """Let it write them, below its GRPOConfig:

    theirs = {"model_name_or_path": "MODEL", "dataset_name": "train.jsonl", **config.to_dict()}
    Path("theirs.yaml").write_text(yaml.safe_dump(theirs))

and then:  distflow convert theirs.yaml"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML, or a shell script with the command that starts training")
    parser.add_argument("--out", metavar="FOLDER", help="a folder to make; default: one named as the file")


def convert(options: argparse.Namespace) -> int:
    file = Path(options.file)
    name = re.sub(r"\W+", "_", file.stem).strip("_").lower() or "converted"
    folder = Path(options.out or name)
    try:
        content, unknown = _read(file)
    except FileNotFoundError:
        raise InvalidInput(Diagnostic(f"there is no file `{file}`", None, _beside(file))) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from None
    if folder.exists():
        raise InvalidInput(f"{folder} exists. Name another folder:  --out FOLDER")
    if isinstance(content.get("nodes"), list):
        files, notes, left = {f"{name}.yaml": _dag_text(_siirl_dag(file, name, content["nodes"]), file)}, [
            "group_size: 8 is a guess: siiRL has it in its trainer configuration, as actor_rollout_ref.rollout.n",
            "its models, data and sizes stand in siiRL's trainer configuration: convert that too, and take its run.yaml"
        ], [f"{key}: {value}" for key, value in content.items() if key not in ("nodes", "dag_id", "description")]
    else:
        done = _converted(file, flat(content))
        run = dump(nested(done.settings), allow_unicode=True)
        files = {f"{name}.yaml": _dag_text(_adapted_dag(done, name), file), "run.yaml": f"# From {file.name}.\n{run}"}
        notes, left = done.notes, done.left() + unknown
        if unknown:
            notes.append("variables and commands that only the script itself can fill in, set these by hand: "
                         f"{', '.join(unknown)}")
    _write(folder, files, notes, left)
    return 0


def _beside(file: Path) -> str:
    """Return which file of the same folder was probably meant."""
    near = nearest(file.name, sorted(path.name for path in file.parent.glob("*") if path.is_file()))
    return f"Did you mean `{file.with_name(near)}`?" if near else ""


def _write(folder: Path, files: dict[str, str], notes: list[str], left: list[str]) -> None:
    folder.mkdir(parents=True)
    if left:
        files = {**files, "not_converted.txt": "\n".join(left) + "\n"}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"made {folder}/ with {', '.join(files)}")
    for note in notes:
        print(f"note: {note}")
    if left:
        shown = ", ".join(line.partition(":")[0] for line in left[:5])
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        print(f"note: without a known counterpart here: {shown}{more} ({folder}/not_converted.txt)")
    dag = next(iter(files))
    run = ["--run", str(folder / "run.yaml")] if "run.yaml" in files else []
    print(f"Next:  {shlex.join(['distflow', 'validate', str(folder / dag), *run])}")


def _read(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the mapping of a YAML file, or the settings of the command in a shell script; and what the script would
    have to be run for."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        raise InvalidInput(Diagnostic(f"{file} is a Python script, whose settings only running it would tell", None,
                                      _FROM_PYTHON))
    if file.suffix not in (".yaml", ".yml", ".json"):
        settings, unknown = shell_settings(text)
        return dict(settings), [f"{key}: {value}" for key, value in unknown.items()]
    content = yaml.load(text, BoundedLoader)
    if not isinstance(content, dict):
        raise InvalidInput(f"{file} is no mapping of settings")
    return content, []


def _converted(file: Path, given: dict[str, Any]) -> Conversion:
    if isinstance(losses := given.get("loss_type"), list):  # of TRL's trainers for preferences
        given["loss_type"] = losses[0] if losses else None
    done = Conversion(file, given)
    if any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in given):
        _from_verl(done)
    elif trainer := next((name for name, own in _OTHER_TRAINERS.items() if given.get("loss_type") in own), None):
        raise InvalidInput(f"{file} is a configuration of TRL's {trainer}Trainer, as loss_type: {given['loss_type']} "
                           "says, and of TRL only GRPO is converted. docs/coming_from.md has a table of the others' "
                           f"settings; begin with the DAG {'sft' if trainer == 'SFT' else 'dpo'}")
    elif {"num_generations", "max_completion_length", "model_name_or_path", "loss_type"} & given.keys():
        _from_trl(done)
    else:
        raise InvalidInput(f"{file} is no configuration of verl (actor_rollout_ref…), of TRL's GRPO (num_generations…) "
                           "and no DAG of siiRL (nodes: with node_id)")
    if done.filled:
        done.notes.append("the file leaves these out, and got the other project's defaults: "
                          f"{', '.join(f'{key}: {value}' for key, value in done.filled.items())}")
    if done.number("trainer.total_training_steps", done.number("max_steps", 0)) < 1:  # -1: epochs say how long
        done.settings.pop("steps", None)
        epochs = done.get("trainer.total_epochs", done.get("num_train_epochs", 1))
        done.settings = {"steps": _UNKNOWN_STEPS, **done.settings}
        done.notes.append(f"steps: {_UNKNOWN_STEPS} is a guess. The file counts epochs, {epochs}: set epochs × prompts "
                          "of the training set / data.batch")
    return done


def _from_verl(done: Conversion) -> None:
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    estimator = done.get("algorithm.adv_estimator", "gae")
    if estimator not in _ESTIMATORS:
        raise InvalidInput(f"algorithm.adv_estimator: {estimator} is not converted; these are: "
                           f"{', '.join(_ESTIMATORS)}. `distflow new` begins an algorithm of your own")
    done.algorithm = _ESTIMATORS[estimator]
    compares = done.algorithm in ("grpo", "rloo")
    done.defaults = {**_VERL_DEFAULTS, **(_VERL_CRITIC if estimator == "gae" else {}),
                     **({} if compares else _VERL_SINGLE)}
    if compares and done.given.get("actor_rollout_ref.rollout.n") is None:
        done.notes.append("the file does not say how many answers a prompt gets (actor_rollout_ref.rollout.n). With "
                          f"verl's default, 1, {done.algorithm} has nothing to compare: the DAG's group_size stays")
    done.copy({"trainer.total_training_steps": "steps", "actor_rollout_ref.model.path": "roles.actor.model",
               "actor_rollout_ref.model.enable_gradient_checkpointing": "roles.actor.recompute",
               "data.train_batch_size": "data.batch", "data.prompt_key": "data.question",
               "data.max_prompt_length": "data.max_prompt_tokens", "data.seed": "seed",
               "data.max_response_length": "roles.actor.generation.max_new_tokens"})
    done.copy({"optim.lr": "roles.actor.learning_rate", "optim.weight_decay": "roles.actor.weight_decay",
               "grad_clip": "roles.actor.max_grad_norm", "ppo_max_token_len_per_gpu": "roles.actor.micro_batch_tokens",
               "fsdp_config.param_offload": "roles.actor.offload", "ppo_epochs": "with:update.epochs",
               "optim.betas": "roles.actor.betas"}, actor)
    done.copy({"n": "with:rollout.group_size", "temperature": "roles.actor.generation.temperature",
               "top_p": "roles.actor.generation.top_p", "name": "roles.actor.rollout",
               "tensor_model_parallel_size": "layouts.rollout.tp", "val_kwargs.n": "validation.samples",
               "gpu_memory_utilization": "roles.actor.generation.memory_share",
               "val_kwargs.temperature": "validation.temperature"}, rollout)
    _verl_limits(done, f"{rollout}val_kwargs.")
    model = "actor_rollout_ref.model."
    if done.number(f"{model}lora_rank", 0) > 0:
        _adapters(done, (f"{model}lora_rank", 0), (f"{model}lora_alpha", 16), (f"{model}target_modules", "all-linear"))
    _verl_data(done)
    _verl_loss(done, actor)
    _verl_schedule(done, f"{actor}optim.")
    done.put("roles.actor.engine", done.translated(actor + "strategy", _ENGINES))
    frozen = [pattern for key, pattern in _FROZEN.items() if done.get(key) is True]
    done.put("roles.actor.freeze", frozen or None)
    done.put("roles.actor.generation.top_k", max(done.number(rollout + "top_k", 0), 0) or None)
    warmup, total = (done.number(key, 0) for key in (f"{actor}optim.lr_warmup_steps", "trainer.total_training_steps"))
    share = done.number(f"{actor}optim.lr_warmup_steps_ratio", 0) if warmup <= 0 < total else 0
    done.put("roles.actor.warmup_steps", max(warmup, int(share * total)) or None)
    machines, gpus = done.number("trainer.nnodes", 1), done.number("trainer.n_gpus_per_node", 0)
    done.put("ranks", machines * gpus or None)
    for key, ours in (("save_freq", "checkpoint.every"), ("test_freq", "validation.every")):
        done.put(ours, max(done.number(f"trainer.{key}", 0), 0) or None)
    done.put("samples", "all" if done.get("trainer.rollout_data_dir") else None)
    _loggers(done, "trainer.logger")
    _without_validation_data(done)


def _verl_limits(done: Conversion, prefix: str) -> None:
    """Convert which tokens validation draws from; at temperature 0 that says nothing."""
    top_p = done.get(f"{prefix}top_p")
    if done.settings.get("validation.temperature"):
        done.put("validation.top_p", top_p)
    if done.given.get(f"{prefix}top_k") in (-1, 0):
        done.taken.add(f"{prefix}top_k")  # all tokens


def _verl_data(done: Conversion) -> None:
    for key, ours in (("train_files", "data.train"), ("val_files", "validation.data")):
        files = done.get(f"data.{key}")
        files = files if isinstance(files, list) else [files] if files else []
        paths = [os.path.expanduser(str(path)) for path in files]
        if ours == "validation.data":
            done.put(ours, {f"set{number}": path for number, path in enumerate(paths, 1)} or None)
        elif paths:
            done.put(ours, paths[0])
            if len(paths) > 1:
                done.notes.append("of data.train only the first file was taken; write all with their numbers of "
                                  f"records as weights: {{{', '.join(f'{path}: N' for path in paths)}}}")
    if str(done.settings.get("data.train")).endswith(".parquet"):
        done.settings.setdefault("data.question", "prompt")
        done.settings["data.answer"] = "reward_model.ground_truth"
    done.put("data.long_prompts", "drop" if done.get("data.filter_overlong_prompts") is True else None)
    _template(done, "data.apply_chat_template_kwargs.")
    if done.get("custom_reward_function.path"):
        done.notes.append("your reward function goes into a module under @reward, and the DAG names it  reward: "
                          "MODULE:NAME  : docs/own_algorithm.md")


def _verl_loss(done: Conversion, actor: str) -> None:
    clip = done.get(actor + "clip_ratio")
    low, high = done.get(actor + "clip_ratio_low", clip), done.get(actor + "clip_ratio_high", clip)
    reinforce = done.algorithm in ("rloo", "remax")
    if reinforce:
        done.filled.pop(f"{actor}clip_ratio", None)
        done.taken -= {f"{actor}clip_ratio{which}" for which in ("", "_low", "_high")}
    elif low is not None:
        done.arguments["update.clip"] = low
        if high is not None and high != low:
            done.arguments["update.clip_high"] = high
        done.copy({"clip_ratio_c": "with:update.dual_clip"}, actor)
    if done.get(actor + "entropy_coeff", 0):
        done.arguments["update.entropy"] = done.get(actor + "entropy_coeff")
    if mode := done.translated(actor + "loss_agg_mode", _AGGREGATES):
        done.arguments["update.aggregate"] = mode
        if mode == "fixed_length_sum":
            done.arguments["update.fixed_length"] = done.get("data.max_response_length", 512)
    mini, batch = done.number(actor + "ppo_mini_batch_size", 0), done.number("data.train_batch_size", 0)
    if mini > 0 and batch and (mini < batch or f"{actor}ppo_mini_batch_size" in done.given):
        for node in ("update", "critic") if done.algorithm == "ppo" else ("update",):
            done.arguments[f"{node}.mini_batches"] = math.ceil(batch / mini)
    else:
        done.filled.pop(f"{actor}ppo_mini_batch_size", None)
    loss_weight, in_loss = done.get(actor + "kl_loss_coef", 0.001), done.get(actor + "use_kl_loss", False)
    reward_weight = done.get("algorithm.kl_ctrl.kl_coef", 0.001)
    in_reward = done.get("algorithm.use_kl_in_reward", False)
    if done.algorithm in _KL_NODES:
        done.arguments[f"{_KL_NODES[done.algorithm]}.kl"] = float(reward_weight) if in_reward else 0.0
    elif in_reward:
        done.notes.append("KL in the reward (algorithm.use_kl_in_reward) is in the DAGs ppo, rloo and reinforce_pp")
    done.reference = bool(in_loss) or done.algorithm in _KL_NODES
    if in_loss:
        done.arguments["update.kl"] = loss_weight
        if kind := done.translated(actor + "kl_loss_type", _KL_KINDS):
            done.arguments["update.kl_kind"] = kind
    if done.algorithm == "ppo":
        _verl_critic(done)
    elif done.algorithm == "grpo" and done.get("algorithm.norm_adv_by_std_in_grpo", True) is False:
        done.arguments["advantage.scale"] = False


def _verl_critic(done: Conversion) -> None:
    if (first := done.number("trainer.critic_warmup", 0)) > 1:  # the step in which the actor begins
        done.arguments["update.critic_warmup"] = first - 1
    done.copy({"gamma": "with:advantage.gamma", "lam": "with:advantage.lam"}, "algorithm.")
    done.copy({"optim.lr": "roles.critic.learning_rate", "optim.weight_decay": "roles.critic.weight_decay",
               "optim.betas": "roles.critic.betas", "cliprange_value": "with:critic.clip",
               "ppo_epochs": "with:critic.epochs"}, "critic.")


def _verl_schedule(done: Conversion, optim: str) -> None:
    kind = (done.translated(f"{optim}lr_scheduler_type", _SCHEDULES)
            or done.translated(f"{optim}warmup_style", _SCHEDULES))
    done.put("roles.actor.schedule", kind)
    if kind == "cosine" and (share := done.get(f"{optim}min_lr_ratio")):
        done.put("roles.actor.min_learning_rate", share * done.number(f"{optim}lr", 1e-6))


def _template(done: Conversion, prefix: str) -> None:
    """Convert the variables of the chat template, which stand under `prefix`."""
    for key in [key for key in done.given if key.startswith(prefix)]:
        done.put(f"data.chat_template_kwargs.{key.removeprefix(prefix)}", done.get(key))


def _from_trl(done: Conversion) -> None:
    done.defaults = dict(_TRL_DEFAULTS)
    done.copy({"seed": "seed", "model_name_or_path": "roles.actor.model",
               "dataset_name": "data.train", "max_prompt_length": "data.max_prompt_tokens",
               "max_completion_length": "roles.actor.generation.max_new_tokens",
               "learning_rate": "roles.actor.learning_rate",
               "weight_decay": "roles.actor.weight_decay", "max_grad_norm": "roles.actor.max_grad_norm",
               "gradient_checkpointing": "roles.actor.recompute", "temperature": "roles.actor.generation.temperature",
               "top_p": "roles.actor.generation.top_p", "top_k": "roles.actor.generation.top_k",
               "min_p": "roles.actor.generation.min_p",
               "vllm_tensor_parallel_size": "layouts.rollout.tp",
               "vllm_gpu_memory_utilization": "roles.actor.generation.memory_share",
               "output_dir": "output", "num_iterations": "with:update.epochs"})
    if done.get("use_peft") is True:
        _adapters(done, ("lora_r", 16), ("lora_alpha", 32), ("lora_target_modules", ["q_proj", "v_proj"]))
    elif settings := [key for key in done.given if key.startswith("lora_") and done.get(key) is not None]:
        done.notes.append(f"{', '.join(settings)}: without  use_peft: true  TRL trains the whole model, and so does "
                          "this run")
    done.put("roles.actor.betas", [done.get("adam_beta1", 0.9), done.get("adam_beta2")])
    _trl_batch(done)
    _trl_steps(done)
    done.put("data.question", "prompt")
    _template(done, "chat_template_kwargs.")
    done.drops_truncated = done.get("mask_truncated_completions", False)
    _trl_schedule(done)
    _trl_loss(done)
    done.put("roles.actor.rollout", "vllm" if done.get("use_vllm") else None)
    if done.get("push_to_hub", False):
        name = done.get("hub_model_id") or "OWNER/NAME"
        private = " --private" * bool(done.get("hub_private_repo", False))
        done.notes.append(f"to have the model on the hub, after the run:  hf upload{private} {name} RUN/model")
    if done.get("reward_funcs"):
        done.notes.append("your reward functions go into a module under @reward, and the DAG names them  reward: "
                          "[MODULE:NAME, …]  : docs/own_algorithm.md")
    _loggers(done, "report_to")
    _without_validation_data(done)


def _adapters(done: Conversion, rank: tuple[str, int], alpha: tuple[str, int], targets: tuple[str, Any]) -> None:
    """Take the settings of adapters, of which each is a key and the other project's default."""
    done.defaults |= dict((rank, alpha, targets))
    size, scale = done.number(*rank), done.number(*alpha)
    scale *= math.sqrt(size) if done.get("use_rslora") is True else 1  # there it is divided by that root, here by rank
    names: Any = done.get(*targets)
    if not all(_LAYER.fullmatch(str(name)) for name in (names if isinstance(names, list) else [names])):
        done.taken.discard(targets[0])  # an expression, and not the last parts of names
        names = None
    for key, value in (("rank", size), ("alpha", scale), ("targets", names)):
        done.put(f"roles.actor.lora.{key}", value)


def _trl_batch(done: Conversion) -> None:
    """Convert how many rows are sampled at once, and how many optimizer steps they are for."""
    group = done.number("num_generations", 8)
    done.arguments["rollout.group_size"] = group
    accumulated = done.number("gradient_accumulation_steps", 1)
    of_process = done.number("per_device_train_batch_size", 8)
    processes, rows = done.number("num_processes", 0), done.number("generation_batch_size", 0)
    per_process = of_process * done.number("steps_per_generation", accumulated)
    prompts = max((rows or per_process * (processes or 1)) // group, 1)
    done.put("data.batch", prompts)
    if not rows and not processes:
        done.notes.append(f"data.batch: {prompts} prompts are those of one process; multiply it by how many you had")
    batches = done.given.get("steps_per_generation") or rows / (of_process * (processes or 1))
    if batches > accumulated:
        if batches % accumulated:
            done.taken -= {"steps_per_generation", "generation_batch_size"}
        else:
            done.arguments["update.mini_batches"] = int(batches // accumulated)
            if not processes and not done.given.get("steps_per_generation"):
                done.notes.append(f"update.mini_batches: {int(batches // accumulated)} is right if "
                                  "generation_batch_size is that of one process; divide it by how many you had")


def _trl_steps(done: Conversion) -> None:
    """Convert what is counted in steps of the optimizer, of which several may train what was sampled once. Numbers
    below 1 are shares of all steps."""
    total = done.number("max_steps", 0)
    for key, ours in (("max_steps", "steps"), ("warmup_ratio", "roles.actor.warmup_steps"),
                      ("warmup_steps", "roles.actor.warmup_steps"), ("eval_steps", "validation.every"),
                      ("save_steps", "checkpoint.every")):
        steps = done.number(key, 0)
        if 0 < steps < 1 and total < 1:
            done.taken.discard(key)
        elif steps > 0:
            done.put(ours, math.ceil((steps * total if steps < 1 else steps) / _updates(done)))


def _updates(done: Conversion) -> int:
    """Return how many steps of the optimizer follow each sampling."""
    return done.arguments.get("update.mini_batches", 1) * done.arguments.get("update.epochs", 1)


def _trl_loss(done: Conversion) -> None:
    loss = done.given.get("loss_type") or "dapo"
    if aggregate := done.translated("loss_type", _LOSSES, "dapo"):
        done.arguments["update.aggregate"] = aggregate
        if loss == "dr_grpo":
            done.arguments["update.fixed_length"] = done.get("max_completion_length", 256)
    if loss == "cispo":  # its epsilon_high is the cap itself
        done.arguments["update.loss"] = "cispo"
        if (done.given.get("epsilon_high") or 0) >= 1:
            done.arguments["update.clip_high"] = done.get("epsilon_high") - 1
        else:
            done.notes.append("ratios are capped at 5 (clip_high: 4.0 of cispo), since the file has no epsilon_high "
                              "of at least 1")
    else:
        done.copy({"epsilon": "with:update.clip", "epsilon_high": "with:update.clip_high",
                   "delta": "with:update.dual_clip"})
    if done.translated("scale_rewards", _SCALES, True) is False:
        done.arguments["advantage.scale"] = False
        if done.given.get("scale_rewards") == "batch":
            done.arguments["update.normalize"] = "batch"
    else:
        done.arguments["advantage.epsilon"] = _TRL_EPSILON
    if (share := done.number("top_entropy_quantile", 1.0)) < 1:
        done.entropies, done.arguments["update.entropy_quantile"] = True, round(1 - share, 12)
    beta = done.number("beta", 0.0)
    done.reference = beta > 0
    if beta:
        done.arguments["update.kl"] = beta
    if done.reference and done.get("sync_ref_model", False):
        done.follow = {"every": max(round(done.number("ref_model_sync_steps", 512) / _updates(done)), 1),
                       "mix": done.get("ref_model_mixup_alpha", 0.6)}


def _trl_schedule(done: Conversion) -> None:
    done.put("roles.actor.schedule", done.translated("lr_scheduler_type", _SCHEDULES, "linear"))
    if done.given.get("lr_scheduler_type") == "cosine_with_min_lr":
        share = done.get("lr_scheduler_kwargs.min_lr_rate", 0.0)
        done.put("roles.actor.min_learning_rate",
                 done.get("lr_scheduler_kwargs.min_lr", share * done.number("learning_rate", 1e-6)))


def _loggers(done: Conversion, key: str) -> None:
    named = done.get(key, [])
    named = [named] if isinstance(named, str) else named
    done.put("log", [name for name in named if name in _LOGGERS] or None)
    if any(name not in (*_LOGGERS, *_NO_LOGGERS) for name in named):
        done.taken.discard(key)


def _without_validation_data(done: Conversion) -> None:
    if "validation.data" not in done.settings:
        lost = [f"{key}: {done.settings.pop(key)}" for key in list(done.settings) if key.startswith("validation.")]
        if lost:
            done.notes.append(f"left out, since the file names no data for validation: {', '.join(lost)}")


def _adapted_dag(done: Conversion, name: str) -> dict[str, Any]:
    dag = yaml.safe_load((SHIPPED / f"{done.algorithm}.yaml").read_text(encoding="utf-8"))
    dag["name"] = name
    if not done.reference and "reference" in dag["nodes"]:
        del dag["nodes"]["reference"], dag["roles"]["reference"]
        dag["nodes"]["update"].get("with", {}).pop("kl", None)
        for node in dag["nodes"].values():
            node["dependencies"] = [each for each in node.get("dependencies", []) if each != "reference"]
    if done.follow:
        dag["roles"]["reference"]["follow"] = done.follow
    if done.entropies:
        dag["nodes"] = {"rollout": dag["nodes"]["rollout"], "entropies": {
            "role": "actor", "type": "MODEL_INFERENCE", "function": "entropies", "dependencies": ["rollout"]},
            **dag["nodes"]}
        dag["nodes"]["update"]["dependencies"].append("entropies")
    if done.drops_truncated:
        dag["nodes"]["untruncated"] = {"role": "actor", "type": "COMPUTE", "function": "drop_truncated",
                                       "dependencies": ["advantage"]}
        update = dag["nodes"].pop("update")  # it stands last
        dag["nodes"]["update"] = {**update, "dependencies": [*update["dependencies"], "untruncated"]}
    if done.arguments.get("update.loss") == "cispo":  # it has no lower bound
        dag["nodes"]["update"]["with"].pop("clip", None)
    for key, value in done.arguments.items():
        node, argument = key.split(".")
        dag["nodes"][node].setdefault("with", {})[argument] = value
    return dag


def _siirl_dag(file: Path, name: str, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    critic = any(node.get("node_role") == "CRITIC" for node in nodes)
    made, used = {}, set()
    for node in nodes:
        role, train = node.get("node_role"), node.get("node_type") == "MODEL_TRAIN"
        train = train and role in ("ACTOR", "CRITIC") and not node.get("only_forward_compute")
        found = _FUNCTIONS.get((str(role), train))
        if role == "ADVANTAGE":
            found = ("critic" if critic else "actor", "COMPUTE", "gae" if critic else "group_advantage")
        if found is None:
            raise InvalidInput(f"{file}: node `{node.get('node_id')}` ({node.get('node_type')}, {role}) has no "
                               "function here; write one under @node, and the DAG by hand: docs/own_algorithm.md")
        used.add(found[0])
        made[str(node["node_id"])] = {"role": found[0], "type": found[1], "function": found[2],
                                      "dependencies": list(node.get("dependencies") or [])}
        if found[2] == "generate":
            made[str(node["node_id"])]["with"] = {"group_size": 8}
    roles: dict[str, Any] = {"actor": {"trained": True}}
    roles |= {"critic": {"copy_of": "actor", "trained": True, "head": "value"}} if critic else {}
    roles |= {"reference": {"copy_of": "actor"}} if "reference" in used else {}
    return {"name": name, "roles": roles, "nodes": made}


def _dag_text(dag: dict[str, Any], file: Path) -> str:
    lines = [f"# From {file.name}.", f"name: {dag['name']}"]
    for part in ("roles", "nodes"):
        lines.append(f"{part}:")
        for name, value in dag[part].items():
            flow = dump(value, default_flow_style=True, width=math.inf).strip()
            lines.append(f"  {name}: {flow}")
    return "\n".join(lines) + "\n"


VERBS = {"convert": Verb("make a DAG and a run file from a configuration of verl, TRL or siiRL", _add_arguments,
                         convert)}
