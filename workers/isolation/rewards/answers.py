"""Typed values of final answers, and when two of them are equal: numbers and expressions exactly, see `arithmetic`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from workers.isolation.rewards.arithmetic import equal, proportional
from workers.isolation.rewards.latex import Expression
from workers.isolation.rewards.quantities import differ, units_of

ORDER = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le", r"\ne": r"\ne"}
_EQUATED = ("named", "equation")
INFINITY = Expression("symbol", value=r"\infty")
_FUNCTION = re.compile(r"[A-Za-z]\([a-z]\)")


@dataclass(frozen=True)
class Answer:
    """`kind`: value (`node`), words (`text`), list, set, row (`text`: its brackets), union (`text`: its operator),
    equation (`parts`: its sides; `node`: the difference of the outer ones), named (the same, for the sides behind
    the name `text`), order (`text`: its operators), ratio (`text`: a time of day, as written) or digits (`text`, in a
    base)."""

    kind: str
    parts: tuple[Answer, ...] = ()
    node: Expression | None = None
    text: str = ""
    unit: str = field(default="", compare=False)
    percent: bool = field(default=False, compare=False)


def same(wanted: Answer, given: Answer) -> bool:
    """Return whether an answer is the wanted one, as they stand or with one of them in another form: `x = 3` answers 3,
    and 3 answers `x = 3`, but `y = 3` does not."""
    if wanted.kind in _EQUATED and given.kind in _EQUATED:
        return (wanted.kind == given.kind == "named" and _same_named(wanted, given)) or _same_equation(wanted, given)
    if wanted.kind in _EQUATED or given.kind in _EQUATED:
        sides = [answer.parts[-1] if answer.kind in _EQUATED else answer for answer in (wanted, given)]
        return settled(wanted if wanted.kind in _EQUATED else given) and same(*sides)
    return _alike(wanted, given) or any(_alike(wanted, form) for form in _forms(given)) or any(
        _alike(form, given) for form in _forms(wanted))


def _alike(wanted: Answer, given: Answer) -> bool:
    return wanted.kind == given.kind and _COMPARISONS[wanted.kind](wanted, given)


def _forms(answer: Answer) -> Iterator[Answer]:
    """Yield what else an answer may be."""
    if answer.kind in ("list", "set"):
        yield Answer("list" if answer.kind == "set" else "row", answer.parts, text="()")
        yield from (answer.parts[0], *_forms(answer.parts[0])) if len(answer.parts) == 1 else ()
    elif answer.kind == "order" and (found := interval(answer)):
        yield found
    elif answer.kind == "row" and answer.text in ("()", "[]"):
        yield from _matrices(answer)
    elif answer.kind == "ratio" and not answer.text and len(answer.parts) == 2:
        yield Answer("value", node=Expression("/", tuple(part.node for part in answer.parts if part.node)))
    elif answer.kind == "digits" and (digits := answer.text.partition("_")[0]).isdigit():  # the question names the base
        yield Answer("value", node=Expression("number", value=Fraction(digits)))


def settled(answer: Answer) -> bool:
    """Return whether the sides that an answer equates are all equal, behind its name."""
    return all(same(part, answer.parts[-1]) for part in answer.parts[:-1])


def interval(order: Answer) -> Answer | None:
    """Return `2 < x < 5` as an interval."""
    signs, parts = order.text.split(), list(order.parts)
    if signs[0] in (">", r"\ge"):
        signs, parts = [ORDER[sign] for sign in reversed(signs)], parts[::-1]
    if not set(signs) <= {"<", r"\le"}:
        return None
    if len(parts) == 2:
        at_end = parts[1].node is not None and parts[1].node.kind == "symbol"
        bound = Answer("value", node=INFINITY if at_end else Expression("neg", (INFINITY,)))
        signs, parts = ([*signs, "<"], [*parts, bound]) if at_end else (["<", *signs], [bound, *parts])
    middle = parts[1].node
    if len(parts) != 3 or middle is None or middle.kind != "symbol":
        return None
    brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
    return Answer("row", (parts[0], parts[2]), text=brackets)


def _matrices(row: Answer) -> Iterator[Answer]:
    """Yield `[[1, 2], [3, 4]]` as a matrix, or a vector as `(1, 2)` as a column and as a row."""
    rows = [part.parts if part.kind == "row" else (part,) for part in row.parts]
    cells = tuple(cell.node for each in rows for cell in each if cell.node is not None)
    if len({len(each) for each in rows}) == 1 and len(cells) == sum(map(len, rows)):
        for height in {len(rows), len(rows) if len(rows[0]) > 1 else 1}:
            yield Answer("value", node=Expression("matrix", cells, height))


def _same_named(wanted: Answer, given: Answer) -> bool:
    alike = wanted.text == given.text or any(names[0] == "y" and _FUNCTION.fullmatch(names[1]) for names in (
        (wanted.text, given.text), (given.text, wanted.text)))
    return alike and settled(wanted) and settled(given) and same(wanted.parts[-1], given.parts[-1])


def _same_equation(wanted: Answer, given: Answer) -> bool:
    return wanted.node is not None and given.node is not None and proportional(wanted.node, given.node)


def _same_value(wanted: Answer, given: Answer) -> bool:
    if wanted.node is None or given.node is None or differ(units_of(wanted.unit), units_of(given.unit)):
        return False
    if wanted.node.kind == given.node.kind == "symbol":
        return str(wanted.node.value).casefold() == str(given.node.value).casefold()
    share, other = (wanted.node, given.node) if wanted.percent else (given.node, wanted.node)
    return equal(share, other) or (wanted.percent != given.percent and equal(
        Expression("/", (share, Expression("number", value=Fraction(100)))), other))


def _same_items(wanted: Answer, given: Answer) -> bool:
    """Compare items in any order."""
    left = list(given.parts)
    for item in wanted.parts if len(left) == len(wanted.parts) else ():
        match = next((index for index, other in enumerate(left) if same(item, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _same_row(wanted: Answer, given: Answer) -> bool:
    alike = wanted.text == given.text or (len(wanted.parts) > 2 and {wanted.text, given.text} == {"()", "[]"})
    return alike and len(wanted.parts) == len(given.parts) and all(map(same, wanted.parts, given.parts))


def _same_union(wanted: Answer, given: Answer) -> bool:
    return wanted.text == given.text and (_same_row if wanted.text == r"\setminus" else _same_items)(wanted, given)


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


def _below(order: Answer) -> list[tuple[str, Expression]]:
    """Return the operator of each inequality, `<`, `\\le` or `\\ne`, and the expression that it compares with 0."""
    found = []
    for sign, left, right in zip(order.text.split(), order.parts, order.parts[1:]):
        if sign in (">", r"\ge"):
            sign, left, right = ORDER[sign], right, left
        if left.node is not None and right.node is not None:
            found.append((sign, Expression("+", (left.node, Expression("neg", (right.node,))))))
    return found


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


def _same_text(wanted: Answer, given: Answer) -> bool:
    return wanted.text.casefold() == given.text.casefold()


_COMPARISONS: dict[str, Callable[[Answer, Answer], bool]] = {
    "value": _same_value, "words": _same_text, "digits": _same_text, "list": _same_items, "set": _same_items,
    "row": _same_row, "union": _same_union, "order": _same_order, "ratio": _same_ratio}
