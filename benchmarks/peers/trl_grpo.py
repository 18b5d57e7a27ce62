"""The peer's side of `end_to_end_vs_trl.py`: TRL's GRPOTrainer under torchrun, in TRL's own environment.

`torchrun --nproc-per-node 2 trl_grpo.py CONFIG.json`. Rank 0 prints `step N/M` as each update ends; every rank leaves
`rank-R.json`: what its completions of each update were worth, and how many tokens they had.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for the reward: both sides call the very same function

import torch  # noqa: E402 - needs the path above
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from workers.isolation.scoring import find_reward  # noqa: E402


class Trainer(GRPOTrainer):
    """TRL's, with a warm-up whose first update has a rate above zero, as distflow's has."""

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        warmup = self.args.warmup_steps
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0)
        return self.lr_scheduler


class Score:
    """distflow's reward on TRL's terms. Keeps what it saw: that costs TRL nothing, not even a collective."""

    __name__ = "score"

    def __init__(self, reward: str):
        module, _, name = reward.rpartition(":")
        self.reward, self.updates = find_reward(name, module), []

    def __call__(self, completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any):
        rewards = [float(self.reward(completion, expected)) for completion, expected in zip(completions, answer)]
        self.updates.append({"rows": len(rewards), "reward": sum(rewards), "tokens": sum(map(len, completion_ids))})
        return rewards


class Report(TrainerCallback):
    """Says when an update has ended; whoever reads the line knows the time."""

    def on_step_end(self, args: GRPOConfig, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            print(f"trl  step {state.global_step}/{state.max_steps}", flush=True)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    score = Score(config["reward"])
    trainer = Trainer(model=config["model"], reward_funcs=score, args=settings(config), processing_class=tokenizer,
                      train_dataset=prompts(config, tokenizer), callbacks=[Report()])
    trainer.train()
    (Path(config["output"]) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(score.updates))


def settings(config: dict[str, Any]) -> GRPOConfig:
    """Return what `end_to_end_vs_trl.py` says of TRL's configuration, in TRL's words."""
    ranks, on_cpu = int(os.environ["WORLD_SIZE"]), config["device"] == "cpu"
    same = {name: config[name] for name in ("temperature", "learning_rate", "weight_decay", "max_grad_norm", "seed",
                                            "warmup_steps", "adam_beta1", "adam_beta2", "num_generations",
                                            "max_completion_length", "max_steps", "epsilon")}
    return GRPOConfig(
        **same, output_dir=config["output"], use_cpu=on_cpu, bf16=not on_cpu, gradient_checkpointing=False, beta=0.0,
        per_device_train_batch_size=config["prompts"] * config["num_generations"] // ranks,
        gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1, loss_type="dapo",
        scale_rewards="group", lr_scheduler_type="constant_with_warmup", shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"}, ddp_find_unused_parameters=False, dataloader_pin_memory=False,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, **config["extra"])


def prompts(config: dict[str, Any], tokenizer: Any) -> Dataset:
    """Return the records in distflow's order, rendered by the chat template beforehand: TRL would do it in every
    update.

    Raises:
        ValueError: TRL would read other tokens than distflow, which renders and tokenizes in one go.
    """
    records = [json.loads(line) for line in Path(config["records"]).read_text().splitlines()]
    system = [{"role": "system", "content": text} for text in [config["system_prompt"]] if text]
    rows = []
    for record in records:
        if not tokenizer.chat_template:
            rows.append({"prompt": f"{record['question']}\n", "answer": record["answer"]})
            continue
        messages = [*system, {"role": "user", "content": record["question"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if tokenizer(text)["input_ids"] != tokens:
            raise ValueError(f"this tokenizer reads its own rendered chat as other tokens: {text!r}")
        rows.append({"prompt": text, "answer": record["answer"]})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()
