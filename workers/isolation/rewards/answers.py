"""Final answers as people write them: numbers and expressions, lists, sets, intervals, relations, matrices, words.

    parse_whole   text → an Answer, or None where any of it is not understood
    same          whether two answers are equal; numbers and expressions exactly, see `arithmetic`
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from workers.isolation.rewards.arithmetic import computable, equal, proportional
from workers.isolation.rewards.latex import FUNCTIONS, IDEOGRAPHS, Expression, NotUnderstood, Token, expression, tokens
from workers.isolation.rewards.quantities import CURRENCIES, NO_UNITS, SHORT_UNITS, differ, is_unit, units_of

_OPENERS, _ENDS = ("(", "[", r"\{", r"\langle", "{"), (")", "]", r"\}", r"\rangle", "}")
_EQUAL, _ORDER = ("=", r"\in", r"\approx"), {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le", r"\ne": r"\ne"}
_SETS = (r"\cup", r"\cap", r"\setminus")
_JOINS = (",", ";", "and", "or", r"\land", r"\lor", r"\wedge", r"\vee")
_OF_NAMES = (r"\overline", r"\angle", r"\triangle", r"\vec", r"\overrightarrow", r"\widehat", r"\hat", "|", "'", "(",
             ")", "{", "}", "[", "]", ",", "_", ":", "-")
_NOTHING, _SYNONYMS = ("nosolution", "nosolutions", "emptyset", "theemptyset"), {"DNE": "doesnotexist"}
SHORT_WORDS = frozenset(["yes", "no", "odd", "red"])
_RELATING = NO_UNITS | frozenset([
    "and", "if", "when", "where", "for", "than", "least", "most", "times", "any", "every"])
_OF_UNITS = ("^", "2", "3", "{", "}", "/", "per", r"\%")
_FUNCTION = re.compile(r"[A-Za-z]\([a-z]\)")
_INFINITY = Expression("symbol", value=r"\infty")
_ROMAN = re.compile("[IVX]+")
_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
           "december")
_DATES = [re.compile(pattern) for pattern in (
    r"(?P<y>[0-9]{4})(?:-|\s*年\s*)(?P<m>[0-9]{1,2})(?:-|\s*月\s*)(?P<d>[0-9]{1,2})\s*日?",
    r"(?P<m>[a-z]{3,9})\.?\s+(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?(?:,?\s+(?P<y>[0-9]{4}))?",
    r"(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<m>[a-z]{3,9})\.?(?:,?\s+(?P<y>[0-9]{4}))?")]
_SLASHED = re.compile(r"[0-9]{1,2}([/.])[0-9]{1,2}\1[0-9]{4}")
_OUTWARD = re.compile(r"\A\s*\][^\[\]]+[\[\]]|[\[\]][^\[\]]+\[\s*\Z")
_ENDS_OF = re.compile(r"([\[\]])([^\[\]]+)([\[\]])")
"""Intervals whose open ends have brackets that point outward, as `]3, 5[`."""
_DEEPEST = 40  # brackets in each other
_MOST_ITEMS = 60
_MOST_SIGNS = 4  # `±` in one expression


@dataclass(frozen=True)
class Answer:
    """`kind`: value (`node`), words (`text`), list, set, row (`text`: its brackets), union (`text`: its operator),
    named (`text` = the part; `node`: the difference of both sides), equation (`node`: the same), order (`text`: its
    operators), ratio (`text`: a time of day, as it is written) or digits (`text`, in a base)."""

    kind: str
    parts: tuple[Answer, ...] = ()
    node: Expression | None = None
    text: str = ""
    unit: str = field(default="", compare=False)


@functools.lru_cache(maxsize=65536)
def parse_whole(text: str) -> Answer | None:
    """Return the answer that a text is; None if any of it is not understood."""
    try:
        if day := date(text):
            return Answer("words", text=day)
        if _OUTWARD.search(text):
            text = _ENDS_OF.sub(lambda found: f"{'(['[found[1] == '[']}{found[2]}{')]'[found[3] == ']']}", text)
        given = _spread(tokens(text))
        if max(itertools.accumulate(map(_step, given)), default=0) > _DEEPEST:
            return None
        return _answer(given)
    except NotUnderstood:
        return None


def date(text: str) -> str:
    """Return a date as year-month-day, or where its order is not known as it is written; "" if a text is none."""
    plain = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}|[\\$]", r"\1", text).strip(" .").lower()
    for pattern in _DATES:
        if found := pattern.fullmatch(plain):
            given = {"y": "", **found.groupdict(default="")}
            month = given["m"] if given["m"].isdigit() else str(_month(given["m"]))
            return "-".join(part.lstrip("0") for part in (given["y"], month, given["d"])) if month != "0" else ""
    return re.sub(r"\b0", "", plain).replace(".", "/") if _SLASHED.fullmatch(plain) else ""


def _month(name: str) -> int:
    return next((index for index, month in enumerate(_MONTHS, 1) if len(name) > 2 and month.startswith(name)), 0)


def readings(text: str) -> list[Answer]:
    """Return what a reference may mean: `100,200,300` is a number, or a list. Empty where it is not understood."""
    found = [parse_whole(text)]
    if re.search(r"[0-9],[0-9]{3}", text) and not re.search(r",0[0-9]", text):  # no number begins so
        found.append(parse_whole(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", ", ", text)))
    return [answer for answer in found if answer is not None and is_computable(answer)]


def is_computable(answer: Answer) -> bool:
    """Return whether each value in an answer can be computed."""
    own = answer.kind != "value" or answer.node == _INFINITY or answer.node is None or computable(answer.node)
    return own and all(map(is_computable, answer.parts))


def spelling(text: str) -> str:
    """Return a text without what says nothing: blanks, markup, `\\text{}`, braces around one sign."""
    try:
        found = [" " * (token.kind == "number") + token.text.strip() for token in _spread(tokens(text))]
    except NotUnderstood:
        return text.strip()
    found = [{r"\dots": r"\ldots", r"\cdots": r"\ldots"}.get(sign, sign) for sign in found]
    return re.sub(r"\{\0([^{}\0]*)\0\}", r"\1", "\0".join(found)).replace("\0", "").rstrip(".")


def same(wanted: Answer, given: Answer) -> bool:
    """Return whether an answer is the wanted one. `x = 3` answers 3, and 3 answers `x = 3`."""
    if "named" in (wanted.kind, given.kind):
        return _same_named(wanted, given)
    if wanted.kind in ("list", "set") and len(wanted.parts) == 1 and given.kind not in ("list", "set"):
        wanted = wanted.parts[0]
    if given.kind in ("list", "set") and len(given.parts) == 1 and wanted.kind not in ("list", "set"):
        given = given.parts[0]
    wanted, given = _as_matrix(wanted, given), _as_matrix(given, wanted)
    wanted, given = _as_set(wanted, given.kind), _as_set(given, wanted.kind)
    kinds = {"set": "list"}.get(wanted.kind, wanted.kind), {"set": "list"}.get(given.kind, given.kind)
    if kinds in _COMPARISONS:
        return _COMPARISONS[kinds](wanted, given)
    if "words" in kinds:
        return wanted.text.casefold() == given.text.casefold() != ""
    return False


def _same_named(wanted: Answer, given: Answer) -> bool:
    alike = wanted.text == given.text or any(names[0] == "y" and _FUNCTION.fullmatch(names[1]) for names in (
        (wanted.text, given.text), (given.text, wanted.text)))
    if wanted.kind == given.kind and alike and same(wanted.parts[0], given.parts[0]):
        return True
    if wanted.kind == given.kind or "equation" in (wanted.kind, given.kind):
        return _same_equation(wanted, given)
    return same(*(answer.parts[0] if answer.kind == "named" else answer for answer in (wanted, given)))


def _same_equation(wanted: Answer, given: Answer) -> bool:
    return wanted.node is not None and given.node is not None and proportional(wanted.node, given.node)


def _same_value(wanted: Answer, given: Answer) -> bool:
    if wanted.node is None or given.node is None or differ(units_of(wanted.unit), units_of(given.unit)):
        return False
    if wanted.node.kind == given.node.kind == "symbol":
        return str(wanted.node.value).casefold() == str(given.node.value).casefold()
    return equal(wanted.node, given.node)


def _same_items(wanted: Answer, given: Answer) -> bool:
    """Compare items in any order."""
    left = list(given.parts)
    for item in wanted.parts if len(left) == len(wanted.parts) else ():
        match = next((index for index, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _same_in_order(wanted: Answer, given: Answer) -> bool:
    return len(wanted.parts) == len(given.parts) and all(map(same, wanted.parts, given.parts))


def _same_row(wanted: Answer, given: Answer) -> bool:
    alike = wanted.text == given.text or (len(wanted.parts) > 2 and {wanted.text, given.text} == {"()", "[]"})
    return alike and _same_in_order(wanted, given)


def _same_union(wanted: Answer, given: Answer) -> bool:
    ordered = wanted.text == r"\setminus"
    return wanted.text == given.text and (_same_in_order if ordered else _same_items)(wanted, given)


def _same_order(wanted: Answer, given: Answer) -> bool:
    """Compare inequalities, each as what is below 0."""
    left = _below(given)
    for sign, node in _below(wanted):
        match = next((other for other in left if other[0] == sign and proportional(
            node, other[1], positive=sign != r"\ne")), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same_ratio(wanted: Answer, given: Answer) -> bool:
    if wanted.text and given.text:
        halves = [answer.text.removeprefix("time").strip() for answer in (wanted, given)]
        hours = [{_hour(answer), _hour(answer, half)} for answer, half in zip((wanted, given), halves)]
        alike = halves[0] == halves[1] or ("" in halves and hours[0] & hours[1])
        return bool(alike) and same(wanted.parts[1], given.parts[1]) and bool(hours[0] & hours[1])
    if "m" in (wanted.text + given.text)[5:]:  # `am` or `pm` of a time, beside a ratio
        return False
    crossed = [[Expression("*", (part.node, other.parts[0].node)) for part in answer.parts if part.node]
               for answer, other in ((wanted, given), (given, wanted)) if other.parts[0].node]
    return len(wanted.parts) == len(given.parts) and len(crossed) == 2 and all(map(equal, *crossed))


def _hour(time: Answer, half: str = "") -> int:
    """Return the hour of a time, of 24 where its half of the day is known."""
    hour = int(time.parts[0].node.value) if time.parts[0].node else 0
    return hour % 12 + 12 * (half == "pm") if half else hour


def _same_digits(wanted: Answer, given: Answer) -> bool:
    """Compare digits and base; the digits alone answer, too, where the question has named the base."""
    digits = wanted.text.partition("_")[0]
    if given.kind == "digits":
        return wanted.text == given.text
    return digits.isdigit() and given.node == Expression("number", value=Fraction(digits))


def _quotient(ratio: Answer) -> Answer:
    parts = [part.node for part in ratio.parts if part.node is not None]
    return Answer("value", node=Expression("/", tuple(parts)) if len(parts) == 2 and not ratio.text else None)


_COMPARISONS: dict[tuple[str, str], Callable[[Answer, Answer], bool]] = {
    ("value", "value"): _same_value, ("list", "list"): _same_items, ("row", "row"): _same_row,
    ("row", "list"): lambda row, items: row.text == "()" and items.kind == "list" and _same_in_order(row, items),
    ("list", "row"): lambda items, row: row.text == "()" and items.kind == "list" and _same_in_order(items, row),
    ("union", "union"): _same_union, ("equation", "equation"): _same_equation, ("order", "order"): _same_order,
    ("ratio", "ratio"): _same_ratio, ("digits", "digits"): _same_digits, ("digits", "value"): _same_digits,
    ("ratio", "value"): lambda ratio, value: _same_value(_quotient(ratio), value),
    ("value", "ratio"): lambda value, ratio: _same_value(value, _quotient(ratio)),
}


def _below(order: Answer) -> list[tuple[str, Expression]]:
    """Return the operator of each inequality, `<`, `\\le` or `\\ne`, and the expression that it compares with 0."""
    found = []
    for sign, left, right in zip(order.text.split(), order.parts, order.parts[1:]):
        if sign in (">", r"\ge"):
            sign, left, right = _ORDER[sign], right, left
        if left.node is not None and right.node is not None:
            found.append((sign, Expression("+", (left.node, Expression("neg", (right.node,))))))
    return found


def _as_matrix(answer: Answer, other: Answer) -> Answer:
    """Return `[[1, 2], [3, 4]]`, or a vector as `(1, 2)`, as a matrix where the other answer is one."""
    if answer.kind != "row" or answer.text not in ("()", "[]") or other.node is None or other.node.kind != "matrix":
        return answer
    rows = [part.parts if part.kind == "row" else (part,) for part in answer.parts]
    cells = tuple(cell.node for row in rows for cell in row if cell.node is not None)
    whole = len({len(row) for row in rows}) == 1 and len(cells) == sum(map(len, rows))
    column = len(rows[0]) > 1 or int(other.node.value) > 1
    return Answer("value", node=Expression("matrix", cells, len(rows) if column else 1)) if whole else answer


def _as_set(answer: Answer, other: str) -> Answer:
    """Return `2 < x < 5` as an interval, where the other answer is a set."""
    if answer.kind != "order" or other not in ("row", "union"):
        return answer
    signs, parts = answer.text.split(), list(answer.parts)
    if signs[0] in (">", r"\ge"):
        signs, parts = [_ORDER[sign] for sign in reversed(signs)], parts[::-1]
    if not set(signs) <= {"<", r"\le"}:
        return answer
    if len(parts) == 2:
        at_end = parts[1].node is not None and parts[1].node.kind == "symbol"
        bound = Answer("value", node=_INFINITY if at_end else Expression("neg", (_INFINITY,)))
        signs, parts = ([*signs, "<"], [*parts, bound]) if at_end else (["<", *signs], [bound, *parts])
    middle = parts[1].node
    if len(parts) != 3 or middle is None or middle.kind != "symbol":
        return answer
    brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
    return Answer("row", (parts[0], parts[2]), text=brackets)


def _spread(given: list[Token]) -> list[Token]:
    """Return tokens with those inside of `\\text{}`, where it holds more than words."""
    found: list[Token] = []
    for token in given:
        names = re.findall(r"[A-Za-z]+", token.text)
        plain = re.fullmatch(r"[A-Za-z\s.'-]*", token.text) and any(
            len(name) > 1 and name not in ("and", "or") and not _ROMAN.fullmatch(name) for name in names)
        joined = token.kind == "text" and token.text.strip().casefold() in _JOINS
        unit = bool(found) and token.text.strip() in SHORT_UNITS
        found += [token] if token.kind != "text" or plain or joined or unit else tokens(token.text)
    return found


def _answer(given: list[Token]) -> Answer:
    while given and given[-1].text in (".", ",", ";") and given[-1].kind == "sign":
        given = given[:-1]
    if given and given[0].text in (r"\boxed", r"\fbox") and _closes(given[1:]):
        return _answer(given[2:-1])
    if given and given[0].text == "{" and _closes(given):
        return _answer(given[1:-1])
    if words := _words(given):
        return Answer("set") if words.casefold() in _NOTHING else Answer("words", text=_SYNONYMS.get(words, words))
    pieces, joins = _split(given, _JOINS)
    pieces = [piece for index, piece in enumerate(pieces) if piece or not _doubled(joins, index)]
    if len(pieces) == 1:
        return _item(pieces[0])
    return _list([_item(piece) for piece in pieces], "or" in joins)


def _doubled(joins: list[str], index: int) -> bool:
    """Return whether an empty piece stands between a comma and a word, as in `1, and 2`."""
    return 0 < index < len(joins) and joins[index - 1] in (",", ";") and joins[index] not in (",", ";")


def _list(items: list[Answer], either: bool) -> Answer:
    items = [part for item in items for part in (item.parts if item.kind == "list" else [item])]
    if len(items) > _MOST_ITEMS or len({item.unit for item in items if item.unit}) > 1:
        raise NotUnderstood("many items, or such of several units")
    if either and all(_as_set(item, "row").kind == "row" for item in items):
        return Answer("union", tuple(_as_set(item, "row") for item in items), text=r"\cup")
    names = [item.text if item.kind == "named" else "" for item in items]
    if names[0] and all(name in (names[0], "") for name in names) and (all(names) or not any(names[1:])):
        bodies = [item.parts[0] if item.kind == "named" else item for item in items]
        return Answer("named", (_list(bodies, False),), text=names[0])
    return Answer("list", tuple(items))


def _words(given: list[Token]) -> str:
    """Return the words that an answer consists of, the names of figures in it, or its one sign as `<`; else ""."""
    if len(given) == 1 and given[0].text in _ORDER:
        return given[0].text
    if given and given[-1].text == "infinity":
        return ""
    if not given or not all(token.kind in ("word", "text") or token.text in _OF_NAMES for token in given):
        return ""
    figures = any(token.text.startswith("\\") and token.kind == "command" for token in given)
    letters = [token for token in given if token.kind in ("word", "text")]
    formula = any(token.text in ("(", "[", ",", "_", "|", ":") or token.text in FUNCTIONS | {"sqrt"} for token in given)
    if not figures and (formula or not any(map(_is_long, letters))):
        return ""
    return re.sub(r"[\s.'{}-]", "", "".join(token.text for token in given))


def _is_long(token: Token) -> bool:
    """Return whether a run of letters is a word, and no product of variables."""
    if token.kind == "text" or token.text.casefold() in SHORT_WORDS:
        return True
    named = len(token.text) > 2 and not token.text.islower()
    return len(token.text) > 3 or (named and not _ROMAN.fullmatch(token.text))


def _split(given: Sequence[Token], at: Iterable[str]) -> tuple[list[list[Token]], list[str]]:
    """Split tokens outside of brackets; return the pieces, and the texts between them."""
    pieces: list[list[Token]] = [[]]
    between: list[str] = []
    depth = 0
    for token in given:
        depth += _step(token)
        name = token.text.strip().casefold() if token.kind in ("word", "text") else token.text
        if not depth and name in at and token.kind != "number":
            between.append(name)
            pieces.append([])
        else:
            pieces[-1].append(token)
    if depth:
        raise NotUnderstood("a bracket without its partner")
    return pieces, between


def _step(token: Token) -> int:
    return 0 if token.kind in ("text", "matrix") else (token.text in _OPENERS) - (token.text in _ENDS)


def _closes(given: Sequence[Token]) -> bool:
    """Return whether the first token is a bracket whose partner is the last one."""
    if len(given) < 2 or given[0].text not in _OPENERS:
        return False
    depth = 0
    for index, token in enumerate(given):
        depth += _step(token)
        if not depth:
            return index == len(given) - 1
    return False


def _item(given: list[Token]) -> Answer:
    sides, signs = _split(given, (*_EQUAL, *_ORDER))
    if not signs:
        return _set(given)
    if set(signs) <= set(_EQUAL):
        return _equation(sides, signs)
    if set(signs) <= set(_ORDER) and all(sides):
        return Answer("order", tuple(Answer("value", node=_expression(side)) for side in sides), text=" ".join(signs))
    raise NotUnderstood("a mixture of relations")


def _equation(sides: list[list[Token]], signs: list[str]) -> Answer:
    """Read `name = value`, `name ∈ set`, `value = value` of equal ones, or an equation. What is only approximately
    equal to a value does not count."""
    named = _is_name(sides[0])
    if r"\approx" in signs and (about := signs.index(r"\approx")) + 1 > named:
        sides, signs = sides[: about + 1], signs[:about]
    if not signs:
        return _set(sides[0])
    if named and len(sides) > 1:
        values = [_set(side) for side in sides[1:]]
        if not all(same(value, values[-1]) for value in values):
            raise NotUnderstood("a chain of values that differ")
        name = "".join(token.text.strip() for token in sides[0])
        return Answer("named", (values[-1],), node=_difference(sides), text=name)
    nodes = [_expression(side) for side in sides]
    if all(equal(node, nodes[-1]) for node in nodes):
        return Answer("value", node=nodes[-1])
    if len(sides) == 2 and signs == ["="]:
        return Answer("equation", node=_difference(sides))
    raise NotUnderstood("a chain of equations")


def _is_name(given: Sequence[Token]) -> bool:
    """Return whether the left side of an equation names what the right side is, as `x`, `f(x)`, `\\angle ABC`."""
    if [token.text for token in given[1:6]] == ["^", "{", "-", "1", "}"]:
        given = [*given[:1], *given[6:]]
    subscripts = [given[index - 1].text == "_" or given[max(0, index - 2)].text == "_" for index in range(len(given))]
    return bool(given) and any(token.kind in ("word", "text", "command") for token in given) and all(
        token.kind in ("word", "text") or token.text in _OF_NAMES or (token.kind == "number" and inside)
        or re.fullmatch(r"\\(?!frac|sqrt|pi$|infty|binom)[a-zA-Z]+", token.text) is not None
        for token, inside in zip(given, subscripts)) and "-" not in [token.text for token in given]


def _difference(sides: list[list[Token]]) -> Expression | None:
    try:
        left, right = _expression(sides[0]), _expression(sides[-1])
    except NotUnderstood:
        return None
    return Expression("+", (left, Expression("neg", (right,))))


def _set(given: list[Token]) -> Answer:
    pieces, signs = _split(given, _SETS)
    if len({*signs}) > 1:
        raise NotUnderstood("several operations on sets")
    if signs:
        return Answer("union", tuple(map(_single, pieces)), text=signs[0])
    return _single(given)


def _single(given: list[Token]) -> Answer:
    texts = [token.text for token in given]
    if texts in ([r"\emptyset"], [r"\{", r"\}"]):
        return Answer("set")
    if len(given) == 1 and given[0].kind == "ring":
        ring = texts[0].strip("\\mathb{} ")
        ends = tuple(Answer("value", node=node) for node in (Expression("neg", (_INFINITY,)), _INFINITY))
        return Answer("row", ends, text="()") if ring == "R" else Answer("words", text=ring)
    if _closes(given):
        return _bracketed(given)
    parts, colons = _split(given, (":", "∶"))
    if colons:
        return _ratio(parts, colons)
    if digits := _digits(given):
        return Answer("digits", text=digits)
    if len(given) == 1 and given[0].kind == "word" and len(given[0].text) > 1 and given[0].text.isupper():
        return Answer("words", text=_SYNONYMS.get(given[0].text, given[0].text))
    bare = _without_units(given)
    unit = " ".join(token.text.strip() for token in given[len(bare) :] if token.text not in (r"\%", r"\degree"))
    unit = re.sub(r" \^(?: \{)? ([23])(?: \})?", lambda power: {"2": " sq", "3": " cu"}[power[1]], unit)
    text = "".join(texts) if all(token.kind in ("word", "text") for token in given) else ""
    values = _without_signs(_without_degrees(expression(bare)))
    found = [Answer("value", node=value, text=text, unit=unit) for value in values]
    return found[0] if len(found) == 1 else Answer("list", tuple(found))


def _bracketed(given: list[Token]) -> Answer:
    thousands = any(token.kind == "grouped" and ",0" in token.text for token in given)
    inside = given[1:-1] if thousands else [part for token in given[1:-1] for part in _ungrouped(token)]
    pieces, _ = _split(inside, (",", ";"))
    brackets = given[0].text + given[-1].text
    if brackets == r"\{\}":
        if any(token.text in ("|", ":", r"\mid") for token in inside) or not all(pieces):
            raise NotUnderstood("a set by a condition")
        items = _list([_item(piece) for piece in pieces], False)
        return Answer("set", items.parts if items.kind == "list" else (items,))
    if len(pieces) == 1:
        if brackets not in ("()", "[]", "{}"):
            raise NotUnderstood(brackets)
        return _answer(list(given[1:-1]))
    brackets = {r"\langle\rangle": "()"}.get(brackets, brackets)
    if brackets not in ("()", "[]", "(]", "[)"):
        raise NotUnderstood(brackets)
    choices = [item.parts if item.kind == "list" else [item] for item in map(_item, pieces)]
    rows = [Answer("row", parts, text=brackets) for parts in itertools.product(*choices)]
    return rows[0] if len(rows) == 1 else Answer("list", tuple(rows))


def _ungrouped(token: Token) -> list[Token]:
    """Return the numbers of `1,234` in brackets, where it is two; next to `1,000` it is one."""
    if token.kind != "grouped":
        return [token]
    numbers = [Token("number", text) for text in token.text.split(",")]
    return [part for number in numbers for part in (Token("sign", ","), number)][1:]


def _ratio(parts: list[list[Token]], colons: list[str]) -> Answer:
    numbers = [token for part in parts for token in part if token.kind == "number"]
    time = colons == [":"] and len(numbers) == 2 and all(number.text.isdigit() for number in numbers) and \
        len(numbers[1].text) == 2 and int(numbers[0].text) < 25 and int(numbers[1].text) < 60
    tail = "".join(token.text for token in parts[-1][1:]).lower() if time else ""
    half = "".join(sign for sign in tail if sign.isalpha())
    values = [Answer("value", node=_expression(part[:1] if time else part)) for part in parts]
    if half not in ("", "am", "pm") and time:
        raise NotUnderstood(f"`{half}` behind a time")
    return Answer("ratio", tuple(values), text=f"time {half}" if time else "")


def _digits(given: Sequence[Token]) -> str:
    """Return the digits of a number and its base as `1011_2`; "" if it is none."""
    texts = [token.text for token in given]
    length = 2 if texts[-2:-1] == ["_"] else 4 if texts[-4:-2] == ["_", "{"] and texts[-1] == "}" else len(texts)
    base, text = "".join(texts[-length:]).strip("_{}"), "".join(texts[:-length]).replace(",", "").upper()
    if not re.fullmatch(r"[0-9]{1,2}", base) or not 2 <= int(base) <= 36 or not re.fullmatch(r"[0-9A-Z]+", text):
        return ""
    if not text[0].isdigit() and (len(text) == 1 or int(base) <= 10):
        return ""  # a name with an index
    return f"{text.lstrip('0') or '0'}_{base}" if all(int(digit, 36) < int(base) for digit in text) else ""


def _expression(given: Sequence[Token]) -> Expression:
    return _without_degrees(expression(_without_units(list(given))))


def _without_units(given: list[Token]) -> list[Token]:
    """Remove units and percent signs behind a value, and a currency before it."""
    if given[:1] and given[0].text in {*CURRENCIES}:
        given = given[1:]
    end = at = len(given)
    while at > 1 and (_is_unit(given, at - 1) or given[at - 1].text in _OF_UNITS or given[at - 2].text == "/"):
        end = at - 1 if _is_unit(given, at - 1) else end
        at -= 1
    bare = given[:end]
    if bare and bare[-1].text == r"\degree" and any(token.text.lstrip("\\") in FUNCTIONS for token in bare):
        return bare
    while len(bare) > 1 and bare[-1].text in (r"\%", r"\degree"):
        bare = bare[:-1]
    return bare


def _is_unit(given: list[Token], at: int) -> bool:
    token = given[at]
    if IDEOGRAPHS.match(token.text.strip()):
        return is_unit(token.text.strip())
    if token.kind == "text":
        return not _RELATING & {*re.findall(r"[a-z]+", token.text.lower())} and token.text.strip() not in FUNCTIONS
    if token.kind != "word" or token.text in FUNCTIONS | {"sqrt", "pi", "infinity"}:
        return False
    if token.text in SHORT_UNITS and len(token.text) > 1:
        return not token.close or given[at - 1].kind == "number"
    return len(token.text) > 2 and not token.close and not _RELATING & {*re.findall(r"[a-z]+", token.text.lower())}


def _without_degrees(node: Expression) -> Expression:
    """Remove degree signs that stand outside of functions: they are a unit."""
    if node.kind in FUNCTIONS:
        return node
    parts = tuple(map(_without_degrees, node.parts))
    return parts[0] if node.kind == "degree" else Expression(node.kind, parts, node.value)


def _without_signs(node: Expression) -> list[Expression]:
    """Return the values that `±` stands for; `∓` is the opposite of the `±` beside it."""
    count = _count(node, r"\pm"), _count(node, r"\mp")
    if sum(count) > _MOST_SIGNS:
        raise NotUnderstood("many signs")
    tied = count[1] > 0
    choices = 2 if tied else 2 ** count[0]
    found = []
    for choice in range(choices):
        signs = iter([choice] * sum(count) if tied else [choice >> index & 1 for index in range(count[0])])
        found.append(_signed(node, lambda signs=signs: next(signs)))
    return found


def _count(node: Expression, kind: str) -> int:
    return (node.kind == kind) + sum(_count(part, kind) for part in node.parts)


def _signed(node: Expression, choose: Callable[[], int]) -> Expression:
    if node.kind in (r"\pm", r"\mp"):
        minus = bool(choose()) != (node.kind == r"\mp")
        part = _signed(node.parts[0], choose)
        return Expression("neg", (part,)) if minus else part
    return Expression(node.kind, tuple(_signed(part, choose) for part in node.parts), node.value)
