"""Validations that rollouts answer while training goes on, as the trainer asks for them and collects the answers.

A part of a validation is a prompt of the dock: asked → leased by one rollout (`RolloutContext`) → answered → collected.
If its holder ends, another one leases it. A result is that of the step that has asked, in the order of the steps; where
some of its weights were newer, it says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch.distributed as dist

from distflow.config.spec import Spec
from distflow.data.crossing import reports_of
from distflow.data.exchange import gather_values
from distflow.dock.consumers import ANSWERED, RESULT
from distflow.dock.index import Lease
from distflow.plan import Plan
from distflow.telemetry import events
from distflow.telemetry.run_reader import Row, RunReader, is_validation
from planners.check import prompted_role
from workers.engines.role_engines import RoleEngines
from workers.rollout_channel import RolloutChannel, SampleTimeout, ValidationRequest
from workers.validation import LAG, MISSING, ValidationResult, result_of

_ASKED, _VALIDATED = "validation_asked", "validated"
_LOST = "the run was interrupted before it was answered, and its weights are no longer there"


def validated_elsewhere(spec: Spec, plan: Plan) -> str | None:
    """Return the role that the rollouts of the run's `plan` validate; None: the trainer does, or nothing is."""
    if not plan.groups or not spec.run.rollouts_validate:
        return None
    name = prompted_role(spec, plan.tasks)
    return name if any(task.samples and task.role == name for task in plan.groups[1].plan.tasks) else None


class ValidationRequests:
    """Validations that rollouts answer; collective, and only rank 0 talks to the dock. A trainer that restarts goes on
    waiting for those of the steps that it has done. `known`: steps that need not be asked for any more; `lost`: those
    that an earlier job has asked for, and nobody answers; `open`: some are still to come."""

    def __init__(self, channel: RolloutChannel, role: RoleEngines, parts: int, shown: int, reader: RunReader,
                 limit: float, resumed_at: int | None):
        """`parts`: of a validation. `shown`: answers of each set that a result has. `limit`: seconds without an answer,
        or a rollout that works on one, after which a validation is given up."""
        self.channel, self.role, self.parts, self.shown, self.limit = channel, role, parts, shown, limit
        self.asked: dict[int, ValidationRequest] = {}  # on rank 0, by number
        self.answers: dict[int, dict[int, tuple[Lease, bytes]]] = {}  # parts that have come, by number
        self.dock = None
        known, lost = list[int](), list[int]()
        if dist.get_rank() == 0:
            self.dock = channel.dock("trainer 0, which validates")
            self.timeout = SampleTimeout(channel, self.dock, limit)
            if resumed_at is not None:
                known, lost = self._take_over(reader, resumed_at)
        known, lost, self.open = gather_values([known, lost, bool(self.asked or lost)])[0]
        self.known, self.lost = set[int](known), set[int](lost)

    def ask(self, step: int) -> None:
        """Have the weights validated as they are after `step` steps."""
        self.known.add(step)
        self.lost.discard(step)
        self.open = True
        if self.dock is not None:
            if not self.asked:
                self.timeout.renew()
            events.record(_ASKED, of_step=step, version=self.role.version)
            request = ValidationRequest(step, self.role.version, self.parts)
            self.asked[self.channel.enqueue_validation(self.dock, request)] = request

    def results(self, wait: float = 0.0) -> Iterator[ValidationResult]:
        """Yield the results that have come since the last call; wait so long for one. The next settles the last."""
        if not self.open:
            return
        found = [asdict(each) for each in self._collect(wait)]
        found, self.open = gather_values([found, len(self.asked) > len(found)])[0]
        for step in sorted(self.lost):
            yield ValidationResult(step, missing=_LOST)
        self.lost = set()
        for each in found:
            yield ValidationResult(**each)
            self._settle(each["step"])

    def close(self) -> None:
        if self.dock is not None:
            self.dock.close()

    def _take_over(self, reader: RunReader, resumed_at: int) -> tuple[list[int], list[int]]:
        """Go on with what an earlier attempt has asked for. Return the steps up to here that have a result or a
        request, and those whose request is lost."""
        assert self.dock is not None
        known = {int(line["step"]) for line in reader.steps() if is_validation(line) and line["step"] <= resumed_at}
        for number, request in self.channel.validations().items():
            if request.step > resumed_at or request.step in known:  # it is done again, and asks again if it is due
                self.channel.forget_validation(number)
            else:
                self.asked[number] = request
                self.channel.put_validation(self.dock, number, request)  # its shard may have been lost
                known.add(request.step)
        return sorted(known), sorted(step for step in unanswered(reader.rows("events")) - known if step <= resumed_at)

    def _collect(self, wait: float) -> Iterator[ValidationResult]:
        """Yield what is answered, or will not be, up to the first that is neither."""
        if self.dock is None:
            return
        while lease := self.dock.try_lease(ANSWERED, self.channel.rows, wait=wait):
            wait = 0.0
            number, part = self.channel.part_of(lease)
            if number in self.asked:
                self.answers.setdefault(number, {})[part] = lease, reports_of(self.dock.fetch(lease), RESULT)[0]
                self.timeout.renew()
            else:
                self.dock.commit(lease)  # of an earlier attempt, or given up
        late = self.timeout.is_over()
        for number, request in sorted(self.asked.items()):
            reports = [report for _, report in self.answers.get(number, {}).values()]
            if len(reports) == request.parts:
                result = result_of(request.step, reports, self.shown)
                events.record(_VALIDATED, of_step=request.step, lag=result.values.get(LAG, 0.0))
                yield result
            elif late:
                lacking = self.dock.timeout_error(ANSWERED, self.channel.rows)
                yield ValidationResult(request.step, missing=f"no rollout works on it, or has for {self.limit:g} s "
                                       f"(`wait_limit` of the run file): {lacking}")
            else:
                return

    def _settle(self, step: int) -> None:
        for number in [number for number, request in self.asked.items() if request.step == step]:
            del self.asked[number]
            self.channel.forget_validation(number)
            for lease, _ in self.answers.pop(number, {}).values():
                assert self.dock is not None
                self.dock.commit(lease)


def unanswered(rows: Iterable[Row]) -> set[int]:
    """Return the steps that have asked for a validation that has not come to an end, as the events of a run say."""
    found: set[int] = set()
    for event in rows:
        if event.get("event") == _ASKED:
            found.add(event.get("of_step", 0))
        elif event.get("event") in (_VALIDATED, MISSING):
            found.discard(event.get("of_step", 0))
    return found
