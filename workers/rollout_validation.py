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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from distflow.config.spec import Spec
from distflow.data.batch import Batch
from distflow.data.crossing import report_column, reports_of
from distflow.data.exchange import gather
from distflow.dock import DockClient, LeaseLost, TimedOut
from distflow.dock.consumers import ANSWERED, RESULT, VALIDATION
from distflow.dock.index import Lease
from distflow.errors import EngineError
from distflow.plan import Layout, Plan
from distflow.store.interface import poll_interval
from distflow.telemetry import events
from distflow.telemetry.metrics import Metrics, recording
from distflow.telemetry.run_reader import Row, RunReader, is_validation
from planners.check import prompted_role
from workers.engines.role_engines import RoleEngines
from workers.engines.rollout import Samples
from workers.engines.shared_engine import SharedEngine
from workers.rollout_channel import VALIDATING, RolloutChannel, SampleTimeout
from workers.validation import MISSING, ValidationResult, Validations, Validator

_ASKED, _VOID = "validation_asked", "validation_void"
_ENDED_BY = {"validated": "asked_after", MISSING: "of_step", _VOID: "of_step"}
"""Events after which a request is no longer open, and where each has the step that has asked."""
_POLL_INTERVAL = 0.5  # seconds between two looks whether a request is still open for whose weights a rollout waits
_LOST = "the run was interrupted before it was answered, and its weights are no longer there"


def validated_elsewhere(spec: Spec, plan: Plan) -> str | None:
    """Return the role that the rollouts of the run's `plan` validate; None: the trainer does, or nothing is."""
    if not plan.groups or not spec.run.rollouts_validate:
        return None
    name = prompted_role(spec, plan.tasks)
    return name if any(task.samples and task.role == name for task in plan.groups[1].plan.tasks) else None


class ValidationRequests(Validations):
    """Validations that the trainer asks for; only rank 0 talks to the dock. A trainer that restarts goes on waiting for
    those of the steps that it has done."""

    late = True

    def __init__(self, channel: RolloutChannel, role: RoleEngines, reader: RunReader, limit: float,
                 resumed_at: int | None):
        """`limit`: seconds without a result, or a rollout that works on one, after which a request is given up."""
        self.channel, self.role, self.limit = channel, role, limit
        self.steps: dict[int, int] = {}  # first step with each version of the weights, from the oldest request on
        self.asked: dict[int, tuple[int, int]] = {}  # on rank 0: step and version of each request
        self.answers: dict[int, tuple[Lease, dict[str, Any]]] = {}
        self.dock = None
        known, lost = list[int](), list[int]()
        if dist.get_rank() == 0:
            self.dock = channel.dock("trainer 0, which validates")
            self.timeout = SampleTimeout(channel, self.dock, limit)
            if resumed_at is not None:
                known, lost = self._take_over(reader, resumed_at)
        state = json.loads(gather(json.dumps([known, lost, bool(self.asked or lost)]).encode())[0])
        self.known, self.lost, self.open = set[int](state[0]), set[int](state[1]), bool(state[2])

    def ask(self, step: int) -> None:
        self.known.add(step)
        self.lost.discard(step)
        self.open = True
        if self.dock is not None:
            if not self.asked:
                self.timeout.renew()
            version = self.role.version
            events.record(_ASKED, of_step=step, version=version)
            self.asked[self.channel.enqueue_validation(self.dock, step, version)] = step, version

    def results(self, step: int, wait: float = 0.0) -> Iterator[ValidationResult]:
        self.steps = self.steps if self.open else {}
        self.steps.setdefault(self.role.version, step)
        if not self.open:
            return
        lost = [ValidationResult(each, each, missing=_LOST) for each in sorted(self.lost)]
        self.lost = set()
        found = [*map(self._outcome, self._done(wait))] if self.dock is not None else []
        plain = json.dumps([[asdict(each) for each in lost + found], len(self.asked) > len(found)]).encode()
        outcomes, self.open = json.loads(gather(plain)[0])
        for each in outcomes:
            self.known.add(each["step"])
            yield ValidationResult(**each)
            self._settle(each["asked"])

    def close(self) -> None:
        if self.dock is not None:
            self.dock.close()

    def _take_over(self, reader: RunReader, resumed_at: int) -> tuple[list[int], list[int]]:
        """Go on with what an earlier attempt has asked for. Return the steps up to here that have a result or a
        request, and those whose request is lost."""
        assert self.dock is not None
        recorded = [int(line["step"]) for line in reader.steps() if is_validation(line)]
        for number, (step, version) in self.channel.validations().items():
            if step <= resumed_at and step not in recorded:
                self.asked[number] = step, version
                self.channel.put_validation(self.dock, number, version)  # its shard may have been lost
            else:
                self.channel.forget_validation(number)
        known = sorted({step for step in recorded if step <= resumed_at} | {step for step, _ in self.asked.values()})
        lost = unanswered(reader.rows("events")) - {*known}
        for step in (step for step in lost if step > resumed_at):
            events.record(_VOID, of_step=step)  # it is done again, and asks again if it is still due
        return known, [step for step in lost if step <= resumed_at]

    def _done(self, wait: float) -> Iterator[int]:
        """Yield the requests that are answered, or will not be, up to the first that is neither."""
        assert self.dock is not None
        while lease := self.dock.try_lease(ANSWERED, self.channel.rows, wait=wait):
            wait = 0.0
            number, content = self.channel.validation_of(lease), reports_of(self.dock.fetch(lease), RESULT)
            if number in self.asked:
                self.answers[number] = lease, json.loads(content[0])
                self.timeout.renew()
            else:
                self.dock.commit(lease)  # of an earlier attempt, or given up
        late = self.timeout.is_over()
        for number in sorted(self.asked):
            if number not in self.answers and not late:
                return
            yield number

    def _outcome(self, number: int) -> ValidationResult:
        step, version = self.asked[number]
        if number not in self.answers:
            return ValidationResult(step, step, missing=self._describe_progress())
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

    def _describe_progress(self) -> str:
        assert self.dock is not None
        try:
            self.dock.lease(ANSWERED, self.channel.rows)
        except TimedOut as error:
            return f"no rollout works on it, or has for {self.limit:g} s (`wait_limit` of the run file): {error}"
        return f"it has come {self.limit:g} s (`wait_limit` of the run file) after a rollout had last worked on it"

    def _settle(self, step: int) -> None:
        for number in [number for number, (asked, _) in self.asked.items() if asked == step]:
            del self.asked[number]
            self.channel.forget_validation(number)
            if self.dock is not None and (answer := self.answers.pop(number, None)):
                self.dock.commit(answer[0])


