"""Leases and commits, with a clock that the tests move."""

import numpy
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distflow.dock import Consumer, DockError, LeaseLost
from distflow.dock.index import ConsumerIndex
from distflow.dock.selection import StorageBudget

UPDATE = Consumer("update", ("tokens", "rewards"), seconds=10.0)


def table(ids, **meta):
    columns = [meta.get(name, 0) for name in ("tokens", "version", "turn")]
    return numpy.array([[row, *columns] for row in ids], numpy.int64).reshape(-1, 4).T


def index_of(ready=range(4), consumer=UPDATE):
    made = ConsumerIndex(consumer)
    made.add_rows(table(ready), ["tokens", "rewards"])
    return made


def ids(granted):
    return sorted(granted.ids.tolist())



def ready(made):
    """Return the ids of the rows that may be leased, or could if their group were whole."""
    slots = made.rows.all()
    found = made.rows["ids"][slots[made.rows["ready"][slots] > 0]]
    assert len(found) == len(made.ready)
    return sorted(found.tolist())


def test_a_lease_that_is_not_renewed_goes_back():
    made = index_of()
    first = made.lease(4, 0.0, "a")
    assert made.lease(4, 9.9, "b") is None
    assert ids(made.lease(4, 10.0, "b")) == [0, 1, 2, 3]
    with pytest.raises(LeaseLost, match="given to another lease"):
        made.commit(first.number, None, first.ids, 10.5)
    with pytest.raises(LeaseLost):
        made.renew(first.number, 10.5, "a")
    assert not len(made.done)


def test_a_late_holder_whose_rows_nobody_took_may_go_on():
    made = index_of()
    first = made.lease(4, 0.0, "a")
    assert made.expire(20.0) == 4
    made.renew(first.number, 21.0, "a")
    assert made.lease(4, 22.0, "b") is None
    made.expire(99.0)
    assert made.commit(first.number, None, first.ids, 99.0)
    assert made.lease(4, 99.0, "b") is None


def test_one_row_given_to_another_spoils_the_whole_commit():
    made = index_of()
    first = made.lease(4, 0.0, "a")
    other = made.lease(1, 50.0, "b")
    with pytest.raises(LeaseLost, match=r"Its rows \[0\]"):
        made.commit(first.number, None, first.ids, 51.0)
    assert made.commit(other.number, None, other.ids, 51.0)
    with pytest.raises(LeaseLost, match="committed by another"):
        made.commit(first.number, None, first.ids, 52.0)
    assert made.done.ranges == [(0, 1)]


def test_a_commit_may_be_repeated():
    made = index_of()
    first = made.lease(2, 0.0, "a", step=7)
    assert made.commit(first.number, 7, first.ids, 1.0)
    assert not made.commit(first.number, 7, first.ids, 1.0)
    assert not made.commit(first.number, 7, first.ids, 999.0)
    with pytest.raises(DockError, match="step 7 of `update` is committed already"):
        made.lease(2, 1.0, "a", step=7)


def test_a_step_is_committed_once_whoever_comes():
    made = index_of()
    first = made.lease(2, 0.0, "a", step=0)
    made.end_session("a", 1.0)
    made.rebuild([(["tokens"], numpy.array([0]))], lambda rows: rows == 0)  # so that the second draw has other rows
    second = made.lease(2, 2.0, "b", step=0)
    assert ids(second) == [1, 2]
    assert made.commit(second.number, 0, second.ids, 3.0)
    with pytest.raises(LeaseLost, match="step 0 is committed with other rows"):
        made.commit(first.number, 0, first.ids, 3.0)


