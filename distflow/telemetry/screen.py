"""Text on screens: nothing in it that a terminal would obey, and only characters that the screen can show.

    printable    text without control characters, whoever has written it: a model, a record, a file
    fitting      text in the characters of a stream's encoding, such as ASCII
    prepare      let this process print to screens that have fewer characters than its texts
    guarded      the same, and what is printed to standard output is `printable`; for commands
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 but for tabs and line ends, other line ends, what reorders text, and halves of surrogate pairs."""
_PLAIN = {"…": "...", "→": "->", "–": "-", "—": "-", "·": "*", "×": "x", "±": "+-", "≤": "<=", "≥": ">="}
_ERRORS = "distflow.screen"


def printable(text: str) -> str:
    """Return a text with its control characters as Python would write them, so that a terminal shows and does not obey
    them: such as `\\x1b` for the one that begins colors, titles and links."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fitting(text: str, stream: Any) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _ERRORS).decode(encoding)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or each.encode("unicode_escape").decode() for each in letters), error.end


codecs.register_error(_ERRORS, _replaced)


def prepare() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


class _Guarded:
    """Stream whose texts are `printable`."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def writelines(self, texts: Iterable[str]) -> None:
        self.stream.writelines(map(printable, texts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    prepare()
    with contextlib.redirect_stdout(_Guarded(terminal())):  # type: ignore[type-var]
        yield


def terminal() -> TextIO:
    """Return standard output, for what is to move the cursor of a terminal."""
    return sys.stdout.stream if isinstance(sys.stdout, _Guarded) else sys.stdout
