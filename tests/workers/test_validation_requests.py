"""Validations that rollouts answer, through a real dock and a real store: who answers, what is noted and missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from stores import hosted

from distflow.data.batch import Batch
from distflow.data.crossing import POLICIES, REPORT, report_column
from distflow.data.exchange import pack
from distflow.dock import StorageShardServer, TimedOut
from distflow.dock.consumers import RESULT, VALIDATION, consumers_of
from distflow.errors import EngineError
from distflow.plan import ROLLOUT, TRAINER
from distflow.telemetry.events import Events
from distflow.telemetry.metrics import Metrics
from distflow.telemetry.run_reader import RunReader
from workers.engines.shared_engine import SharedEngine
from workers.rollout import RolloutContext
from workers.rollout_channel import VALIDATING, RolloutChannel, ValidationRequest
from workers.validation import LAG, MISSING
from workers.validation_requests import ValidationRequests, unanswered

ROWS, PROMPTS, TOKEN, EVERY = 2, 2, bytes(32), 2


@pytest.fixture
def channel():
    with closing(StorageShardServer(TOKEN)) as service:
        channel = RolloutChannel(hosted(), TOKEN, [service.start()], "127.0.0.1", ROWS, PROMPTS, 2)
        with channel.dock("trainer 0") as dock:
            dock.configure(consumers_of(("generate/responses",), ROWS, ROWS * PROMPTS, 100))
        yield channel


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The events of a run whose folder this is."""
    made = Events()
    made.open(tmp_path / "events.jsonl", 0)
    monkeypatch.setattr("distflow.telemetry.events._current", made)
    return made


@pytest.fixture
def requests(channel, alone, tmp_path):
    """`requests(resumed_at, limit, parts)`: those of a trainer whose weights are of version 10 times its steps."""
    opened = []

    def make(resumed_at: int | None = None, limit: float = 600.0, parts: int = 1) -> ValidationRequests:
        role = SimpleNamespace(version=10 * (resumed_at or 0))
        opened.append(ValidationRequests(channel, role, parts, 4, RunReader(tmp_path), limit, resumed_at))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def report_of(value: float, lag: int, seconds: float = 1.0) -> bytes:
    """What a part says of one problem that has earned `value`."""
    metrics = Metrics()
    metrics.mean("validation/held", value)
    metrics.add("squares/held", value * value)
    metrics.add("problems/held", 1)
    metrics.maximum(LAG, lag)
    metrics.maximum("seconds", seconds)
    return pack([metrics.take(), {}])


class Rollout:
    """The part of a rollout's loop that validates, with a real engine that nothing drives."""

    def __init__(self, channel: RolloutChannel, version: int, pool: ThreadPoolExecutor):
        self.dock = channel.dock("rollout 1")
        self.engine = SharedEngine(SimpleNamespace(generation=None, end_tokens=(), version=version))
        self.may_sample = threading.Event()
        self.jobs: list[Future] = []
        self.loop = loop = object.__new__(RolloutContext)
        loop.channel, loop.engines, loop.validated, loop.who = channel, {"actor": self.engine}, "actor", "rollout 1"
        loop.leases, loop.awaited, loop.part, loop.poll, loop.pool = {}, {}, None, 0.2, pool
        loop.doing, loop.activity, loop._notice = "sampling", "", self.jobs.append
        loop.validators = lambda parts, part: SimpleNamespace(
            sample=self._sample, report=lambda version, asked: report_of(0.5, version - asked))

    def pull(self, version: int) -> None:
        self.engine.rollout.version = version
        self.engine._announce_version()

    def turn(self) -> None:
        """Do what the loop does between two prompts."""
        self.loop._renew_leases(self.dock)
        self.loop._validate(self.dock)

    def turn_until(self, done: Callable[[], object]) -> None:
        until = time.monotonic() + 60.0
        while not done():
            assert time.monotonic() < until, "nothing has ended the wait"
            self.turn()

    def _sample(self):
        assert self.may_sample.wait(60.0)
        assert self.engine.holds_weights
        return self.engine.version


@pytest.fixture
def rollout(channel):
    """`rollout(version)`: one that has this version of the weights."""
    opened = []
    with ThreadPoolExecutor(1) as pool:
        yield lambda version: opened.append(Rollout(channel, version, pool)) or opened[-1]
        for each in opened:
            each.may_sample.set()
            each.engine._fail(EngineError("the test is over"))
    for each in opened:
        each.dock.close()


def noted(requests: ValidationRequests) -> list[tuple[int, float, float]]:
    """The steps that have come, each with its mean and its lag."""
    return [(each.step, each.values["validation/held"], each.values.get(LAG, 0)) for each in requests.results()]


