"""Which settings `distflow set` may change in a running job, for which groups, and why the others are fixed."""

from __future__ import annotations

from collections.abc import Collection

from distflow.config.run import Run
from distflow.errors import Diagnostic, Location, listing
from distflow.plan import INFERENCE, ROLLOUT, TRAINER

_TRAINING = ("micro_batch_tokens", "learning_rate", "schedule", "min_learning_rate", "warmup_steps", "weight_decay",
             "betas", "max_grad_norm", "recompute")
_SAMPLING = ("top_p", "top_k", "min_p", "batch_rows")
_OF_TRAINER = {"checkpoint": ("every", "keep"), "validation": ("every", "patience")}
_WHY_NOT = {
    "model": "its weights are loaded, and the checkpoints are of it",
    "lora": "its adapters are made, and the checkpoints are of them",
    "engine": "the state in memory is in this engine's form",
    "temperature": "rows under way were sampled with the old one, and are trained on with the log-probabilities of one",
    "max_new_tokens": "the plan has room for responses of this length",
    "nodes": "the plan is made from the DAG", "imports": "the plan is made from the DAG",
    "mode": "the plan is made from it", "groups": "the plan is made from it", "layouts": "the plan is made from it",
    "ranks": "they have been started", "seed": "what was sampled so far depends on it",
    "data": "the steps done so far have drawn from it", "robust": "the supervisors read it once, when they start",
    "faults": "the supervisors read them once, when they start",
    "steps": "schedules and rollouts count on it: stop the job, and  distflow resume RUN --set steps=N",
}
_ANY = "it is read once, when the run starts"


def groups_of(path: tuple[str, ...], run: Run, on_rollouts: Collection[str] = ()) -> tuple[str, ...]:
    """Return the groups that a change of this setting concerns; none if it cannot be changed. `on_rollouts`: roles with
    whose settings ranks that sample infer."""
    if path[0] == "roles" and len(path) == 3 and path[2] in _TRAINING:
        infers = run.has_samplers and bool(run.groups.inference_ranks)  # perhaps with settings that they copy
        beside = path[1] in on_rollouts and path[2] == "micro_batch_tokens"
        return TRAINER, *[INFERENCE] * infers, *[ROLLOUT] * beside
    if path[0] == "roles" and path[2:3] == ("generation",) and path[3:] in [(name,) for name in _SAMPLING]:
        return *[TRAINER] * run.trainer_samples, *[ROLLOUT] * run.has_samplers
    return (TRAINER,) if path == ("samples",) or path[1:] in [(name,) for name in _OF_TRAINER.get(path[0], ())] else ()


def refusal(path: tuple[str, ...], text: str) -> Diagnostic:
    """Return why this setting cannot change. `text` is the user's KEY=VALUE."""
    why = next((_WHY_NOT[part] for part in path if part in _WHY_NOT), _ANY)
    known = [f"roles.ROLE.{name}" for name in _TRAINING] + [f"roles.ROLE.generation.{name}" for name in _SAMPLING] + \
        [f"{part}.{name}" for part, names in _OF_TRAINER.items() for name in names] + ["samples"]
    return Diagnostic(f"`{'.'.join(path)}` cannot change in a job that runs: {why}", Location(f"--set {text}"),
                      listing(known, "What can"))
