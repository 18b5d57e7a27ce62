"""Validation by the ranks that sample for others, while training goes on.

    ValidationRequests   on the trainer: enqueues a request after a step, and has the results in the order of requests
    RolloutValidation    on a rank that samples: answers a request with weights that stay the same until it is done

    A request: asked → leased by one rollout, which alone answers it → answered → noted. If its holder ends, another one
    leases it. The weights are those of the step that has asked or, where they have been passed by, newer ones: then the
    result is that of the newer step. Weights never change within a validation.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.load import Spec
from distflow.data.batch import Batch
from distflow.data.exchange import gather
from distflow.dock import DockClient, LeaseLost, TimedOut
from distflow.dock.index import Lease
from distflow.errors import EngineError
from distflow.plan import Layout, Plan
from distflow.telemetry import events
from distflow.telemetry.metrics import Metrics, recording
from distflow.telemetry.run_reader import RunReader, is_validation
from workers.encode import prompted_role
from workers.engines.rollout import Samples
from workers.engines.shared_engine import SharedEngine
from workers.roles import RoleEngines
from workers.rollout_channel import ANSWERED, RESULT, VALIDATION, RolloutChannel, report_column, reports_of
from workers.validation import ValidationResult, Validations, Validator

_LOST = "the run was interrupted before it was answered, and its weights are no longer there"


def validated_elsewhere(spec: Spec, plan: Plan) -> str | None:
    """Return the role that the rollouts of the run's `plan` validate; None: the trainer does, or nothing is."""
    if not plan.groups or spec.run.validation is None or spec.run.trainer_validates:
        return None
    name = prompted_role(spec, plan.tasks)
    return name if any(task.samples and task.role == name for task in plan.groups[1].plan.tasks) else None


class ValidationRequests(Validations):
    """Validations that the trainer asks for; only rank 0 talks to the dock. A trainer that restarts goes on waiting for
    those of the steps that it has done."""

    late = True

    def __init__(self, channel: RolloutChannel, role: RoleEngines, reader: RunReader, every: int, limit: float,
                 resumed_at: int | None):
        """`limit`: seconds without any result after which a request is given up."""
        self.channel, self.role, self.limit = channel, role, limit
        self.steps: dict[int, int] = {}  # first step with each version of the weights, from the oldest request on
        self.asked: dict[int, tuple[int, int]] = {}  # on rank 0: step and version of each request
        self.answers: dict[int, tuple[Lease, dict[str, Any]]] = {}
        self.lost: list[int] = []
        self.dock, self.heard = None, time.monotonic()
        known: list[int] = []
        if dist.get_rank() == 0:
            self.dock = channel.dock("trainer 0, which validates")
            known = self._take_over(reader, every, resumed_at or 0)
        state = json.loads(gather(json.dumps([known, bool(self.asked or self.lost)]).encode())[0])
        self.known, self.open = set[int](state[0]), bool(state[1])

    def ask(self, step: int) -> None:
        self.known.add(step)
        self.open = True
        if self.dock is not None:
            self.heard = self.heard if self.asked else time.monotonic()
            version = self.role.version
            self.asked[self.channel.enqueue_validation(self.dock, step, version)] = step, version

    def results(self, step: int, wait: float = 0.0) -> Iterator[ValidationResult]:
        self.steps = self.steps if self.open else {}
        self.steps.setdefault(self.role.version, step)
        if not self.open:
            return
        found = [*map(self._outcome, self._done(wait))] if self.dock is not None else []
        found = [ValidationResult(lost, lost, missing=_LOST) for lost in self.lost] + found
        left = len(self.lost) + len(self.asked) - len(found)
        self.lost = []
        plain = json.dumps([[asdict(each) for each in found], left > 0]).encode()
        outcomes, self.open = json.loads(gather(plain)[0])
        for each in outcomes:
            self.known.add(each["step"])
            yield ValidationResult(**each)
            self._settle(each["asked"])

    def close(self) -> None:
        if self.dock is not None:
            self.dock.close()

    def _take_over(self, reader: RunReader, every: int, resumed_at: int) -> list[int]:
        """Go on with what an earlier attempt has asked for; return the steps up to here that have a result or request.
        The step that the trainer goes on from is not lost: its weights are there."""
        assert self.dock is not None
        recorded = [int(line["step"]) for line in reader.steps() if is_validation(line)]
        for number, (step, version) in self.channel.validations().items():
            if step <= resumed_at and step not in recorded:
                self.asked[number] = step, version
                self.channel.put_validation(self.dock, number, version)  # its shard may have been lost
            else:
                self.channel.forget_validation(number)
        known = sorted({step for step in recorded if step <= resumed_at} | {step for step, _ in self.asked.values()})
        newest = max(recorded, default=-1)
        self.lost = [step for step in range(0, resumed_at, every) if newest < step and step not in known]
        return known

    def _done(self, wait: float) -> Iterator[int]:
        """Yield the requests that are answered, or will not be, up to the first that is neither."""
        assert self.dock is not None
        while lease := self.dock.try_lease(ANSWERED, self.channel.rows, wait=wait):
            wait = 0.0
            number, content = self.channel.validation_of(lease), reports_of(self.dock.fetch(lease), RESULT)
            if number in self.asked:
                self.answers[number], self.heard = (lease, json.loads(content[0])), time.monotonic()
            else:
                self.dock.commit(lease)  # of an earlier attempt, or given up
        late = time.monotonic() - self.heard > self.limit
        for number in sorted(self.asked):
            if number not in self.answers and not late:
                return
            yield number

    def _outcome(self, number: int) -> ValidationResult:
        step, version = self.asked[number]
        if number not in self.answers:
            return ValidationResult(step, step, missing=self._whereabouts())
        answer = self.answers[number][1]
        of_step = step if answer["version"] == version else self.steps.get(answer["version"])
        events.record("validated", of_step=of_step, asked_after=step, version=answer["version"], who=answer["who"])
        if of_step is None or (of_step != step and of_step in self.known):
            what = "of which step is not known since the trainer has restarted" if of_step is None else \
                f"those of step {of_step}, which has a validation of its own"
            why = f"{answer['who']} has answered it with version {answer['version']} of the weights, {what}"
            return ValidationResult(step, step, missing=why)
        self.known.add(of_step)
        return ValidationResult(of_step, step, answer["values"], answer["answers"], answer["seconds"])

    def _whereabouts(self) -> str:
        assert self.dock is not None
        try:
            self.dock.lease(ANSWERED, self.channel.rows)
        except TimedOut as error:
            return f"no rollout has answered within {self.limit:g} s (`wait_limit` of the run file): {error}"
        return f"it has come later than {self.limit:g} s (`wait_limit` of the run file)"

    def _settle(self, step: int) -> None:
        for number in [number for number, (asked, _) in self.asked.items() if asked == step]:
            del self.asked[number]
            self.channel.forget_validation(number)
            if self.dock is not None and (answer := self.answers.pop(number, None)):
                self.dock.commit(answer[0])