def after(requests: ValidationRequests, step: int) -> list[tuple[int, float, float]]:
    """What is noted after a step; validation is due after each second one."""
    requests.role.version = 10 * step
    if step % EVERY == 0 and step not in requests.known:
        requests.ask(step)
    return noted(requests)


def request_status(channel: RolloutChannel) -> dict[str, int]:
    """Return what the dock says of parts of validations."""
    with channel.dock("all") as dock:
        return dock.status()[0]["indexes"][VALIDATION]


def answer(channel: RolloutChannel, version: int, value: float, who: str = "rollout 1"):
    """Lease the oldest part as a rollout does, and answer it with these weights."""
    with channel.dock(who) as dock:
        lease = dock.lease(VALIDATION, ROWS, wait=10.0)
        asked = int(lease.versions[0])
        dock.put(Batch(lease.ids, {RESULT: report_column([report_of(value, version - asked)], ROWS)}))
        dock.commit(lease)
        return asked


def test_results_are_noted_in_order_with_the_lag_of_the_weights_that_answered(channel, requests):
    mine = requests()
    assert after(mine, 0) == after(mine, 1) == after(mine, 2) == []
    with channel.dock("rollout 1") as slow:
        first = slow.lease(VALIDATION, ROWS)
        assert answer(channel, 20, 0.5) == 20
        assert after(mine, 3) == [], "an earlier one has not been answered"
        assert len(first) == ROWS
    assert answer(channel, 10, 0.25, "rollout 2") == 0, "whose holder ended without an answer"
    assert after(mine, 4) == [(0, 0.25, 10), (2, 0.5, 0)]
    assert mine.open
    assert answer(channel, 40, 1.0) == 40
    assert after(mine, 5) == [(4, 1.0, 0)]
    assert not noted(mine)
    assert not mine.open
    assert channel.validations() == {}


def test_parts_are_answered_by_several_rollouts_and_make_one_result(channel, requests):
    mine = requests(parts=3)
    mine.role.version = 20
    mine.ask(2)
    assert answer(channel, 20, 0.0, "rollout 1") == answer(channel, 20, 0.5, "rollout 2") == 20
    assert noted(mine) == [], "one part is missing"
    again = requests(resumed_at=2, parts=2)  # of a run with fewer rollouts now
    mine.close()
    assert answer(channel, 25, 1.0, "rollout 2") == 20
    found: list[tuple[int, float, float]] = []
    until = time.monotonic() + 60.0
    while not (found := found + noted(again)):
        assert time.monotonic() < until, "the parts that the trainer held before it ended come again"
    assert found == [(2, 0.5, 5)]


def test_training_rows_leave_the_dock_though_nobody_validates_them(channel):
    with channel.dock("all") as dock:
        channel.enqueue_validation(dock, ValidationRequest(0, 0, 1))
        channel.enqueue_prompts(dock, torch.arange(PROMPTS))
        for _ in range(PROMPTS):
            lease = dock.lease("rollout", ROWS)
            columns = {name: torch.zeros(ROWS) for name in ("generate/responses", REPORT, POLICIES)}
            dock.put(Batch(lease.ids, columns))
            dock.commit(lease)
        dock.commit(dock.lease("trainer", ROWS * PROMPTS, step=0))
        assert dock.status()[0]["rows"] == 2 * ROWS * PROMPTS // 2 + ROWS, "a trainer may roll back"
        dock.release_before("trainer", 1)
        status, = dock.status()
        assert status["rows"] == ROWS, "only the request is left"
        assert status["indexes"][VALIDATION]["ready"] == ROWS


def test_only_what_nobody_works_on_is_missing_and_it_is_said_what_became_of_it(channel, requests):
    mine = requests(limit=0.1)
    mine.ask(0)
    with channel.dock("rollout 7") as holder:
        holder.report_activity(VALIDATING)
        holder.lease(VALIDATION, ROWS)
        begun = time.monotonic()
        while time.monotonic() < begun + 0.3:
            assert not list(mine.results()), "its holder works on it, three times as long as `wait_limit`"
    until = time.monotonic() + 60.0
    while not (outcomes := list(mine.results())):
        assert mine.open
        assert time.monotonic() < until, "nobody works on it any more"
    outcome, = outcomes
    assert outcome.missing.startswith("no rollout works on it, or has for 0.1 s (`wait_limit` of the run file)")
    assert "are ready, and no process has leased them" in outcome.missing
    assert not mine.open


