"""Elastic machines must not divide a model that samples, and leave their ranks to others when all have ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from stores import hosted

from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.recovery.membership import Membership, Rendezvous
from planners import plan
from workers.elastic import ElasticAgent, _check_rollouts


@pytest.mark.parametrize(("local", "divided"), [(2, ""), (4, ""), (3, "ranks 2 to 3"), (1, "ranks 0 to 1")])
def test_ranks_that_share_a_model_are_on_one_machine(monkeypatch, local, divided):
    """Four of them train, by twos; four more are two rollouts."""
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.32.0")  # it is not started
    given = ["mode=semi_sync", "groups.rollout=4", "layouts.rollout.tp=2", "roles.actor.rollout=vllm"]
    made = plan(load("grpo.yaml", None, given, None), 8)
    if divided:
        with pytest.raises(InvalidInput, match=divided):
            _check_rollouts(made, "8", local)
    else:
        _check_rollouts(made, "8", local)


def test_a_block_is_left_when_all_ranks_of_its_machine_have_ended_their_workers():
    """A spare machine's workers would else begin beside them."""
    membership = Membership(hosted().below("machines"), "here", 2, 2, 3, 1, False, 600.0, 20)
    membership.store.put("0/members", '["lost", "here", "third"]')
    membership.take_over(0, 0, "lost", 1)
    spare = replace(membership, name="spare")

    def ends(rank: int) -> None:
        ElasticAgent._vacate_block(SimpleNamespace(membership=membership, rendezvous=Rendezvous(0, 1, 3), rank=rank,
                                                   local=2, leaves_at=0.0), "ended")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ends, 0)
        while not membership.store.add("ended", 0):
            pass
        assert spare._take(0, 1, "") is None
        ends(1)
        first.result(30)
    assert spare._take(0, 1, "")