def unanswered(rows: Iterable[Row]) -> set[int]:
    """Return the steps that have asked for a validation that has not come to an end, as the events of a run say."""
    found: set[int] = set()
    for event in rows:
        if event.get("event") == _ASKED:
            found.add(event.get("of_step", 0))
        elif name := _ENDED_BY.get(event.get("event", "")):
            found.discard(event.get(name, 0))
    return found


class RolloutValidation:
    """Answers validation requests on a rank that samples, one at a time, beside the prompts that it samples."""

    def __init__(self, spec: Spec, role: RoleEngines, channel: RolloutChannel, who: str):
        self.spec, self.role, self.channel, self.who = spec, role, channel, who
        self.activity = ""  # with the request that is under way; empty: none is

    @property
    def engine(self) -> SharedEngine:
        assert isinstance(self.role.shared_engine, SharedEngine)
        return self.role.shared_engine

    @functools.cached_property
    def validator(self) -> Validator:
        return Validator(self.spec, self.role, Layout(1), alone=True)

    def lease(self, dock: DockClient) -> Lease | None:
        """Return a request if there is one and none is under way. The weights that it is owed stay from now on."""
        lease = None if self.activity else dock.try_lease(VALIDATION, self.channel.rows)
        if lease is None:
            return None
        if self.channel.validation_of(lease) not in self.channel.validations():
            dock.commit(lease)  # the trainer restarts from a step before it
            return None
        version = int(lease.versions[0])
        self.activity = (f"waiting for version {version} of the weights of `{self.role.name}`, to validate them (why: "
                         "`weights_late` in events.jsonl)")
        self.engine.hold(version)
        return lease

    @property
    def holds_weights(self) -> bool:
        held_from = self.engine.held_from
        return held_from is not None and self.engine.version >= held_from

    def is_outdated(self) -> bool:
        """Return whether prompts may be owed newer weights than those that the engine has."""
        return self.channel.newest_versions().get(self.role.name, 0) > self.engine.version

    def answer(self, lease: Lease) -> None:
        """Answer a request, and put the result into the dock; or give it up, if nobody wants it any more."""
        engine, start = self.engine, time.perf_counter()
        with recording(Metrics()), self.channel.dock(f"{self.who}, which validates") as dock:
            try:
                validator = self.validator
                samples = validator.sample() if self._has_weights(lease) else None
            finally:
                engine.hold(None)
            if samples is not None:
                self._put_result(dock, lease, samples, start)
            with contextlib.suppress(LeaseLost):  # of two results the dock keeps the first
                dock.commit(lease)
        self.activity = ""

    def _has_weights(self, lease: Lease) -> bool:
        """Wait for the weights of a request. Return whether they have come: a trainer that has died may have been the
        only one that had them, and the one that restarts asks for others."""
        look = poll_interval(_POLL_INTERVAL, self.channel.ranks)
        while not self.engine.wait(int(lease.versions[0]), look):
            if self.channel.validation_of(lease) not in self.channel.validations():
                return False
        self.activity = VALIDATING
        return True

    def _put_result(self, dock: DockClient, lease: Lease, samples: dict[str, Samples], start: float) -> None:
        values = self.validator.score(samples)
        result = {"version": _version_of([*samples.values()], self.engine.version), "values": values, "who": self.who,
                  "answers": self.validator.answers, "seconds": time.perf_counter() - start}
        dock.put(Batch(lease.ids, {RESULT: report_column([json.dumps(result).encode()], self.channel.rows)}))


def _version_of(samples: Sequence[Samples], newest: int) -> int:
    """Return the version of the weights that have sampled all tokens."""
    tokens = torch.cat([each.versions.values for each in samples if isinstance(each.versions.values, torch.Tensor)])
    versions = torch.unique(tokens).tolist() or [newest]
    if len(versions) > 1:
        raise EngineError(f"versions {versions} of the weights have answered one validation, so that it is of none of "
                          "them. Its engine has taken new weights though it was to keep the old ones")
    return versions[0]
