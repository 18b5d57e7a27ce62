"""Requests of the trainer that rollouts validate its weights, while training goes on.

A request: asked → leased by one rollout, which alone answers it (`RolloutContext`) → answered → noted. If its holder
ends, another one leases it. The weights are those of the step that has asked or, where they have been passed by, newer
ones: then the result is that of the newer step. Weights never change within a validation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import torch.distributed as dist

from distflow.config.spec import Spec
from distflow.data.crossing import reports_of
from distflow.data.exchange import gather, gather_values
from distflow.dock import TimedOut
from distflow.dock.consumers import ANSWERED, RESULT
from distflow.dock.index import Lease
from distflow.plan import Plan
from distflow.telemetry import events
from distflow.telemetry.run_reader import Row, RunReader, is_validation
from planners.check import prompted_role
from workers.engines.role_engines import RoleEngines
from workers.rollout_channel import RolloutChannel, SampleTimeout
from workers.validation import MISSING, ValidationResult

_ASKED, _VOID = "validation_asked", "validation_void"
_ENDED_BY = {"validated": "asked_after", MISSING: "of_step", _VOID: "of_step"}
"""Events after which a request is no longer open, and where each has the step that has asked."""
_LOST = "the run was interrupted before it was answered, and its weights are no longer there"


def validated_elsewhere(spec: Spec, plan: Plan) -> str | None:
    """Return the role that the rollouts of the run's `plan` validate; None: the trainer does, or nothing is."""
    if not plan.groups or not spec.run.rollouts_validate:
        return None
    name = prompted_role(spec, plan.tasks)
    return name if any(task.samples and task.role == name for task in plan.groups[1].plan.tasks) else None


class ValidationRequests:
    """Validations that the trainer asks for; collective, and only rank 0 talks to the dock. A trainer that restarts
    goes on waiting for those of the steps that it has done. `open`: some are still to come; `known`: steps that need
    not be asked for any more; `lost`: those that an earlier worker has asked for, and nobody answers."""

    def __init__(self, channel: RolloutChannel, role: RoleEngines, reader: RunReader, limit: float,
                 resumed_at: int | None):
        """`limit`: seconds without a result, or a rollout that works on one, after which a request is given up."""
        self.channel, self.role, self.limit = channel, role, limit
        self.steps: dict[int, int] = {}  # first step with each version of the weights, from the oldest request on
        self.asked: dict[int, tuple[int, int]] = {}  # on rank 0: step and version of each request
        self.answers: dict[int, tuple[Lease, ValidationResult]] = {}
        self.dock = None
        known, lost = list[int](), list[int]()
        if dist.get_rank() == 0:
            self.dock = channel.dock("trainer 0, which validates")
            self.timeout = SampleTimeout(channel, self.dock, limit)
            if resumed_at is not None:
                known, lost = self._take_over(reader, resumed_at)
        known, lost, self.open = gather_values([known, lost, bool(self.asked or lost)])[0]
        self.known, self.lost = set(known), set(lost)

    def ask(self, step: int) -> None:
        """Have the weights validated as they are after `step` steps."""
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
        """Yield the results that have come since the last call; wait so long for one. The next settles the last."""
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
                self.answers[number] = lease, ValidationResult(**json.loads(content[0]))
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
        of_step = step if answer.version == version else self.steps.get(answer.version)
        events.record("validated", of_step=of_step, asked_after=step, version=answer.version, who=answer.who)
        if of_step is None or (of_step != step and of_step in self.known):
            what = "of which step is not known since the trainer has restarted" if of_step is None else \
                f"those of step {of_step}, which has a validation of its own"
            why = f"{answer.who} has answered it with version {answer.version} of the weights, {what}"
            return ValidationResult(step, step, missing=why)
        self.known.add(of_step)
        return replace(answer, step=of_step)

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
