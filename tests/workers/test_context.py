"""Settings that change while the job of these ranks runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RankFailed, run_ranks

from distflow.config.load import load, reload
from distflow.config.spec import Spec
from distflow.telemetry.run_folder import RunFolder
from planners import plan
from workers.context import RankContext


class StubStore:
    ranks = 2

    @property
    def rank(self) -> int:
        return dist.get_rank()


def context(spec: Spec, folder: Path) -> RankContext:
    return RankContext(spec, plan(spec, 2), StubStore(), folder, "cpu", False, None, "", known_change=0)


def tokens_agreed(before: Path, folders: list[Path], knows: list[int]) -> int:
    """Agree from the settings of the job's beginning, with `knows[rank]` changes known."""
    mine = dist.get_rank()
    found = context(reload(before), folders[mine]).agree_on_settings(knows[mine])
    return found.spec.run.roles["actor"].micro_batch_tokens


@pytest.fixture
def written(workspace, monkeypatch):
    """`written(name, tokens)`: a run's folder with the settings in force."""
    monkeypatch.chdir(workspace)

    def write(name: str, tokens: int, wait_limit: float = 60.0) -> Path:
        spec = load("sft.yaml", "tiny.yaml", [f"roles.actor.micro_batch_tokens={tokens}", f"wait_limit={wait_limit}"])
        with RunFolder.created(workspace / name, spec, plan(spec, 2), []):
            return workspace / name

    return write


@pytest.mark.parametrize(("knows", "tokens"), [([1, 0], 64), ([0, 1], 64), ([0, 0], 512)])
def test_ranks_that_have_read_at_different_times_read_again(written, knows, tokens):
    before, folder = written("before", 512), written("run", 64)
    assert run_ranks(2, tokens_agreed, before, [folder] * 2, knows) == [tokens] * 2


def test_ranks_that_never_read_alike_say_so(written):
    before, folders = written("before", 512, 0.5), [written("run", 64), written("other", 128)]
    with pytest.raises(RankFailed, match="Disagreement: the ranks of the run read unlike settings"):
        run_ranks(2, tokens_agreed, before, folders, [1, 0])
