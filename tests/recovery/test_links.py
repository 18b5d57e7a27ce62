"""Links between machines: what counts as broken, and which machine a broken link costs."""

from __future__ import annotations

import socket

import pytest

from distflow.recovery.links import LinkTarget, most_cut_off, unreachable_machines


def test_a_connection_that_is_not_made_is_a_broken_link_and_one_that_is_refused_is_none():
    target, full = LinkTarget("127.0.0.1"), socket.create_server(("127.0.0.1", 0), backlog=0)
    with socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))
        refused = ended.getsockname()
    waiting = [socket.socket() for _ in range(4)]
    for each in waiting:  # the kernel takes no more, and drops what comes: as a firewall does
        each.setblocking(False)
        each.connect_ex(full.getsockname())
    assert target.address is not None
    assert unreachable_machines({0: target.address, 1: full.getsockname(), 2: refused}, 0.5) == [1]
    target.clear()
    assert unreachable_machines({0: target.address}, 0.5) == []
    for each in (*waiting, full):
        each.close()


def test_a_machine_that_is_known_by_an_address_of_another():
    assert LinkTarget("192.0.2.1").address is None


@pytest.mark.parametrize(("reports", "lost"), [
    ({0: [], 1: [], 2: []}, None),
    ({}, None),
    ({0: [1], 1: [0]}, (1, 1)),  # the one that came last
    ({0: [], 1: [2], 2: []}, (2, 1)),  # one end alone sees it
    ({0: [1], 1: [], 2: [1]}, (1, 2)),
    ({0: [1, 2], 1: [0], 2: [0]}, (0, 2)),
    ({0: [3], 1: [3], 2: [3]}, None),  # the last one has not reported: it is dead, which heartbeats show
    ({0: [3, 1], 1: [3]}, (1, 1)),
])
def test_the_one_with_the_most_broken_links_is_lost(reports, lost):
    assert most_cut_off(reports) == lost