def test_a_rollout_that_waits_for_its_weights_does_not_validate_yet(requests, rollout):
    """Only what it does then may take as long as it likes."""
    mine, holder, limit = requests(limit=0.4), rollout(version=10), 0.4
    mine.role.version = 20
    mine.ask(2)
    holder.turn(), holder.turn()
    assert not holder.engine.holds_weights
    holder.pull(20)
    holder.turn_until(lambda: holder.loop.activity == VALIDATING)
    begun = time.monotonic()
    while time.monotonic() < begun + 3 * limit:
        holder.turn()
        assert not list(mine.results()), "it works on it, three times as long as `wait_limit`"
    holder.may_sample.set()
    holder.turn_until(lambda: holder.jobs)
    assert noted(mine) == [(2, 0.5, 0)]
    assert not holder.engine.holds_weights


def test_a_wait_for_weights_that_never_come_ends_and_names_who_waits_for_them(channel, requests, rollout):
    mine, holder = requests(limit=0.4), rollout(version=10)
    mine.role.version = 20
    mine.ask(2)
    holder.turn(), holder.turn()
    channel.enqueue_prompts(mine.dock, torch.arange(PROMPTS))
    holder.dock.lease(ROLLOUT, ROWS)
    with pytest.raises(TimedOut, match="are leased by rollout 1 .* was waiting for version 20 of the weights"):
        mine.dock.lease(TRAINER, ROWS * PROMPTS, step=0)
    outcomes = []
    holder.turn_until(lambda: outcomes.extend(mine.results()) or outcomes)
    assert outcomes[0].missing.startswith("no rollout works on it, or has for 0.4 s (`wait_limit` of the run file)")
    assert "are leased by rollout 1 (" in outcomes[0].missing
    assert "was waiting for version 20 of the weights of `actor`" in outcomes[0].missing
    assert not list(mine.results())
    holder.turn_until(lambda: holder.jobs)
    assert holder.jobs[0].exception() is None
    assert (holder.engine.held_from, holder.loop.leases) == (None, {})
    index = request_status(channel)
    assert (index["leases"], index["committed"]) == (0, ROWS), "nobody validates what has been given up"


def test_a_rollout_gives_up_a_request_that_a_restarted_trainer_does_not_want_any_more(channel, requests, rollout):
    """The weights of the step that has asked were lost with the trainer. It ends with the step before."""
    before, holder = requests(), rollout(version=40)
    before.role.version = 50
    before.ask(5)
    holder.turn(), holder.turn()
    assert "version 50" in holder.loop.activity
    again = requests(resumed_at=4)
    again.ask(4)
    holder.may_sample.set()
    found = []
    holder.turn_until(lambda: found.extend(noted(again)) or found)
    assert found == [(4, 0.5, 0)]


def test_a_trainer_that_restarts_goes_on_waiting_for_the_steps_that_it_has_done(channel, requests, rollout, tmp_path):
    before = requests()
    for step in (0, 2, 4):
        after(before, step)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation/held": 0.1}\n{"step": 2, "loss": 1.0}\n')
    again = requests(resumed_at=3)
    assert sorted(again.known) == [0, 2]
    assert [answer(channel, version, 0.5) for version in (0, 20)] == [0, 20]
    assert after(again, 3) == [(2, 0.5, 0)], "that of step 0 is recorded"
    assert not again.open, "step 4 is done again, and asked for then"
    assert request_status(channel)["ready"] == ROWS, "the request that was made for it before is still there"
    holder = rollout(version=40)
    holder.turn_until(lambda: holder.jobs)
    assert not holder.may_sample.is_set(), "and nobody answers it"
    assert request_status(channel)["committed"] == 3 * ROWS


def test_what_an_interrupted_run_has_not_answered_is_lost_but_for_its_last_step(requests, channel, tmp_path, events):
    """Only what it has asked for, however often that was: steps of which nobody has wanted to know are not lost."""
    before = requests()
    for step in (0, 2, 4, 6, 8):
        after(before, step)
    assert [answer(channel, version, 0.5) for version in (0, 20)] == [0, 20]
    assert [step for step, *_ in after(before, 9)] == [0, 2]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "validation/held": 0.5}}\n' for step in (0, 2)))
    for number in channel.validations():
        channel.forget_validation(number)  # with the store of a job that has ended
    mine = requests(resumed_at=6)
    assert mine.known == {0, 2}
    assert mine.lost == {4, 6}, "step 8 is to be done again"
    mine.ask(6)
    outcome, = mine.results()
    assert (outcome.step, mine.open) == (4, True)
    assert "its weights are no longer there" in outcome.missing
    events.record(MISSING, of_step=4, why=outcome.missing)
    assert unanswered(RunReader(tmp_path).rows("events")) == {6, 8}


def test_a_run_that_has_not_asked_has_lost_nothing(requests, tmp_path):
    """As one that is resumed with its first `validation`, or with another `every`."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "validation/held": 0.1}\n{"step": 8, "loss": 1.0}\n')
    mine = requests(resumed_at=8)
    assert (mine.known, mine.open) == ({5}, False)
    assert not list(mine.results())
