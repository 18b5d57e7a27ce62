"""Validation: answers to held-out problems, and their rewards.

The problems are divided into parts. A rank that trains answers its own part; where others sample, each part is a prompt
of the dock with an id of its own range, which one of them leases. A part's report goes to the trainer, which makes one
result of all. Weights never change within a part; a result says if they were newer than those that it was asked for.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.run import Validation
from distflow.config.spec import Spec
from distflow.contracts.rewards import validation_fields
from distflow.data.batch import Ragged
from distflow.data.checks import validated_fields
from distflow.data.dataset import open_records
from distflow.data.exchange import gather, pack, unpack
from distflow.data.problems import answer_text, asked_and_answered, mended_record, question_text
from distflow.plan import CUT_THOUGHTS, FINISHED, Layout, Plan
from distflow.telemetry.accuracy import interval_of_mean
from distflow.telemetry.metrics import Metrics
from workers.encode import data_file, encode_prompts, image_encoder_of
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import Samples
from workers.engines.sampling import TokenLimits
from workers.functions.rewards import as_list, report_failures
from workers.functions.rollout import cut_thoughts
from workers.isolation.scoring import Scorer

MISSING = "validation_missing"  # event of a validation without a result
LAG = "validation_lag"  # metric: updates by which newer weights have answered
_RIGHT = 1.0  # reward of an answer that counts as right in pass@k


@dataclass(frozen=True)
class _Share:
    """One rank's part of a validation set."""

    rows: list[int]  # index of each record in the set
    prompts: Ragged
    images: Ragged | None
    columns: dict[str, list[str]]  # fields of the records that rewards may read
    cut: int  # prompts that lost their beginning


@dataclass(frozen=True)
class ValidationResult:
    """Result of the validation after a `step`: metrics, and some of the answers of each set, or why it is `missing`."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    missing: str = ""


class Validator:
    """One part of a run's validation sets. Its questions are encoded once. The randomness of an answer depends on the
    seed and on its row alone."""

    def __init__(self, spec: Spec, role: RoleEngines, layout: Layout, part: int | None = None,
                 scorer: Scorer | None = None):
        """`layout`: of the engine that samples; ranks that split a model answer the same questions. `part`: which of
        its parts this one is; None: that of this rank."""
        settings = spec.run.validation
        assert settings is not None, "a run without validation has no validator"
        self.role, self.settings = role, settings
        self.scorer = scorer or Scorer(settings.reward)
        self.leads = part is not None or layout.leads(dist.get_rank())
        self.shown = spec.run.shown_samples
        part = layout.share(dist.get_rank()) if part is None else part
        self.shares = {name: _share(spec, role, data_file(spec, path), layout, part)
                       for name, path in settings.data.items()}

    @classmethod
    def of(cls, spec: Spec, plan: Plan, name: str, roles: Mapping[str, RoleEngines]) -> Validator:
        """Return the validator of the role `name`, whose ranks answer as many questions as they sample prompts."""
        layout = plan.layout_of(name, samples=True)
        ours = [task.layout for task in plan.tasks if task.samples and task.role == name and not task.arrives]
        others = [] if layout.rows else [plan.source]  # ranks without a model answer nothing
        rows = next((each.rows for each in [*ours, *others] if each.dp == layout.dp), layout.rows)
        return cls(spec, roles[name], replace(layout, rows=rows))

    @classmethod
    def of_parts(cls, spec: Spec, role: RoleEngines) -> Callable[[int, int], Validator]:
        """Return what gives the validator of one of so many parts. All have one pool of rewards, beside other threads.
        """
        assert spec.run.validation is not None, "a run without validation has no validator"
        scorer = functools.cache(partial(Scorer, spec.run.validation.reward, own_pool=True))
        return functools.cache(lambda parts, part: cls(spec, role, Layout(parts), part, scorer()))

    def run(self, step: int) -> ValidationResult:
        """Validate the weights as they are after `step` steps. Collective over the ranks that train."""
        return result_of(step, gather(self.report(self.sample())), self.shown)

    def sample(self) -> dict[str, Samples]:
        """Return the answers to this part of each set. Collective over the ranks that split a model."""
        self.began = time.perf_counter()
        role, settings = self.role.of_draw(0), self.settings
        found = {}
        for name, share in self.shares.items():
            ids = torch.tensor(share.rows, dtype=torch.int64).repeat_interleave(settings.samples) * settings.samples
            ids += torch.arange(settings.samples).repeat(len(share.rows))
            found[name] = role.generate(share.prompts, ids, settings.samples, None,
                                        settings.temperature, share.images, _limits(settings, role))
        return found

    def report(self, samples: Mapping[str, Samples], version: int | None = None) -> bytes:
        """Return the metrics of this part's answers, and the first of these, for `result_of`. `version`: of the weights
        that were asked for, where newer ones may have answered."""
        metrics, answers = Metrics(), {}
        for name, share in self.shares.items() if self.leads else ():
            answers[name] = self._score(name, share, samples[name], metrics)
            metrics.add(f"data/prompts_cut/{name}", share.cut)
            versions = samples[name].versions.values
            if version is not None and isinstance(versions, torch.Tensor) and len(versions):
                metrics.maximum(LAG, versions.max() - version)
        metrics.maximum("seconds", time.perf_counter() - self.began)
        return pack([metrics.take(), answers])

    def _score(self, name: str, share: _Share, samples: Samples, metrics: Metrics) -> list[dict[str, Any]]:
        """Report the rewards of a set's answers, a mean for each problem that has any. Return the first answers."""
        count = self.settings.samples
        rows = [row for row in share.rows for _ in range(count)]
        columns = {key: [text for text in texts for _ in range(count)] for key, texts in share.columns.items()}
        own = {"completions": self.role.decode(samples.tokens), "responses": as_list(samples.tokens)}
        # a field of the data called so goes before it: the node that samples gives its column another name then
        cut = cut_thoughts(self.role, share.prompts, own["completions"], samples.finished)
        scores = self.scorer.score({FINISHED: as_list(samples.finished), CUT_THOUGHTS: as_list(cut), **columns, **own},
                                   rows)
        report_failures(scores, rows)
        problems = [[reward for reward, kept in zip(scores.rewards[at : at + count], scores.keep[at : at + count])
                     if kept] for at in range(0, len(rows), count)]
        means = [sum(rewards) / len(rewards) for rewards in problems if rewards]
        metrics.mean(f"validation/{name}", sum(means), len(means))
        if count > 1:
            metrics.mean(f"validation_pass/{name}", sum(max(rewards) >= _RIGHT for rewards in problems if rewards),
                         len(means))
        metrics.add(f"squares/{name}", sum(mean * mean for mean in means))
        metrics.add(f"problems/{name}", len(means))
        metrics.add(f"reward/failed/{name}", scores.keep.count(False))
        return [{"row": row, "questions": question, "answers": answer, "completions": text, "rewards": reward}
                for row, question, answer, text, reward in itertools.islice(zip(
                    rows, columns["questions"], columns["answers"], own["completions"], scores.rewards), None,
                    min(self.shown * count, len(rows)), count)]