def test_the_ranks_of_a_group_share_one_draw():
    made = index_of(range(8))
    shares = [made.lease(6, float(rank), f"rank {rank}", step=3, share=rank, shares=2)
              for rank in range(2)]
    assert shares[0] is shares[1]
    assert ids(shares[0]) == [0, 1, 2, 3, 4, 5]
    assert [len(share) for share in shares[0].shares] == [3, 3]
    made.end_session("rank 0", 2.0)
    assert made.lease(6, 3.0, "rank 0 again", step=3, share=0, shares=2) is shares[0]
    assert ids(made.lease(6, 3.0, "other", step=4)) == [6, 7]
    with pytest.raises(DockError, match="leased in 2 shares"):
        made.lease(6, 3.0, "rank 2", step=3, share=2, shares=4)


@pytest.mark.parametrize("order", [[4, 1, 3, 0, 2], [3, 2, 1, 0, 4]])
def test_the_same_groups_are_dealt_alike_in_whatever_order_they_came(order):
    def dealt(groups):
        made = ConsumerIndex(Consumer("update", ("tokens", "rewards"), group_size=2, step_rows=10))
        for group in groups:
            made.add_rows(table([2 * group + 1, 2 * group], tokens=3 + group), ["tokens", "rewards"])
        granted = made.lease(10, 0.0, "a", step=0, shares=2)
        slots = made.rows.find(granted.ids)
        assert made.rows["birth"][slots].tolist() == granted.births.tolist()
        return [share.tolist() for share in granted.shares]

    assert dealt(order) == dealt(range(5))


def test_the_same_request_gets_the_same_lease():
    """Its answer was lost on the way."""
    made = index_of()
    assert made.lease(2, 0.0, "a", request=5) is made.lease(2, 0.0, "a", request=5)
    assert len(made.ready) == 2


def test_results_that_were_lost_with_a_shard_are_made_again():
    """Shard 1 of 2 comes back from a snapshot that has row 1 without its rewards, and knows nothing of row 3."""
    update, reward = index_of(range(6)), ConsumerIndex(Consumer("reward", ("tokens",), ("rewards",)))
    reward.add_rows(table(range(6)), ["tokens"])
    scored = reward.lease(6, 0.0, "a")
    reward.commit(scored.number, None, scored.ids, 0.0)
    listed = [(["tokens"], numpy.array([1])), (["tokens", "rewards"], numpy.array([5]))]
    update.rebuild(listed, lambda rows: rows % 2 == 1)
    assert ready(update) == [0, 2, 4, 5]
    reward.rebuild(listed, lambda rows: rows % 2 == 1)
    reward.add_rows(table([1]), ["tokens"])
    reward.add_rows(table([5]), ["tokens", "rewards"])
    assert ids(reward.lease(6, 1.0, "b")) == [1], "its reward is made again"


def test_a_lease_over_rows_that_were_lost_and_came_again_is_not_revived():
    """It holds what was; if it dies after all, the new rows would stay leased."""
    made = index_of(range(2))
    first = made.lease(2, 0.0, "a")
    made.expire(10.0)
    made.rebuild([], lambda rows: rows >= 0)
    made.add_rows(table(range(2)), ["tokens", "rewards"])
    with pytest.raises(LeaseLost):
        made.renew(first.number, 11.0, "a")
    made.expire(99.0)
    assert ids(made.lease(2, 99.0, "b")) == [0, 1]


def restored(lost, *parts):
    """Return an index that takes the place of a lost one, by what shards with these rows list."""
    made, marks = ConsumerIndex(lost.consumer, epoch=2), lost.marks()
    for rows in parts:
        made.add_rows(table(rows), ["tokens", "rewards"])
        made.restore(marks[:, numpy.isin(marks[0], rows)], 1.0)
    return made


