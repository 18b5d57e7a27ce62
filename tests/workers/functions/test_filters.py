"""Which rows filters keep, in any order of rows and groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reported import reported

from distflow.telemetry.metrics import current
from workers.engines.sampling import key_of, uniform
from workers.functions.filters import drop_truncated, informative_groups, rank_filter

ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=16)
"""(group, reward) of each row."""


def columns(rows):
    group, rewards = zip(*rows)
    return torch.tensor(rewards), torch.tensor(group)


@given(rows=ROWS)
def test_a_group_stays_if_its_rewards_differ(rows):
    keep = informative_groups(*columns(rows)).tolist()
    assert keep == [len({reward for other, reward in rows if other == group}) > 1 for group, _ in rows]



def test_answers_that_were_cut_off_are_dropped():
    current().take()
    assert drop_truncated(torch.tensor([True, False, True])).tolist() == [True, False, True]
    assert reported()["filter/kept"] == pytest.approx(2 / 3)

@given(rows=ROWS, best=st.integers(1, 3), others=st.integers(0, 2), kind=st.sampled_from(["worst", "random"]),
       order=st.randoms(use_true_random=False))
def test_best_and_others_of_each_group(rows, best, others, kind, order):
    torch.manual_seed(3)
    rewards, group = columns(rows)
    ids = torch.arange(len(rows)) * 7
    keep = rank_filter(rewards, group, ids, best=best, others=others, kind=kind)
    for prompt in set(group.tolist()):
        mine = group == prompt
        kept, left = rewards[mine & keep].tolist(), rewards[mine & ~keep].tolist()
        size = int(mine.sum())
        assert len(kept) == min(size, best + others)
        ranked = sorted(rewards[mine].tolist(), reverse=True)
        assert sorted(kept, reverse=True)[:best] == ranked[:best]
        if kind == "worst":
            assert sorted(kept + left) == sorted(ranked)
            assert sorted(kept) == sorted(ranked[:best] + ranked[best:][max(0, size - best - others) :])
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    again = rank_filter(rewards[shuffled], group[shuffled], ids[shuffled], best=best, others=others, kind=kind)
    assert again.tolist() == keep[shuffled].tolist()


def test_chance_depends_on_the_step_and_falls_on_all_rows():
    """Eight equal answers: over many steps each is kept as often as any other."""
    kept = torch.zeros(8)
    for step in range(400):
        torch.manual_seed(step)
        kept += rank_filter(torch.ones(8), torch.zeros(8, dtype=torch.int64), torch.arange(8), kind="random").float()
    assert kept.sum() == 800
    assert kept.tolist() == pytest.approx([100.0] * 8, abs=40)


def test_equal_rewards_are_not_ranked_by_the_numbers_that_sampled_them():
    """The worker seeds torch with the key by which the first role draws its tokens."""
    for step in range(8):
        torch.manual_seed(key_of(0, step))
        noise = uniform(key_of(0, step), torch.arange(64), 0)
        keep = rank_filter(torch.zeros(64), torch.zeros(64, dtype=torch.int64), torch.arange(64), best=32, others=0)
        assert set(noise.argsort()[:32].tolist()) != set(keep.nonzero().flatten().tolist())