def result_of(step: int, reports: Iterable[bytes], shown: int) -> ValidationResult:
    """Return the result of all parts: the mean reward of each set as `validation/NAME`, and its confidence interval;
    `validation_pass/NAME` where each problem has several answers; `data/prompts_cut/NAME` where prompts were cut,
    `reward/failed/NAME` where rewards have failed, which count in no mean, and `LAG` where newer weights answered."""
    parts = [*map(unpack, reports)]
    values = Metrics().collect(lambda _: [metrics for metrics, _ in parts])
    seconds, found = values.pop("seconds"), dict[str, float]()
    for name in [name.partition("/")[2] for name in values if name.startswith("problems/")]:
        problems, squares = (values.pop(f"{kind}/{name}") for kind in ("problems", "squares"))
        if (mean := values.pop(f"validation/{name}", None)) is not None:
            found[f"validation/{name}"] = mean
            bounds = interval_of_mean(mean, squares / problems, int(problems))
            found |= {f"validation_{end}/{name}": bound for end, bound in zip(("low", "high"), bounds)}
    found |= {name: value for name, value in values.items() if value}
    answers: dict[str, list[dict[str, Any]]] = {}
    for name, rows in (item for _, answered in parts for item in answered.items()):
        answers[name] = sorted([*answers.get(name, ()), *rows], key=lambda row: row["row"])[:shown]
    return ValidationResult(step, found, answers, seconds)


def _limits(settings: Validation, role: RoleEngines) -> TokenLimits | None:
    """Return which tokens answers are drawn from; None: those of the role."""
    if settings.top_p is None:
        return None
    generation = role.settings.generation
    return TokenLimits(generation.top_k, settings.top_p, generation.min_p)


def _share(spec: Spec, role: RoleEngines, path: Path, layout: Layout, part: int | None) -> _Share:
    records = open_records(path, spec.run.data)
    rows: Sequence[int] = ()
    if part is not None:
        rows = layout.cut(len(records), part) if layout.rows else range(part, len(records), layout.dp)
    wanted = validated_fields(spec)
    found = {row: record for row, record in zip(rows, records.get(rows)) if not wanted.empty(record)}
    encoder = image_encoder_of(role, spec.run.data, path)
    usable = {row: record for row, record in zip(found, map(mended_record, found.values()))
              if not (encoder and encoder.too_long(role.tokenizer, spec.run.data, record))}
    mine, left_out = list(usable.values()), len(found) - len(usable)
    prompts, images, cut = encode_prompts(role.tokenizer, spec.run.data, mine, encoder)
    pairs = [asked_and_answered(record, spec.run.data) for record in mine]
    columns = {"answers": [answer_text(answer) for _, answer in pairs],
               "questions": [question_text(asked) for asked, _ in pairs],
               **{name: [answer_text(record.get(name, "")) for record in mine] for name in validation_fields(spec)}}
    return _Share(list(usable), prompts, images, columns, cut + left_out)