class RolloutValidation:
    """Answers validation requests on a rank that samples, one at a time, beside the prompts that it samples."""

    def __init__(self, spec: Spec, role: RoleEngines, channel: RolloutChannel, who: str):
        self.spec, self.role, self.channel, self.who = spec, role, channel, who
        self.under_way = False

    @property
    def engine(self) -> SharedEngine:
        assert isinstance(self.role.shared_engine, SharedEngine)
        return self.role.shared_engine

    @functools.cached_property
    def validator(self) -> Validator:
        return Validator(self.spec, self.role, Layout(1), alone=True)

    def lease(self, dock: DockClient) -> Lease | None:
        """Return a request if there is one and none is under way. The weights that it is owed stay from now on."""
        lease = None if self.under_way else dock.try_lease(VALIDATION, self.channel.rows)
        if lease is None:
            return None
        if self.channel.validation_of(lease) not in self.channel.validations():
            dock.commit(lease)  # the trainer restarts from a step before it
            return None
        self.under_way = True
        self.engine.hold(int(lease.versions[0]))
        return lease

    @property
    def holds_weights(self) -> bool:
        return self.engine.held_from is not None

    def is_passed_by(self) -> bool:
        """Return whether prompts may be owed newer weights than those that the engine has."""
        return self.channel.newest_versions().get(self.role.name, 0) > self.engine.version

    def answer(self, lease: Lease) -> None:
        """Answer a request, and put the result into the dock."""
        engine, start = self.engine, time.perf_counter()
        with recording(Metrics()), self.channel.dock(f"{self.who}, which validates") as dock:
            try:
                validator = self.validator
                engine.wait(int(lease.versions[0]))
                samples = validator.sample()
            finally:
                engine.hold(None)
            values = validator.score(samples)
            result = {"version": _version_of([*samples.values()], engine.version), "values": values, "who": self.who,
                      "answers": validator.answers, "seconds": time.perf_counter() - start}
            dock.put(Batch(lease.ids, {RESULT: report_column([json.dumps(result).encode()], self.channel.rows)}))
            with contextlib.suppress(LeaseLost):  # of two results the dock keeps the first
                dock.commit(lease)
        self.under_way = False


def _version_of(samples: Sequence[Samples], newest: int) -> int:
    """Return the version of the weights that have sampled all tokens."""
    tokens = torch.cat([each.versions.values for each in samples if isinstance(each.versions.values, torch.Tensor)])
    versions = torch.unique(tokens).tolist() or [newest]
    if len(versions) > 1:
        raise EngineError(f"versions {versions} of the weights have answered one validation, so that it is of none of "
                          "them. Its engine has taken new weights though it was to keep the old ones")
    return versions[0]
