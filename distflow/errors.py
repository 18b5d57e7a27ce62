"""Exceptions that distflow raises on purpose, and the diagnostics that they carry.

DistflowError
├── InvalidInput      something that the user wrote cannot work; carries every mistake found; exit code 2
├── ColumnError       a batch does not have the column, the rows or the form that was asked of it
├── EngineError       an engine cannot do what the plan needs
├── CheckpointError   a checkpoint is incomplete, missing or of another run
├── FolderUnavailable the file system of a run's folder stays away
├── Superseded        a newer trainer goes on with the run of this one
├── Disagreement      ranks that must be alike are not; names the rank and the difference
├── StepFailed        a detector refuses a step, and is set to have it repeated
├── RewardsFailed     rewards have failed for every sample of several steps in a row
├── RunFailed         a run that Python has started has ended before its last step (`distflow.run_handle`)
└── RankMissing       a rank ended, or did not come in time, while others waited for it
"""

from __future__ import annotations

import difflib
import re
import shlex
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ALIKE = 0.6  # similarity (difflib's ratio) from which a word is proposed in place of another
_CANDIDATES = 3  # words of which one with the same letters is preferred: two of its own are swapped
_LISTED = 30
_ROOT = Path(__file__).resolve().parents[1]
_FOREIGN = tuple(f"{folder}/" for folder in (*(_ROOT / name for name in ("distflow", "workers", "planners")),
                                             *{sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")}))
_MISTAKES = 50  # mistakes that are shown
_VALUE, _LINE, _COMMAND = 100, 600, 900
"""Characters of a value, of a line of a message, and of a line to paste, from which the middle is left out."""


class DistflowError(Exception):
    """Base of all errors that distflow raises on purpose; its text says what, where, the cause and the remedy."""

    passing = True  # whether a restarted worker may not meet the error again
    elsewhere = False  # whether the cause is in another process
    exhausted = False  # whether threads or memory have run out, of which a restarted worker needs as much


@dataclass(frozen=True)
class Location:
    """Location in a file: `line` and `column` count from 1; `text` is the whole line; `length` is what to underline."""

    file: str
    line: int = 0
    column: int = 0
    length: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def excerpt(self, width: int = 110) -> str:
        """Return the line with its number, cut around the underlined part if it is long."""
        if not self.line or not self.text.strip():
            return ""
        indent = len(self.text) - len(self.text.lstrip())
        body, column = self.text.strip().replace("\t", " "), max(0, self.column - 1 - indent)
        if len(body) > width:
            start = max(0, min(column - width // 3, len(body) - width))
            body, column = "…" + body[start + 1 : start + width] + "…", column - start
        head = f"    {self.line} |  "
        under = " " * (len(head) + column) + "^" * max(1, min(self.length, len(body) - column)) if self.length else ""
        return "\n".join(part for part in (head + body, under) if part)


@dataclass(frozen=True)
class Diagnostic:
    what: str
    where: Location | None = None
    hint: str = ""
    lines: tuple[Location, ...] = ()
    """Lines to show in place of `where`, for a mistake that several lines make together."""
    of_machine: bool = False
    """Whether a plan is as good with it: this machine lacks something, or an engine does not compute a model."""

    def __str__(self) -> str:
        what = "\n".join(map(_clipped, self.what.split("\n")))
        head = f"{_clipped(str(self.where))}: {what}" if self.where else what
        head += "" if head.endswith((".", ":", "?", "\n")) or _ends_with_command(head) else "."
        shown = self.lines or ((self.where,) if self.where else ())
        excerpt = "\n".join(filter(None, (location.excerpt() for location in shown)))
        hint = "\n".join(_clipped(line, _COMMAND) for line in self.hint.split("\n"))
        return "\n".join(part for part in (head, f"\n{excerpt}\n" if excerpt else "", hint) if part).rstrip()


def abbreviated(value: object) -> str:
    """Return a value as Python writes it, for a message: of a long one its two ends."""
    return _clipped(repr(value), _VALUE)


def _clipped(text: str, width: int = _LINE) -> str:
    return text if len(text) <= width else f"{text[: 2 * width // 3]} … {text[-width // 3 :]}"


def _ends_with_command(text: str) -> bool:
    """Return whether a text ends with a line to paste, which two spaces begin and three end."""
    spaces = re.findall(r" {2,}(?=[\w\[{(-])", text.rpartition("\n")[2])
    return bool(spaces) and len(spaces[-1]) == 2


class InvalidInput(DistflowError):
    """Mistakes in what the user wrote. `mistakes` holds all of them."""

    passing = False

    def __init__(self, mistakes: Iterable[Diagnostic] | Diagnostic | str):
        if isinstance(mistakes, str):
            mistakes = Diagnostic(mistakes)
        self.mistakes = (mistakes,) if isinstance(mistakes, Diagnostic) else tuple(mistakes)
        super().__init__(str(self))

    def __str__(self) -> str:
        body, count = "\n\n".join(map(str, self.mistakes[:_MISTAKES])), len(self.mistakes)
        first = f" The first {_MISTAKES} are shown." if count > _MISTAKES else ""
        return body if count == 1 else f"{body}\n\n{count} mistakes.{first}"


class ColumnError(DistflowError):
    """A batch lacks the column, the rows or the form that was asked of it. A node function or its contract is wrong."""


class EngineError(DistflowError):
    """An engine cannot do what the plan needs of it. Choose another engine, or another layout."""


class CheckpointError(DistflowError):
    """A checkpoint is incomplete, missing, or of another run. Resume from an older one, or start again."""


class FolderUnavailable(DistflowError):
    """The file system of a run's folder stays away: read-only, stale, or its server does not answer. Resume later."""

    passing = False


class Superseded(DistflowError):
    """A newer trainer goes on with the run of this one, which writes nothing more into its folder."""

    passing, elsewhere = False, True


class Disagreement(DistflowError):
    """Ranks that must be alike are not. The usual cause: files or versions differ between machines."""


class StepFailed(DistflowError):
    """A detector refuses a step, and `restart` has it repeated. Look at the step's rows, or unset it."""


class RewardsFailed(DistflowError):
    """Rewards, or the environments that samples converse with, failed for every sample of several steps in a row."""

    passing = False


class RankMissing(DistflowError):
    """A rank ended, or did not come within the wait limit. Its own output says why. `ranks`: empty if not known."""

    def __init__(self, message: str, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that was probably meant, by its initials (`lr`) or by similarity; None if none was."""
    known = list(known)
    near = [each for each in known if "_" in each and "".join(part[:1] for part in each.split("_")) == word] or \
        difflib.get_close_matches(str(word), known, n=_CANDIDATES, cutoff=_ALIKE)
    return next((each for each in near if sorted(each) == sorted(str(word))), near[0] if near else None)


def did_you_mean(word: str, known: Iterable[str], listed: str = "Known") -> str:
    """Return `Did you mean …?` followed by what there is; "" if there is nothing to choose from."""
    known = list(known)
    near = nearest(word, known)
    return " ".join(part for part in (f"Did you mean `{near}`?" if near else "", listing(known, listed)) if part)


def listing(known: Iterable[str], label: str = "Known") -> str:
    """Return `Known: a, b, c.`; a long list is cut."""
    known = list(known)
    more = f", … ({len(known)} in all)" if len(known) > _LISTED else ""
    names = (_clipped(str(name), _VALUE) for name in known[:_LISTED])
    return f"{label}: {', '.join(names)}{more}." if known else ""


def quoted(path: Path | str) -> str:
    """Return a path as a word of a command, for messages that name one to copy."""
    return shlex.quote(str(path))


def shown(path: Path | str) -> str:
    """Return a path for messages: relative if it is below the current folder."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def is_users(file: str) -> bool:
    """Return whether code in `file`, as a traceback names it, is neither distflow's nor a library's."""
    return not file.startswith((*_FOREIGN, "<"))
