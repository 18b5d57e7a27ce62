"""Writes what a run leaves: metrics and samples of each step, validations, checkpoints, models, summary."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from distflow.config.loggers import loggers_of
from distflow.data.batch import Ragged, is_text, to_list
from distflow.data.data_files import HELD_OUT
from distflow.data.databuffer import Databuffer
from distflow.data.exchange import barrier, gather, gather_values
from distflow.errors import StepFailed, quoted
from distflow.plan import REWARD_PARTS, ROW
from distflow.recovery.checkpoint_files import set_aside
from distflow.recovery.detectors import Alert
from distflow.telemetry import events, timeline, timings
from distflow.telemetry.files import replace_folder
from distflow.telemetry.learning import LearningFault, LearningMonitor, with_start
from distflow.telemetry.metrics import current
from distflow.telemetry.processes import python_environment, spawn
from distflow.telemetry.progress import StepProgress
from distflow.telemetry.run_folder import RunFolder, write_samples
from distflow.telemetry.run_reader import RunReader
from planners import plan as make_plan
from workers.context import RankContext
from workers.engines.role_engines import RoleEngines
from workers.functions.row_metrics import report_rows
from workers.train_state import TrainState
from workers.validation import LAG, MISSING, ValidationResult, Validator
from workers.validation_requests import ValidationRequests

_ENDED_EARLY, _REPEATED = "ended_early", "step_repeated"
_POLL_INTERVAL = 0.2  # seconds between two looks at validations that are awaited
_REPORT_TIMEOUT = 60.0  # seconds for the report at the end
_SHOWN = ("questions", "answers", "completions", "rewards")
_LOGPROBS = ("rollout_logprobs", "actor_logprobs", "reference_logprobs")
_LOOKS = ("every", "patience", "best")  # settings that do not change what a validation measures
_WHOLE = ("group", "responses", "turns", "environment_rewards", REWARD_PARTS, "advantages")
_BESIDE = (ROW, *_WHOLE, *_LOGPROBS)
"""Columns whose rows are in `samples.jsonl`; the second ones if they have the same layout as the first."""
_LONGEST = 200  # characters of a column of the user's own
_TOKENS = 512  # first tokens of a response that are there one by one


class Sink:
    """Writer of the run folder. Collective; rank 0 writes."""

    def __init__(self, context: RankContext, resumed_at: int | None, validator: Validator | ValidationRequests | None,
                 state: TrainState, trained: Mapping[str, RoleEngines]):
        """`validator`: of the ranks that train, or requests to rollouts, whose results come some steps later."""
        spec, plan, path = context.spec, context.own, context.path
        self.run, self.plan, self.path, self.state = spec.run, plan, path, state
        self.requests = None if isinstance(validator, Validator) else validator
        self.validator = validator if isinstance(validator, Validator) else None
        self.unconcluded, self.trained, self.devices = state.from_memory, trained, context.plan.ranks
        again = self.unconcluded and not self.requests
        self.folder = RunFolder(path, resumed_at, again, loggers_of(spec.run.log)) if dist.get_rank() == 0 else None
        self.part = path / "samples" / f"rank{dist.get_rank()}.jsonl"
        if self.run.samples == "all":
            with contextlib.suppress(OSError):  # the lines are dropped then, which is said
                self.part.parent.mkdir(exist_ok=True)
        self.progress = StepProgress(plan.name, spec.run.steps, resumed_at or 0) if self.folder else None
        self.resumed, self.began, self.done = resumed_at is not None, 0.0, resumed_at or 0
        self.best, self.worse, self.over = -math.inf, 0, ""
        self.validated: dict[str, float] = {}  # what validations have found that detectors have not seen
        self.fault: LearningFault | None = None  # what has ended the run, on rank 0
        self.stopped = False  # a detector has ended the run
        self.learning: LearningMonitor | None = None  # on rank 0, from the start on, when the settings are written
        if not context.plan.groups:  # where others sample, a node's seconds contain work of other groups
            now = make_plan(spec, plan.ranks)  # settings may have changed since this job was planned
            timings.current().open(path / timings.NAME, dist.get_rank(), now.digest)

    def _learning_monitor(self) -> LearningMonitor:
        """Return the detectors of learning, which know the steps before a resume."""
        reader = RunReader(self.path)
        monitor = LearningMonitor(self.run.robust.detectors, reader.settings())
        done = [line for line in reader.steps() if "seconds" in line or not line["step"]] if self.resumed else []
        for line in with_start(done):
            monitor.series.add(int(line["step"]), line)
        return monitor

    def _best_so_far(self) -> tuple[float, int, str]:
        """Return the best mean of the first validation set before this worker, how many validations came since, and
        why one of them has ended the run under these settings. Means of another reward or other problems are not
        compared. Collective."""
        means, why = dict[float, float](), ""
        if self.folder and self.resumed and self.run.validation:
            reader, name = RunReader(self.path), f"validation/{next(iter(self.run.validation.data))}"
            rows = reader.rows("events")
            since = max((event["step"] for event in rows if _measures_otherwise(event)), default=0)
            means = {line["step"]: line[name] for line in reader.steps() if name in line and line["step"] >= since}
            why = next((event["why"] for event in rows if event.get("event") == _ENDED_EARLY
                        and event["mean"] == means.get(event["of_step"]) and event["limits"] == self._limits), "")
        values = [*means.values()]
        best = max(values, default=-math.inf)
        worse = len(values) - 1 - values.index(best) if values else 0
        return tuple(gather_values([best, worse, why])[0])

    @property
    def _limits(self) -> list[int | None]:
        """What ends the run before its last step."""
        settings = self.run.validation
        return [settings.patience] if settings else []

    def start(self, step: int) -> bool:
        """Validate before the first step, or conclude the last again after a restart. Return whether the run ends."""
        events.current().step = step + 1
        self.best, self.worse, self.over = self._best_so_far()
        self.learning = self._learning_monitor() if self.folder else None
        over = False
        if not self.unconcluded:
            for line in (f"{self.plan.name}: writing to {self.path}", *(f"note: {note}" for note in self.plan.notes)):
                self._say(line)
        if self.over:
            self._say(f"{self.plan.name}  step {step}: it has ended before its last step: {self.over}")
        if self.learning:
            self.learning.series.doubts = RunReader(self.path).doubts()
        if not self.resumed:
            self._validate(step)
            self._note_validations()
        elif self.unconcluded:
            over = self.conclude(step)
        elif self.requests and (self._is_due(step) or step in self.requests.lost):
            self._validate(step)  # the run may have ended before it was answered
        self.done, self.began = step, time.perf_counter()
        return over or bool(self.over)

    def record(self, done: int, buffer: Databuffer, epoch: float) -> dict[str, float]:
        """Collect and write the metrics of a step, after `done` steps, and return them. Collective."""
        _note_memory()
        report_rows(buffer)
        if events.dropped():
            current().add("lines/dropped", events.dropped())
        values = current().collect(gather)
        seconds = time.perf_counter() - self.began
        timings.current().write(done, seconds)
        speed = values.get("tokens", 0.0) / seconds
        read = values.get("samples", 0.0) * values.get("prompt/length", 0.0) / seconds
        values |= {"epoch": epoch, "seconds": seconds, "tokens_per_second": speed,
                   "tokens_per_second_per_device": speed / self.devices,
                   "all_tokens_per_second_per_device": (speed + read) / self.devices}
        if self.run.samples == "all":
            write_samples(self.part, done, _all_samples(buffer, self.run.data.columns))
        if self.folder and self.progress:
            tokenizer = next((role.tokenizer for role in self.trained.values()), None)
            self.folder.write_samples(done, _samples(buffer, self.run.shown_samples, self.run.data.columns, tokenizer))
            self.folder.write_step(done, values)
            self.progress.step(values)
            self._report_missing_prompts(done, values)
        self._note_faults(done, values)
        return values

    def warn(self, done: int, detector: str, alert: Alert) -> None:
        if self.folder:
            events.record(detector, what=alert.what, **alert.facts)
            self._say(f"{self.plan.name}  step {done}: {alert.what} (detector `{detector}`)")

    def _note_faults(self, done: int, values: dict[str, float]) -> None:
        """Ask the detectors of learning about a step on rank 0, and end the run or repeat the step on all, if one of
        them is to. A repeated step counts as it comes, unless its numbers are not finite."""
        actions = self.run.robust.detectors
        seen, self.validated = values | self.validated, {}
        found = list(self.learning.look(done, seen)) if self.learning else []
        if found and self.folder:
            self.folder.loggers.alert(done, "\n".join(fault.message for fault in found))
        for fault in found:
            self.warn(done, fault.detector, Alert(fault.sentence, fault.facts))
            self._say(f"  probably: {fault.evidence.cause}\n  change: {fault.evidence.remedy}")
            if actions.get(fault.detector) == "stop":
                self.fault = self.fault or fault
        if "restart" in actions.values():
            wanted = [each for each in found if actions.get(each.detector) == "restart"]
            repeated = bool(wanted) and any(event.get("event") == _REPEATED and event.get("of_step") == done
                                            for event in RunReader(self.path).rows("events"))
            again = next((each for each in wanted if not (repeated and each.evidence.is_finite)), None)
            failed = f"step {done}: {again.evidence.what} (detector `{again.detector}`: restart)" if again else ""
            if failed:
                events.record(_REPEATED, of_step=done, why=failed)
            if failed := gather(failed.encode())[0].decode():
                raise StepFailed(failed)
        if "stop" in actions.values():
            ended_by = gather((self.fault.detector if self.fault else "").encode())[0].decode()
            self.stopped = bool(ended_by)
            self.over = self.over or (f"detector `{ended_by}`" if ended_by else "")

    def conclude(self, done: int) -> bool:
        """Validate and save after a step if it is time. Return whether it was the last one. Collective."""
        if self._is_due(done):
            self._validate(done)  # before the save, after which a resume would not do it again
        self._note_validations()
        last, every = bool(self.over) or done == self.run.steps, self.run.checkpoint.every
        if every and (last or done % every == 0) and not self.stopped:
            self.state.save(done)
        self.done, self.began = done, time.perf_counter()
        events.current().step = done + 1
        return last

    def settle(self) -> None:
        """Wait for the validations that rollouts have been asked for. There is one of the last step's weights in any
        case, also where the result of an earlier one has ended the run."""
        if self.requests:
            self._validate(self.done)
            while self.requests.open:
                self._note_validations(wait=_POLL_INTERVAL)
            self.requests.close()

    def flush(self) -> None:
        if self.folder and self.progress:
            self.folder.loggers.close()
            self.progress.close()

    def close(self) -> None:
        """Write the models as Hugging Face folders, and the summary, after the last step."""
        timeline.current().write()  # the report has the last second of every rank
        if not self.stopped:
            write_models(self.trained, self.path)
        elif self.fault:
            self._leave_checkpoint(self.fault)
        if self.folder and self.progress:
            self.folder.close({"plan": self.plan.digest, "ranks": self.devices, "seed": self.run.seed})
            look = self.run.report and self._report() or f"Look at it:  distflow report {quoted(self.path)}"
            self._say(f"{self.plan.name}: finished; everything is in {self.path}. {look}")
            self.progress.close()

    def _leave_checkpoint(self, fault: LearningFault) -> None:
        """Set aside the checkpoints since the fault began, and say how to go on from the one before."""
        left, since = set_aside(self.path / "checkpoints", fault.evidence.since), fault.evidence.since
        self.state.upload()  # which removes the copies of these
        go_on = f"from the checkpoint after step {left}:  distflow resume {quoted(self.path)} --set …" if left else \
            f"it has no checkpoint from before step {since} (checkpoint.every): start it again, changed"
        self._say(f"{self.plan.name}: ended by detector `{fault.detector}`: {fault.sentence}.\n"
                  f"Change:  {fault.evidence.remedy}\nGo on {go_on}")

    def _report(self) -> str:
        """Write the report in a process of its own. Return a line of how to see it; empty if there is none."""
        child = spawn([sys.executable, "-P", "-m", "distflow.cli", "report", str(self.path)], stdout=subprocess.DEVNULL,
                      stderr=subprocess.DEVNULL, env=python_environment())
        if child.poll(_REPORT_TIMEOUT) is None:
            child.end()
        return "" if child.wait() else f"Open {self.path / 'report.html'}"

    def _say(self, text: str) -> None:
        if self.progress:
            self.progress.say(text)

    def _report_missing_prompts(self, step: int, values: dict[str, float]) -> None:
        batch = self.run.data.batch
        for task in self.plan.tasks:
            if short := values.get(f"filter/{task.node}/prompts_short"):
                self._say(f"{self.plan.name}  step {step}: node `{task.node}` left {batch - short:.0f} of "
                                  f"{batch} prompts in {task.draws} draws; the step went on with them")

    def _is_due(self, done: int) -> bool:
        settings = self.run.validation
        return settings is not None and (done == self.run.steps or done % settings.every == 0)

    def _candidate(self, step: int) -> Path:
        """Return where the models of a step are until it is known whether they are the best so far."""
        return self.path / (f"candidates/step-{step}" if self.requests else "best.partial")

    def _validate(self, step: int) -> None:
        """Validate the weights after a step; rollouts only begin with it. Collective."""
        if self.validator:
            self._note(self.validator.run(step))
        elif self.requests and step not in self.requests.known:
            if self.run.validation and self.run.validation.best:
                write_models(self.trained, self._candidate(step))
            self.requests.ask(step)

    def _note_validations(self, wait: float = 0.0) -> None:
        """Note what rollouts have answered. Collective."""
        for outcome in self.requests.results(wait) if self.requests else ():
            self._note(outcome)

    def _note(self, outcome: ValidationResult) -> None:
        """Note a validation, and whether it ends the run: no better for `patience` times."""
        settings = self.run.validation
        assert settings is not None
        if outcome.missing:
            self._report_missing(outcome)
            return
        self.validated |= outcome.values
        self._write_validation(outcome)
        mean = outcome.values.get(f"validation/{next(iter(settings.data))}", -math.inf)
        better = mean > self.best
        self.best, self.worse = (mean, 0) if better else (self.best, self.worse + 1)
        if settings.best:
            self._keep_best(outcome, better)
        if settings.patience and self.worse >= settings.patience:
            self._end_early(outcome, mean, f"no better mean than {self.best:.3f} in {self.worse} validations")

    def _end_early(self, outcome: ValidationResult, mean: float, why: str) -> None:
        """End the run on all ranks alike. The event tells it to a worker that starts again before the end."""
        if self.folder and not self.over:
            events.record(_ENDED_EARLY, of_step=outcome.step, mean=mean, limits=self._limits, why=why)
            self._say(f"{self.plan.name}  step {outcome.step}: {why}")
        self.over = self.over or why

    def _write_validation(self, outcome: ValidationResult) -> None:
        step, values = outcome.step, outcome.values
        if not self.folder:
            return
        self.folder.write_answers(step, outcome.answers)
        self.folder.write_metrics(step, values)
        for name, value in values.items():
            kind, _, which = name.partition("/")
            if kind not in ("validation_low", "validation_high"):
                low, high = (values.get(f"{kind}_{end}/{which}", math.nan) for end in ("low", "high"))
                within = "" if math.isnan(low) else f"{low:.3f} to {high:.3f}, "
                self._say(f"{self.plan.name}  step {step}/{self.run.steps}  {name} {value:.3f}  "
                          f"({within}{outcome.seconds:.1f} s)")

    def _report_missing(self, outcome: ValidationResult) -> None:
        if self.folder:
            events.record(MISSING, of_step=outcome.step, why=outcome.missing)
            self._say(f"{self.plan.name}  step {outcome.step}: no result of its validation: {outcome.missing}")
            shutil.rmtree(self._candidate(outcome.step), ignore_errors=True)

    def _keep_best(self, outcome: ValidationResult, better: bool) -> None:
        """Put the models that were validated in place of those that were the best so far, if they are better."""
        candidate = self._candidate(outcome.step)
        if better and not self.requests:
            write_models(self.trained, candidate)
        if not self.folder:
            return
        if better and not (lag := outcome.values.get(LAG)):
            replace_folder(self.path / "best", candidate)
        elif better:
            self._say(f"{self.plan.name}  step {outcome.step}: the best so far, but `best/` stays as it is: weights up "
                      f"to {lag:g} updates newer have answered, and were not kept")
        shutil.rmtree(candidate, ignore_errors=True)


def _measures_otherwise(event: Mapping[str, Any]) -> bool:
    """Return whether an event has changed what validations measure."""
    if event.get("event") == "data_changed":
        return event["data"].startswith(HELD_OUT)
    changed = event["settings"] if event.get("event") == "settings_changed" else ()
    return any(name.startswith("validation.") and name.split(".")[1] not in _LOOKS for name in changed)


def _note_memory() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        current().maximum("memory/gpu_allocated_gib", torch.cuda.max_memory_allocated() / 2**30)
        current().maximum("memory/gpu_reserved_gib", torch.cuda.max_memory_reserved() / 2**30)
        torch.cuda.reset_peak_memory_stats()


def _all_samples(buffer: Databuffer, own: Iterable[str]) -> list[dict[str, Any]]:
    """Return all rows of this rank, of responses only the lengths and the mean advantages; with several nodes that
    sample side by side, each row says its `node`."""
    found, rows = buffer.all_rows((*_SHOWN, *_WHOLE, *own)), []
    tokens = {"responses", "advantages", *own}
    for node, columns in found.items():
        values = {name: to_list(column) for name, column in columns.items() if name not in tokens or is_text(column)}
        if isinstance(responses := columns.get("responses"), Ragged):
            values["length"] = responses.lengths.tolist()
        if isinstance(each := columns.get("advantages"), Ragged):
            sums = torch.zeros(len(each)).index_add(0, each.row_of, each.values.float())
            each = sums / each.lengths.clamp(min=1)
        if each is not None:
            values["advantage"] = each.tolist()
        if REWARD_PARTS in values:
            values[REWARD_PARTS] = [json.loads(text) for text in values[REWARD_PARTS]]
        said = {"node": node} if len(found) > 1 else {}
        rows += [said | dict(zip(values, row)) for row in zip(*values.values())]
    return rows


def _samples(buffer: Databuffer, count: int, own: Iterable[str],
             tokenizer: PreTrainedTokenizerBase | None) -> list[dict[str, Any]]:
    """Return some rows of the step; `own`: the user's columns of the dataset, as where a record comes from."""
    columns = buffer.sample_rows(_SHOWN, count, (*_BESIDE, *own))
    names = [name for name in (ROW, "group", *_SHOWN, *_BESIDE[2:]) if name in columns]
    rows = [_as_sample(dict(zip(names, values)), tokenizer) for values in zip(*(columns[name] for name in names))]
    for name in (name for name in own if name in columns):
        for row, value in zip(rows, columns[name]):
            if isinstance(value, str):  # of tokens the text is in `completions`
                row.setdefault(name, value[:_LONGEST])
    return rows


