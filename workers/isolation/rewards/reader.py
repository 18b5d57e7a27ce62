"""Reads final answers as people write them: text → an `Answer`, or None where any of it is not understood."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from workers.isolation.rewards.answers import INFINITY, ORDER, Answer, interval, settled
from workers.isolation.rewards.arithmetic import computable
from workers.isolation.rewards.latex import (
    FUNCTIONS,
    IDEOGRAPHS,
    Expression,
    NotUnderstood,
    Token,
    expression,
    literal,
    tokens,
)
from workers.isolation.rewards.quantities import CURRENCIES, NO_UNITS, SHORT_UNITS, is_unit

_OPENERS, _ENDS = ("(", "[", r"\{", r"\langle", "{"), (")", "]", r"\}", r"\rangle", "}")
_EQUAL = ("=", r"\in", r"\approx")
_SETS = (r"\cup", r"\cap", r"\setminus")
_JOINS = (",", ";", "and", "or", r"\land", r"\lor", r"\wedge", r"\vee")
_OF_NAMES = (r"\overline", r"\angle", r"\triangle", r"\vec", r"\overrightarrow", r"\widehat", r"\hat", "|", "'", "(",
             ")", "{", "}", "[", "]", ",", "_", ":", "-")
_NOTHING, _SYNONYMS = ("nosolution", "nosolutions", "emptyset", "theemptyset"), {"DNE": "doesnotexist"}
SHORT_WORDS = frozenset(["yes", "no", "odd", "red"])
_RELATING = NO_UNITS | frozenset([
    "and", "if", "when", "where", "for", "than", "least", "most", "times", "any", "every"])
_MONEY = frozenset(["$", *CURRENCIES])
_COUNTED_WORDS = re.findall("[a-z]+", (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"))
COUNTS = dict(zip(_COUNTED_WORDS, [*range(20), *range(20, 100, 10)]))
_SHARES = (r"\%", r"\degree", "percent")
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ONES, _TENS = "|".join(_COUNTED_WORDS[1:10]), "|".join(_COUNTED_WORDS[20:])
_BELOW_100 = rf"(?:(?:{_TENS})(?:[\s-](?:{_ONES}))?|{'|'.join(_COUNTED_WORDS[:20])})"
_BELOW_1000 = rf"(?:(?:{_ONES}|a)\shundred(?:(?:\sand)?\s{_BELOW_100})?|{_BELOW_100})"
_COUNTED = re.compile(
    rf"\s*{_BELOW_1000}(?:\s(?:thousand|million|billion)(?:(?:\sand)?\s{_BELOW_1000})?)*(?![\w-]|\sof\b)",
    re.IGNORECASE)
_OF_UNITS = ("^", "{", "}", "/", "per", r"\%")
_ROMAN = re.compile("[IVX]+")
_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
           "december")
_DATES = [re.compile(pattern) for pattern in (
    r"(?P<y>[0-9]{4})(?:-|\s*年\s*)(?P<m>[0-9]{1,2})(?:-|\s*月\s*)(?P<d>[0-9]{1,2})\s*日?",
    r"(?P<m>[a-z]{3,9})\.?\s+(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?(?:,?\s+(?P<y>[0-9]{4}))?",
    r"(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<m>[a-z]{3,9})\.?(?:,?\s+(?P<y>[0-9]{4}))?")]
_UNIT_POWER = re.compile(r"(?<=[^\W\d_])\.?\s*\^\s*(?:\{\s*)?([23])(?:\s*\})?")
_PLAIN = re.compile(r"-?[0-9]{1,100}(?:\.[0-9]{1,100})?")
_SLASHED = re.compile(r"[0-9]{1,2}([/.])[0-9]{1,2}\1[0-9]{4}")
_OUTWARD = re.compile(r"\A\s*\][^\[\]]+[\[\]]|[\[\]][^\[\]]+\[\s*\Z")
_ENDS_OF = re.compile(r"([\[\]])([^\[\]]+)([\[\]])")
"""Intervals whose open ends have brackets that point outward, as `]3, 5[`."""
_DEEPEST = 40  # brackets in each other
_MOST_ITEMS = 60
_MOST_SIGNS = 4  # `±` in one expression


@functools.lru_cache(maxsize=65536)
def parse_whole(text: str) -> Answer | None:
    """Return the answer that a text is; None if any of it is not understood."""
    if _PLAIN.fullmatch(text):
        return Answer("value", node=Expression("number", value=Fraction(text)))
    try:
        if day := _date(text):
            return Answer("words", text=day)
        if (number := counted(said := text.strip("$ ").rstrip(". "))) != said and number.isdigit():
            text = number
        if _OUTWARD.search(text):
            text = _ENDS_OF.sub(lambda found: f"{'(['[found[1] == '[']}{found[2]}{')]'[found[3] == ']']}", text)
        given = words_of(text)
        if max(itertools.accumulate(map(_step, given)), default=0) > _DEEPEST:
            return None
        return _answer(given)
    except NotUnderstood:
        return None


def _date(text: str) -> str:
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
    own = answer.kind != "value" or answer.node == INFINITY or answer.node is None or computable(answer.node)
    whole = answer.kind != "named" and (answer.kind != "equation" or answer.node is not None) or settled(answer)
    return own and whole and all(map(is_computable, answer.parts))


def spelling(text: str) -> str:
    """Return a text without what says nothing: blanks, markup, `\\text{}`, braces around one sign."""
    try:
        found = [" " * (token.kind == "number") + token.text.strip() for token in words_of(text)]
    except NotUnderstood:
        return text.strip()
    found = [{r"\dots": r"\ldots", r"\cdots": r"\ldots"}.get(sign, sign) for sign in found]
    return re.sub(r"\{\0([^{}\0]*)\0\}", r"\1", "\0".join(found)).replace("\0", "").rstrip(".")


def counted(text: str) -> str:
    """Return a text with digits for the words that it begins with, such as `forty-two` and `three hundred and five`."""
    total = part = 0
    found = _COUNTED.match(text)
    for word in re.findall(r"[a-z]+", found[0].lower()) if found else ():
        part += COUNTS.get(word, 0)
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in SCALES:
            total, part = total + max(part, 1) * SCALES[word], 0
    return f"{total + part}{text[found.end():]}" if found else text


@functools.lru_cache(maxsize=4096)
def words_of(text: str) -> list[Token]:
    """Return the tokens of a text, with those inside of `\\text{}`, where it holds more than words."""
    found: list[Token] = []
    for token in tokens(text):
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
    sets = [interval(item) if item.kind == "order" else item for item in items] if either else [None]
    if all(item is not None and item.kind == "row" for item in sets):
        return Answer("union", tuple(item for item in sets if item), text=r"\cup")
    names = [item.text if item.kind == "named" else "" for item in items]
    if names[0] and all(name in (names[0], "") for name in names) and (all(names) or not any(names[1:])):
        bodies = [item.parts[-1] if item.kind == "named" else item for item in items]
        return Answer("named", (_list(bodies, False),), text=names[0])
    return Answer("list", tuple(items))


def _words(given: list[Token]) -> str:
    """Return the words that an answer consists of, the names of figures in it, or its one sign as `<`; else ""."""
    if len(given) == 1 and given[0].text in ORDER:
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
    sides, signs = _split(given, (*_EQUAL, *ORDER))
    if not signs:
        return _set(given)
    if set(signs) <= set(_EQUAL):
        return _equation(sides, signs)
    if set(signs) <= set(ORDER) and all(sides):
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
        name = "".join(token.text.strip() for token in sides[0])
        return Answer("named", tuple(map(_set, sides[1:])), node=_difference(sides), text=name)
    parts = tuple(Answer("value", node=_expression(side)) for side in sides)
    return Answer("equation", parts, node=_difference(sides) if signs == ["="] else None)


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
        parts = tuple(map(_single, pieces))
        if signs[0] == r"\cup" and all(part.kind == "set" for part in parts):
            return Answer("set", tuple(dict.fromkeys(item for part in parts for item in part.parts)))
        return Answer("union", parts, text=signs[0])
    return _single(given)


def _single(given: list[Token]) -> Answer:
    texts = [token.text for token in given]
    if texts in ([r"\emptyset"], [r"\{", r"\}"]):
        return Answer("set")
    if len(given) == 1 and given[0].kind == "ring":
        ring = texts[0].strip("\\mathb{} ")
        ends = tuple(Answer("value", node=node) for node in (Expression("neg", (INFINITY,)), INFINITY))
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
    return quantity(given)


def quantity(given: list[Token]) -> Answer:
    """Read a value with its unit, or the values that `±` stands for."""
    bare = _without_units(given)
    money = [token for token in given if token.text in _MONEY]
    behind = [token for token in given if token not in money][len(bare) :]
    unit = spelled(token for token in behind if token.text not in _SHARES)
    percent = any(token.text in (r"\%", "percent") for token in behind)
    text = "".join(token.text for token in given) if all(token.kind in ("word", "text") for token in given) else ""
    node = _without_degrees(expression(bare))
    scale, _, rest = unit.partition(" ")
    if scale in SCALES:
        node, unit = Expression("*", (node, Expression("number", value=Fraction(SCALES[scale])))), rest
        if value := literal(node.parts[0]):
            node = Expression("number", value=value[0] * SCALES[scale])
    unit = money[0].text if money else unit
    found = [Answer("value", node=value, text=text, unit=unit, percent=percent) for value in _without_signs(node)]
    return found[0] if len(found) == 1 else Answer("list", tuple(found))


def plain(text: str) -> str:
    """Return a text without markup; "" if it is too long for an answer."""
    try:
        return spelled(words_of(text))
    except NotUnderstood:
        return ""


def spelled(given: Iterable[Token]) -> str:
    """Return tokens as text, with powers of units as words."""
    text = "".join(f"{'' if token.close else ' '}{token.text}" for token in given).strip()
    return _UNIT_POWER.sub(lambda power: {"2": " sq", "3": " cu"}[power[1]], text)


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
    given = [token for token in given if token.text not in _MONEY]
    end = at = len(given)
    while at > 1 and (_is_unit(given, at - 1) or _is_of_unit(given, at - 1)):
        end = at - 1 if _is_unit(given, at - 1) else end
        at -= 1
    bare = given[:end]
    if bare and bare[-1].text == r"\degree" and any(token.text.lstrip("\\") in FUNCTIONS for token in bare):
        return bare
    while len(bare) > 1 and bare[-1].text in (r"\%", r"\degree"):
        bare = bare[:-1]
    return bare


def _is_of_unit(given: list[Token], at: int) -> bool:
    token, before = given[at], given[at - 1]
    if token.text in ("2", "3"):  # a power, and no second number as in `5 feet 2 inches`
        return before.text in ("^", "{") or (token.close and before.kind in ("word", "text"))
    return token.text in _OF_UNITS or (before.text == "/" and token.kind in ("word", "text"))


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
