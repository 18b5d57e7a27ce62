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
from distflow.rpc.run_token import TOKEN, run_token
from workers.rollout_channel import agreed_token


def tokens(port: int, exported: list[str]) -> str:
    """This rank's token in hex, or the error."""
    rank = dist.get_rank()
    place = {"RANK": str(rank), "WORLD_SIZE": str(len(exported)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True", TOKEN: exported[rank]}
    with mock.patch.dict(os.environ, place):
        try:
            return agreed_token(RunStore(60)).hex()
        except Disagreement as error:
            return str(error)


@pytest.fixture
def board():
    return hosted()


def test_without_a_secret_it_is_made_from_what_the_store_has(board, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    zero, one = run_ranks(2, tokens, board.port, ["", ""])
    assert zero == one == run_token(board.get("0/token")).hex()


def test_with_a_secret_nobody_can_make_it_from_what_the_store_has(board, monkeypatch):
    zero, one = run_ranks(2, tokens, board.port, ["the token of the run"] * 2)
    assert zero == one
    assert len(bytes.fromhex(zero)) == 32
    monkeypatch.delenv(TOKEN, raising=False)
    kept = board.list("").values()
    assert not [value for value in kept if zero in (value, run_token(value).hex()) or "the token of the run" in value]


def test_another_run_has_another_one(monkeypatch):
    monkeypatch.setenv(TOKEN, "the token of the run")
    assert run_token("one") != run_token("another")


@pytest.mark.parametrize("exported", [("the token of the run", "another run's token"), ("the token of the run", ""),
                                      ("", "the token of the run")])
def test_machines_with_other_tokens_are_told(board, exported):
    for error in run_ranks(2, tokens, board.port, [*exported]):
        assert error.startswith(f"the ranks do not have the same {TOKEN}: rank 1 has ")
        assert error.endswith(f"Export the same {TOKEN} on all machines.")