def _as_sample(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    if "responses" in row:
        tokens = row.pop("responses")
        row["length"] = len(tokens)
        sampled, trainer, reference = (row.pop(name, None) for name in _LOGPROBS)
        if tokenizer and sampled is not None:
            row["tokens"] = _tokens(tokens, sampled, trainer, reference, row.get("advantages"), tokenizer)
    if REWARD_PARTS in row:
        row[REWARD_PARTS] = json.loads(row[REWARD_PARTS])
    if "advantages" in row:
        each = row.pop("advantages")
        row["advantage"] = (sum(each) / len(each) if each else 0.0) if isinstance(each, list) else each
    return row


def _tokens(ids: list[int], sampled: list[float], trainer: list[float] | None, reference: list[float] | None,
            advantages: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    """Return the first tokens of a response, and for each what the report colours it by. The arguments between are
    log-probabilities: when it was sampled, of the trainer's old policy and of the reference."""
    found = {"texts": tokenizer.batch_decode([[token] for token in ids[:_TOKENS]]), "sampled": sampled}
    if trainer:
        found["trainer - sampled"] = [new - old for new, old in zip(trainer, sampled)]
    if reference:
        found["sampled - reference"] = [own - other for own, other in zip(sampled, reference)]
    if isinstance(advantages, list):
        found["advantage"] = advantages
    return {name: [round(value, 3) if isinstance(value, float) else value for value in values[:_TOKENS]]
            for name, values in found.items()}


def write_models(trained: Mapping[str, RoleEngines], folder: Path) -> None:
    """Write each trained role as a Hugging Face folder: `model`, or `model-ROLE` if the DAG has several. Collective."""
    for name, role in trained.items():
        role.save_pretrained(folder / (f"model-{name}" if role.has_others else "model"))
    if any(role.writer for role in trained.values()):
        barrier()  # rank 0 goes on with a folder that another rank has written
