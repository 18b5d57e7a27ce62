"""An older trainer that comes back writes nothing beside its successor, wherever it was stopped."""

import json
import subprocess
import sys

import pytest

from distflow.errors import Superseded
from distflow.recovery import generations
from distflow.recovery.checkpoint_files import complete_checkpoints, find_damage, read_progress
from distflow.recovery.generations import TrainerGeneration, claim, require_newest

_PLACES = ["the start", "the shards", "the checksums", "the look for claims", "the name"]
_TRAINERS = """
import json, os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from distflow.errors import DistflowError
from distflow.recovery import generations
from distflow.recovery.checkpoint import Checkpoints


def stopping(call, here=True, after=False):
    def stopped(*arguments, **more):
        result = call(*arguments, **more) if after else None
        if here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return result if after else call(*arguments, **more)
    return stopped


def commit_slowly(*arguments):
    generations.require_newest = stopping(generations.require_newest, after=True)
    commit(*arguments)


def train(folder, attempt, steps, stop_at=""):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoints = Checkpoints(folder, 2)
    FileSystemWriter.write_data = stopping(FileSystemWriter.write_data, stop_at == "the shards")
    checkpoints.claim("one job", 0, attempt)
    generations.commit = commit_slowly if stop_at == "the name" else stopping(commit, stop_at == "the look for claims")
    checkpoints._checksums = stopping(checkpoints._checksums, stop_at == "the checksums", after=True)
    save = stopping(checkpoints.save, stop_at == "the start")
    for step in steps:
        save(step, {"actor": {"weight": torch.full((1000,), float(attempt))}}, {"attempt": attempt})


def process(*arguments):
    pid = os.fork()
    if not pid:
        try:
            train(*arguments)
            said = "saved"
        except DistflowError as error:
            said = f"{type(error).__name__} {error}"
        print(json.dumps([arguments[0].parent.name, arguments[1], said]), flush=True)
        os._exit(0)
    return pid


commit = generations.commit
for place in sys.argv[2:]:
    folder = Path(sys.argv[1], place, "checkpoints")
    old = process(folder, 0, [2], place)
    assert os.WIFSTOPPED(os.waitpid(old, os.WUNTRACED)[1]), place
    os.waitpid(process(folder, 1, [2, 3]), 0)
    os.kill(old, signal.SIGCONT)
    os.waitpid(old, 0)
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the folder in which trainers were stopped, one at each of the places, and went on when another had saved;
    and what each has said in the end."""
    folder = tmp_path_factory.mktemp("stopped")
    lines = subprocess.run([sys.executable, "-c", _TRAINERS, folder, *_PLACES], stdout=subprocess.PIPE, text=True,
                           check=True, timeout=120).stdout.splitlines()
    return folder, {(place, attempt): said for place, attempt, said in map(json.loads, lines)}


@pytest.mark.parametrize("place", _PLACES)
def test_a_trainer_that_was_stopped_while_it_saved_commits_nothing_beside_its_successor(stopped, place):
    folder, said = stopped[0] / place / "checkpoints", stopped[1]
    assert said[place, 1] == "saved"
    assert said[place, 0].startswith("Superseded this trainer (job 1 of the run, round 0, attempt 0) writes nothing")
    checkpoints = complete_checkpoints(folder)
    assert [path.name for path in checkpoints] == ["step-00000002", "step-00000003"]
    for checkpoint in checkpoints:
        assert (read_progress(checkpoint)["attempt"], find_damage(checkpoint)) == (1, "")
        assert read_progress(checkpoint)["generation"][:3] == [1, 0, 1]
    assert len(list(folder.iterdir())) == 2
    assert len(list((folder.parent / "generations").iterdir())) == 1


def test_what_an_older_trainer_has_not_finished_is_removed_and_what_a_newer_one_writes_is_not(tmp_path):
    for name in ("step-00000001.partial", "step-00000002.1-0-3-aaaaaaaa.partial",
                 "step-00000002.1-2-0-aaaaaaaa.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_text("half")
    generations.clear(tmp_path, TrainerGeneration(1, 1, 0, "aaaaaaaa"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.1-2-0-aaaaaaaa.partial"]


def test_generations_grow_from_job_to_job_and_within_one(tmp_path):
    """A job that has begun later has the folder, whatever rounds and attempts the earlier one still begins."""
    first = [claim(tmp_path / "checkpoints", "first", *each) for each in ((0, 0), (0, 1), (1, 0))]
    second = claim(tmp_path / "checkpoints", "second", 0, 0)
    assert sorted(first) == first
    assert first[-1] < second
    assert claim(tmp_path / "checkpoints", "second", 0, 0) == second
    for role, attempt in (("critic", 1), ("judge", 2), ("critic", 1)):
        claim(tmp_path / "checkpoints" / role, "second", 0, attempt)  # each role's trainer starts again by itself
    for late in ((1, 0), (2, 5)):
        with pytest.raises(Superseded, match=r"job 1 of the run, .* \(job 2, round 0, attempt 0"):
            claim(tmp_path / "checkpoints", "first", *late)
    with pytest.raises(Superseded):
        require_newest(tmp_path / "checkpoints", first[-1])
    require_newest(tmp_path / "checkpoints", second)


def test_a_step_whose_writer_ended_between_two_names_gets_its_name_back(tmp_path):
    for name in ("step-00000012.old", "step-00000012.1-0-0-aaaaaaaa.partial", "step-00000013", "step-00000013.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    generations.clear(tmp_path, TrainerGeneration(1, 0, 1, "aaaaaaaa"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000012", "step-00000013"]
    assert (tmp_path / "step-00000012/file").read_text() == "step-00000012.old"
    assert (tmp_path / "step-00000013/file").read_text() == "step-00000013"
