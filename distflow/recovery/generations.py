"""Fences the checkpoints of a run: of all trainers that write to its folder, only the newest may commit.

A machine that was cut off or stopped does not know that its run goes on elsewhere. So a trainer claims a generation in
the run folder before it restores a state:

    claim      leave a file `generations/JOB-ROUND-ATTEMPT-OWNER`, then take away what older trainers have not finished
    commit     look for a newer claim, then give the finished folder its name

Both end with a rename of the unfinished folder, which is atomic. An older trainer that looked before the claim either
commits before its folder is taken away, and the newer one finds a whole checkpoint; or its folder is gone. A step that
is saved again stands beside its name for a moment, and gets it back from whoever claims the run then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from distflow.errors import Superseded

_PARTIAL, _REMOVED, _REPLACED = ".partial", ".removed", ".old"
_CLAIMS = "generations"
_GENERATION = re.compile(r"(?:^|\.)(\d+)-(\d+)-(\d+)-(\w*)")


class TrainerGeneration(NamedTuple):
    """Identifies a trainer among all that have written to a run folder; a later one is greater. job: number of the job
    in that folder. round: of membership, or torchrun's count of restarts. attempt: of the restart group. owner: the
    same for all trainers of a job."""

    job: int = 0
    round: int = 0
    attempt: int = 0
    owner: str = ""

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def of(cls, name: str) -> TrainerGeneration:
        """Return the generation in a file's name; one before all others if there is none."""
        found = _GENERATION.search(name)
        return cls(int(found[1]), int(found[2]), int(found[3]), found[4]) if found else cls()


def claim(folder: Path, job: str, round: int, attempt: int) -> TrainerGeneration:
    """Claim a generation for a trainer, and take away what older ones have not finished. `job`: the name that all
    trainers of a job have, and no other job. Raises Superseded: a newer trainer has claimed the folder."""
    owner, claims = hashlib.sha256(job.encode()).hexdigest()[:8], _claims(folder)
    before = [each for each in claims if each.owner == owner]
    number = before[-1].job if before else max(claims, default=TrainerGeneration()).job + 1
    mine = TrainerGeneration(number, round, attempt, owner)
    require_newest(folder, mine)
    try:
        _claim(folder, mine).parent.mkdir(parents=True, exist_ok=True)
        _claim(folder, mine).touch()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # on a full disk older trainers cannot write either
            raise
    require_newest(folder, mine)  # two may have claimed at once
    for older in (each for each in before if each < mine):
        _claim(folder, older).unlink(missing_ok=True)
    clear(folder, mine)
    return mine


def adopt(folder: Path, generation: TrainerGeneration) -> None:
    """Leave the claim of a trainer that has written elsewhere what was fetched into the folder; later ones are newer.
    """
    _claim(folder, generation).parent.mkdir(parents=True, exist_ok=True)
    _claim(folder, generation).touch()


def require_newest(folder: Path, mine: TrainerGeneration) -> None:
    """Raise `Superseded` if a newer trainer has claimed the folder."""
    newest = max(_claims(folder), default=mine)
    if newest > mine:
        raise Superseded(f"this trainer (job {mine.job} of the run, round {mine.round}, attempt {mine.attempt}) writes "
                         f"nothing more into {folder}: a newer one (job {newest.job}, round {newest.round}, attempt "
                         f"{newest.attempt}) goes on with the run. The machine of this one may have been cut off or "
                         "stopped for a while.")


def partial_folder(final: Path, mine: TrainerGeneration) -> Path:
    """Return the folder in which a trainer writes what will be `final`."""
    return final.with_name(f"{final.name}.{mine}{_PARTIAL}")


def commit(final: Path, mine: TrainerGeneration) -> None:
    """Give what a trainer has written the name `final`. Raises `Superseded`; OSError: its folder was taken away."""
    require_newest(final.parent, mine)
    written = partial_folder(final, mine)
    try:
        written.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        replace(written, final)


def replace(written: Path, final: Path) -> None:
    """Rename `written` in place of another folder; that one stays if `written` is gone."""
    before = final.rename(final.with_suffix(_REPLACED))
    try:
        written.rename(final)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # a newer trainer has put it back
            before.rename(final)
        raise
    shutil.rmtree(before, ignore_errors=True)


def clear(folder: Path, mine: TrainerGeneration) -> None:
    """Remove what this and older trainers left, renamed first: who still writes into a folder cannot commit it."""
    for left in folder.glob("step-*.*"):
        if left.suffix == _REPLACED and not left.with_suffix("").exists():  # its writer came no further in `replace`
            left.rename(left.with_suffix(""))
        elif TrainerGeneration.of(left.name) <= mine:
            if left.suffix != _REMOVED:
                with contextlib.suppress(FileNotFoundError):  # its own writer was faster
                    left = left.rename(left.with_name(f"{left.name}.{os.getpid()}{_REMOVED}"))
            shutil.rmtree(left, ignore_errors=True)  # another may still write there; the next one finds the rest


def _claim(folder: Path, generation: TrainerGeneration) -> Path:
    return _place(folder) / str(generation)


def _place(folder: Path) -> Path:
    """Return where trainers claim a folder."""
    return folder.with_name(_CLAIMS if folder.name == "checkpoints" else f"{folder.name}.{_CLAIMS}")


def _claims(folder: Path) -> list[TrainerGeneration]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(map(TrainerGeneration.of, os.listdir(_place(folder))))
    return []
