"""The token by which the connections of a run authenticate each other."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks
from stores import hosted

from distflow.errors import Disagreement
from distflow.recovery.store import RunStore
from workers.rollout_channel import TOKEN, run_token


def tokens(port: int, exported: list[str]) -> str:
    """This rank's token in hex, or the error."""
    rank = dist.get_rank()
    place = {"RANK": str(rank), "WORLD_SIZE": str(len(exported)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True", TOKEN: exported[rank]}
    with mock.patch.dict(os.environ, place):
        try:
            return run_token(RunStore(60)).hex()
        except Disagreement as error:
            return str(error)


@pytest.fixture
def board():
    return hosted()


def test_one_that_is_drawn_is_in_the_store(board):
    zero, one = run_ranks(2, tokens, board.port, ["", "exported on this machine alone"])
    assert zero == one == board.get("0/token")


def test_one_that_is_exported_is_not(board):
    zero, one = run_ranks(2, tokens, board.port, ["the token of the run"] * 2)
    assert zero == one
    assert len(bytes.fromhex(zero)) == 32
    kept = board.list("").values()
    assert not [value for value in kept if zero in value or "the token of the run" in value]


@pytest.mark.parametrize("other", ["another token", ""])
def test_machines_with_other_tokens_are_told(board, other):
    for error in run_ranks(2, tokens, board.port, ["the token of the run", other]):
        assert error.startswith(f"the ranks do not have the same {TOKEN}: rank 1 has ")
        assert error.endswith(f"Export the same {TOKEN} on all machines.")
