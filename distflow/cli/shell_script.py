"""Reads the settings in a shell script that starts training elsewhere: `a.b=value` and `--a value`.

    expanded              $NAME, ${NAME:-default}, $((1024 * 20)); quotes; comments; arrays' elements
    left as it stands     what only running the script would tell: $(command), $1, variables that are not set, and
                          expansions that are more than a name
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping

_BALANCED = r"[^()]*"
for _ in range(8):  # parentheses within each other
    _BALANCED = rf"(?:[^()]|\({_BALANCED}\))*"
_PIECE = re.compile(rf"""
    (?<![^\s;|&()])(?P<comment>\#[^\n]*)   | (?P<blank>[ \t]+)   | (?P<end>[\n;|&()])
    | '(?P<literal>[^']*)'?   | \\(?P<escaped>.)   | "(?P<quoted>(?:\\[\s\S]|\$\({_BALANCED}\)|[^"\\])*)"?
    | (?P<code>\$\(\({_BALANCED}\)\)|\$\({_BALANCED}\)|\$\([^\n]*|\$\{{(?:[^{{}}]|\$\{{[^{{}}]*\}})*\}}|`[^`]*`?)
    | (?P<plain>\$?[^\s;|&()'"\\`$]+|.)""", re.VERBOSE)
_EXPANSION = re.compile(rf"""
    \\(?P<escaped>["\\$`])   | \$\(\((?P<sum>{_BALANCED})\)\)   | (?P<command>\$\({_BALANCED}\))
    | (?P<arguments>\$\{{?[@*]\}}?|\$\{{\w+\[[@*]\]\}})   # the script's own, and arrays, whose elements are read
    | \$(?P<name>\w+)   | \$\{{(?P<braced>\w+)(?::?-(?P<default>(?:[^{{}}]|\$\{{[^{{}}]*\}})*))?\}}""", re.VERBOSE)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DOTTED = re.compile(r"(?:\+{0,2}([a-z]\w*(?:\.\w+)+)|--([\w-]+))=(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"\$\w|\$\{\w+[^.\w]|\$\(|`")  # and not ${a.b}, which is Hydra's
_REDIRECTION = re.compile(r"\d*[<>].*")
_POWERS = re.compile(r"\*\*(?!\s*\d\d?\b)|\*\*.*\*\*", re.DOTALL)  # that may have no end
_SEVERAL = ("lora_target_modules", "lora_modules_to_save", "report_to", "reward_funcs", "reward_weights")
"""Flags of TRL that take several words; behind another one's value may come the script that is started."""
_ENDS = "\n"  # in place of a word: a command ends here


def shell_settings(text: str) -> tuple[dict[str, str | bool | list[str]], dict[str, str]]:
    """Return the settings of a script by their names, and those whose values only running it would tell."""
    words = list(_words(re.sub(r"\\\n", " ", text)))
    settings: dict[str, str | bool | list[str]] = {}
    for place, word in enumerate(words, 1):
        if match := _DOTTED.fullmatch(word):
            settings[match[1] or match[2].replace("-", "_")] = match[3]
        elif match := re.fullmatch(r"--([\w-]+)", word):
            name = match[1].replace("-", "_")
            given = list(itertools.takewhile(_is_value, words[place : None if name in _SEVERAL else place + 1]))
            settings[name] = given if len(given) > 1 else given[0] if given else True
    texts = {name: " ".join(value) if isinstance(value, list) else str(value) for name, value in settings.items()}
    unknown = {name: text for name, text in texts.items() if _UNKNOWN.search(text)}
    return {name: value for name, value in settings.items() if name not in unknown}, unknown


def _is_value(word: str) -> bool:
    """Return whether a word behind a flag belongs to it."""
    return not (word.startswith(("--", _ENDS)) or _REDIRECTION.fullmatch(word))


def _words(text: str) -> Iterator[str]:
    """Yield the words of a script, with the variables that words before them have set."""
    variables: dict[str, str] = {}
    word, begins, inside = None, True, 0  # whether the next word may set a variable; in how many parentheses
    for match in (*_PIECE.finditer(text), *_PIECE.finditer("\n")):
        kind = str(match.lastgroup)
        piece = match[kind]
        if kind not in ("comment", "blank", "end"):
            word = (word or "") + (piece if kind in ("literal", "escaped") else _filled(piece, variables))
            continue
        if word is not None:
            assigned = _ASSIGNED.fullmatch(word) if begins else None
            if assigned:
                variables[assigned[1]] = (variables.get(assigned[1], "") if assigned[2] else "") + assigned[3]
            elif word:
                yield word
            word, begins = None, bool(assigned) or word == "export"
        if kind == "end":
            begins, inside = begins or piece != ")", inside + {"(": 1, ")": -1}.get(piece, 0)
            if piece in ";|&" or (piece == "\n" and inside < 1):  # an array goes over several lines
                yield _ENDS


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with what is known of its expansions; a default that is not needed is left out."""
    def value(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            named = re.sub(r"(?<![$\w{])([A-Za-z_]\w*)", r"$\1", match["sum"])
            return _computed(_filled(named, variables)) or match[0]
        if name := match["name"] or match["braced"]:
            known = variables.get(name) or os.environ.get(name)
            unset = match[0] if match["default"] is None else _filled(match["default"], variables).strip("'\"")
            return known or unset
        return match["escaped"] or match["command"] or ""

    return _EXPANSION.sub(value, text)


def _computed(expression: str) -> str | None:
    """Return the value of an arithmetic expression of the shell; None if it is more than sums and products."""
    rounds = "-" in expression and re.search("[/%]", expression)  # a shell towards zero, Python downwards
    if re.fullmatch(r"[\d\s+*/%()-]+", expression) and not (_POWERS.search(expression) or rounds):
        with contextlib.suppress(SyntaxError, ArithmeticError, TypeError, ValueError):
            return str(int(eval(expression.strip().replace("/", "//"))))
    return None
