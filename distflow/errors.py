"""Everything that distflow raises on purpose.

DistflowError
├── InvalidInput      something that the user wrote cannot work; carries every mistake found, exit code 2
├── ColumnError       a batch does not have the column, the rows or the form that was asked of it
├── EngineError       an engine cannot do what the plan needs
├── CheckpointError   a checkpoint is torn, missing or of another run
├── Disagreement      ranks that must be alike are not; names the rank and the difference
├── StepFailed        a detector finds a step wrong, and is set to have it done again
├── RewardsFailed     rewards have failed for every sample of several steps in a row
└── RankMissing       a rank ended, or did not come in time, while others waited for it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ALIKE = 0.6
"""How much of two words must agree (difflib's ratio) for one to be proposed in place of the other."""
_LISTED = 30


class DistflowError(Exception):
    """Root of the tree. Catch it to catch everything that distflow raises on purpose."""

    passing = True
    """Whether a worker that starts again may be spared the error."""
    elsewhere = False
    """Whether the cause lies in another process, and says nothing about this one's program."""


@dataclass(frozen=True)
class Location:
    """A place in a file: `line` and `column` count from 1; `text` is the whole line; `length` is what to underline."""

    file: str
    line: int = 0
    column: int = 0
    length: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def excerpt(self, width: int = 110) -> str:
        """The line with its number, a long one cut around the underlined part."""
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
    """One thing that is wrong: what, where, and what to write instead."""

    what: str
    where: Location | None = None
    hint: str = ""
    lines: tuple[Location, ...] = ()
    """More lines to show, for a mistake that several lines make together."""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        head += "" if head.endswith((".", ":", "?", "\n")) else "."
        shown = self.lines or ((self.where,) if self.where else ())
        excerpt = "\n".join(filter(None, (spot.excerpt() for spot in shown)))
        return "\n".join(part for part in (head, f"\n{excerpt}\n" if excerpt else "", self.hint) if part).rstrip()


class InvalidInput(DistflowError):
    """Something that the user wrote cannot work. `mistakes` holds all of them; correct them and start again."""

    passing = False

    def __init__(self, mistakes: Iterable[Diagnostic] | Diagnostic | str):
        if isinstance(mistakes, str):
            mistakes = Diagnostic(mistakes)
        self.mistakes = (mistakes,) if isinstance(mistakes, Diagnostic) else tuple(mistakes)
        super().__init__(str(self))

    def __str__(self) -> str:
        body = "\n\n".join(str(mistake) for mistake in self.mistakes)
        return body if len(self.mistakes) == 1 else f"{body}\n\n{len(self.mistakes)} mistakes."


class ColumnError(DistflowError):
    """A batch lacks the column, the rows or the form that was asked of it. A node function or its contract is wrong."""


class EngineError(DistflowError):
    """An engine cannot do what the plan needs of it. Choose another engine, or another layout."""


class CheckpointError(DistflowError):
    """A checkpoint is torn, missing, or of another run. Resume from an older one, or start anew."""


class Disagreement(DistflowError):
    """Ranks that must be alike are not. The usual cause: files or versions differ between machines."""


class StepFailed(DistflowError):
    """A detector finds a step wrong, and its setting `restart` says that it is to be done again. If that ends the run,
    look at the step's rows, or take the setting out."""


class RewardsFailed(DistflowError):
    """No sample of several steps in a row has a reward, since all rewards, or the environments that samples converse
    with, have failed. Mend the one that is named."""

    passing = False


class RankMissing(DistflowError):
    """A rank ended, or did not come within the wait limit, while others waited for it. Its own output says why.

    `ranks` are those that are missing, empty where that is not known.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was probably meant."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=_ALIKE)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str], listed: str = "Known") -> str:
    """`Did you mean …?` followed by what there is; empty if there is nothing to choose from."""
    known = list(known)
    near = nearest(word, known)
    return " ".join(part for part in (f"Did you mean `{near}`?" if near else "", listing(known, listed)) if part)


def listing(known: Iterable[str], label: str = "Known") -> str:
    """`Known: a, b, c.`; a long list is cut."""
    known = list(known)
    more = f", … ({len(known)} in all)" if len(known) > _LISTED else ""
    return f"{label}: {', '.join(known[:_LISTED])}{more}." if known else ""


def shown(path: Path | str) -> str:
    """A path as short as it can be said: relative if it lies below the current folder."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