@pytest.mark.parametrize("rows", [4, 257, 5000])
def test_a_restored_index_has_the_leases_of_the_lost_one(rows):
    lost = index_of(range(rows))
    lease = lost.lease(rows - 1, 0.0, "a")
    made = restored(lost, range(rows // 2), range(rows // 2, rows))
    assert ready(made) == [rows - 1]
    assert made.renew(lease.number, 9.0, "a") == UPDATE.seconds
    assert made.lease(2, 18.0, "b", least=2) is None
    assert made.commit(lease.number, None, lease.ids, 18.5)
    assert made.lease(2, 99.0, "b").ids.tolist() == [rows - 1]


def test_ranks_that_ask_a_restored_index_again_get_the_same_shares():
    lost = index_of(range(8))
    before = [each.tolist() for each in lost.lease(8, 0.0, "a", step=3, shares=2).shares]
    made = restored(lost, range(4), range(4, 8))
    assert [each.tolist() for each in made.lease(8, 2.0, "b", step=3, share=1, shares=2).shares] == before


def test_a_restored_lease_is_committed_without_the_rows_that_a_shard_has_lost():
    lost = index_of()
    lease = lost.lease(4, 0.0, "a", step=0)
    made = restored(lost, [0, 2])
    with pytest.raises(DockError, match=r"commits other rows than it holds: \[2\]"):
        made.commit(lease.number, 0, numpy.array([0, 1, 3]), 2.0)
    assert made.commit(lease.number, 0, lease.ids, 2.0)
    made.add_rows(table([1, 3]), ["tokens", "rewards"])  # put again
    assert ready(made) == []


def test_a_restored_index_rolls_back_what_the_lost_one_had_committed():
    consumer = Consumer("update", ("tokens", "rewards"), step_rows=4, can_roll_back=True)
    lost = index_of(range(8), consumer)
    for step in range(2):
        lease = lost.lease(4, 0.0, "a", step=step)
        assert lost.commit(lease.number, step, lease.ids, 0.0)
    made = restored(lost, range(0, 8, 2), range(1, 8, 2))
    assert ready(made) == []
    with pytest.raises(DockError, match="step 1 of `update` is committed already"):
        made.lease(4, 1.0, "b", step=1)
    assert not made.commit(lease.number, 1, lease.ids, 1.0), "the commit is known"
    assert made.rollback(1) == 4
    assert made.lease(4, 2.0, "b", step=1).ids.tolist() == [4, 5, 6, 7]
    assert restored(made, range(8)).rollback(0) == 4, "what was rolled back is not committed any more"


def test_a_commit_that_one_of_two_shards_has_is_a_commit_of_all_its_rows():
    lost = index_of(consumer=Consumer("update", ("tokens", "rewards"), can_roll_back=True))
    lease = lost.lease(4, 0.0, "a", step=0)
    leased = lost.marks()
    assert lost.commit(lease.number, 0, lease.ids, 0.0)
    for order in ([0, 1], [1, 0]):
        made = ConsumerIndex(lost.consumer, epoch=2)
        for part, marks in [((0, 1), lost.marks()), ((2, 3), leased)][:: 1 - 2 * order[0]]:
            made.add_rows(table(part), ["tokens", "rewards"])
            made.restore(marks[:, numpy.isin(marks[0], part)], 1.0)
        assert ready(made) == []
        assert made.rollback(0) == 4


def test_a_commit_names_the_rows_that_its_lease_holds():
    made = index_of()
    first = made.lease(2, 0.0, "a", step=3)
    for step, rows, wrong in ((3, [0, 1, 2], r"commits other rows than it holds: \[2\]"), (3, [0], ".*1"),
                              (4, [0, 1], "is of step 3, not 4"), (None, [0, 1], "is of step 3, not None")):
        with pytest.raises(DockError, match=f"lease {first.number} of `update` {wrong}.* Nothing is committed"):
            made.commit(first.number, step, numpy.array(rows), 0.1)
    with pytest.raises(LeaseLost):
        made.commit(first.number + 1, None, first.ids, 0.1)  # which nobody was given
    assert not len(made.done)


def test_where_there_is_no_room_only_rows_that_others_wait_for_are_begun():
    room = StorageBudget(limit=100)
    made = ConsumerIndex(Consumer("rollout", ("order",), ("tokens",), 2, 4, row_bytes=30), room=room)
    made.add_rows(table(range(12)), ["order"])
    first = [made.lease(2, 0.0, "a") for _ in range(2)]
    assert [ids(each) for each in first] == [[0, 1], [2, 3]], "four rows may take 120 bytes, but are of step 0"
    assert made.lease(2, 0.0, "a") is None
    assert made.lacks_room()
    room.record(0, 70, 4)
    for lease in first:
        made.commit(lease.number, None, lease.ids, 1.0)
    assert made.lease(2, 1.0, "a") is None, "70 bytes are stored, 18 are expected of a row"
    made.required = 1
    assert ids(made.lease(2, 2.0, "a")) == [4, 5]
    made.end_session("a", 3.0)
    assert ids(made.lease(2, 3.0, "b")) == [4, 5], "whoever has them, they can be had"


def test_a_consumer_that_only_reads_needs_no_room():
    made = ConsumerIndex(Consumer("update", ("tokens", "rewards"), step_rows=2), room=StorageBudget(limit=0))
    made.add_rows(table(range(4)), ["tokens", "rewards"])
    assert ids(made.lease(2, 0.0, "a", step=1)) == [2, 3]


@pytest.mark.parametrize("share", [-1, 2])
def test_a_share_that_does_not_exist_draws_nothing(share):
    made = index_of()
    with pytest.raises(DockError, match=f"share {share} of 2"):
        made.lease(4, 0.0, "a", step=0, share=share, shares=2)
    assert len(made.ready) == 4


class Interleaving(RuleBasedStateMachine):
    """Producers, consumers and time in any order: nothing is trained twice, and nothing is lost."""

    def __init__(self):
        super().__init__()
        self.now, self.next, self.known, self.held = 0.0, 0, 0, []
        self.trained: dict[int, int] = {}

    @initialize()
    def begin(self):
        self.made = ConsumerIndex(UPDATE)

    @rule(count=st.integers(1, 5))
    def put(self, count):
        new = range(self.next, self.next + count)
        self.made.add_rows(table(new), ["tokens"])
        self.made.add_rows(table(new), ["rewards"])
        self.next += count

    @rule(count=st.integers(1, 6), stepped=st.booleans(), who=st.sampled_from("abc"))
    def lease(self, count, stepped, who):
        step = len(self.trained) if stepped else None
        if step is not None and step in self.made.steps:
            return
        granted = self.made.lease(count, self.now, who, step=step)
        if granted:
            self.held.append((granted.number, step, ids(granted), who))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data):
        number, step, rows, _ = data.draw(st.sampled_from(self.held))
        try:
            new = self.made.commit(number, step, numpy.array(rows), self.now)
        except LeaseLost:
            return
        if new:
            for row in rows:
                assert row not in self.trained, f"row {row} was trained twice"
                self.trained[row] = number
        else:
            assert all(self.trained[row] == number for row in rows)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data):
        number, _, rows, who = data.draw(st.sampled_from(self.held))
        try:
            self.made.renew(number, self.now, who)
        except LeaseLost:
            return
        assert not set(rows) & set(self.trained)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(who=st.sampled_from("abc"))
    def die(self, who):
        self.made.end_session(who, self.now)

    @invariant()
    def nothing_is_lost(self):
        held = {row for granted in self.made.leases.values() for row in granted.ids.tolist()}
        assert set(self.trained) == {row for row in range(self.next) if row in self.made.done}
        assert set(self.trained) | held | set(ready(self.made)) == set(range(self.next))
        assert not held & set(ready(self.made))
        assert not (held | set(ready(self.made))) & set(self.trained)

    def teardown(self):
        """In the end, everything can still be had."""
        last = self.made.lease(10**6, self.now + 1000, "last")
        rest = set(ids(last)) if last else set()
        assert rest | set(self.trained) == set(range(self.next))


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=60, stateful_step_count=30)
