"""Numbers as people say them: alone, in words, and with words and units around them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from fractions import Fraction

from workers.isolation.rewards.answers import Answer
from workers.isolation.rewards.latex import IDEOGRAPHS, NotUnderstood, Token, literal, names
from workers.isolation.rewards.quantities import CURRENCIES, NO_UNITS, SHORT_UNITS, differ, is_unit, units_of
from workers.isolation.rewards.reader import COUNTS, SCALES, counted, parse_whole, plain, quantity, spelled, words_of

_NAME = re.compile(r"\s*(?:(?:(?:so|thus|hence|therefore|then),?\s+)?[^\W\d_]\s*[=≈:]|"
                   r"(?:उत्तर|উত্তর|คำตอบ|đáp (?:án|số))\s*:)\s*", re.IGNORECASE)
_BEFORE = re.compile(rf"[\w\s.,;:'’$&{CURRENCIES}-]*[=≈]?\s*")
_AFTER = re.compile(rf"[\w\s.,;:'’$%/&{CURRENCIES}-]*(?:(?<=[^\W\d_])!)?")
_OPERATOR = re.compile(r"\s[-/&]|[-/&](?:\s|$)|^&|^[-/](?![^\W\d_]{3})")
"""Operators after a number that are not part of a word, unlike `km/h` and `24-year-old`."""
_WORD = re.compile(r"[^\W\d_]+")
_SHORT = SHORT_UNITS | names(
    "a A I an at be by go he He if If in In is it It my of on On per sq cu so So to To up us US we We")
"""Words of one or two letters that may stand beside a number; others are the names of variables."""
_LEADS = names(
    "answer result total value sum cost price number solution is are was were be equals equal equaling gives give "
    "gave get gets got have has had need needs needed make makes made earn earns earned pay pays paid spend "
    "spends spent costs sell sells sold buy buys bought save saves saved take takes took eat eats ate read reads "
    "walk walks walked run runs ran use uses used want wants about approximately roughly around exactly only just "
    "another precisely altogether s us usd eur gbp inr rs cad aud dollars therefore thus hence so")
"""Words that may stand right before a number."""
_NOT_BEFORE = names(
    "or not no nor never neither nothing none without but except than least most between minus plus times under "
    "below above over half twice double root negative")
"""Words that change the meaning of a number."""
_LIMITING = re.compile(
    "[不没沒无無非或负負]|ない|아니|아닌|[至最][少多]|[大小多少高低][于於]|超过|超過|以[内內]|一半|半分|[两兩双雙]倍|方根|절반|제곱근|少なくとも|多くとも|적어도|최소한|최대한")
"""The same in East Asian scripts, within a word."""
_NEGATIVE = re.compile(rf"\b(?:negative|minus)\s+(?=[{CURRENCIES}]?\s*\.?[0-9])", re.IGNORECASE)
_LABEL = re.compile(r"[:=≈]\s*$")
_SAYS = re.compile(r".*(?:是|为|為|等于|等於|得|共|有|答案?|は|が|은|는)")
_WHICH = re.compile(r"(?:\s*,\s+which\b(?!.*(?:\b(?:not|cannot|wrong|incorrect|false)\b|n['’]t\b))[^0-9]*|"
                    r"(?:\A|\s+)(?:is|was) (?:the|my) (?:(?:final|correct|right) )?answer)\W*\Z")
_IN_TEXT = re.compile(r"(?<![0-9.^{])[-+]?(?:\\frac ?(?:\{ ?[0-9]+ ?\} ?\{ ?[0-9]+ ?\}|[0-9]{2})|"
                      r"[0-9]+ [0-9]+ ?/ ?[1-9][0-9]*|(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)?"
                      r"(?:(?<=[0-9])|\.[0-9])[0-9]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2}(?![0-9])|"
                      r" ?\* ?10 ?\^ ?(?:\{ ?-?[0-9]{1,2} ?\}|[0-9])| ?/ ?[1-9][0-9]*)?)")


@dataclass(frozen=True)
class Number:
    """A number, whether it was written as a fraction or a percentage, and its unit by what it may measure."""

    value: Fraction
    divided: bool = False
    percent: bool = False
    units: dict[str, str] = field(default_factory=dict)

    def answers(self, wanted: Number, strict: bool) -> bool:
        """Return whether this is the wanted number; if `strict`, a division that is not carried out is no integer."""
        if differ(wanted.units, self.units) or (
                strict and self.divided and self.value == wanted.value and wanted.value.denominator == 1):
            return False
        if self.percent != wanted.percent:
            share, other = (self.value, wanted.value) if self.percent else (wanted.value, self.value)
            return other in (share, share / 100)
        return self.value == wanted.value


def number(answer: Answer | None) -> Number | None:
    """Return the number that an answer is, as it stands; None if it is none, several, or an expression."""
    if answer is None or answer.node is None or answer.kind != "value" or (found := literal(answer.node)) is None:
        return None
    return Number(*found, answer.percent, _units_of(answer.unit))


@functools.lru_cache(maxsize=65536)
def read_number(text: str) -> Number | None:
    """Return the number that a final answer gives, which may be a variable's, and have words around it."""
    answer = parse_whole(text)
    while answer is not None and len(answer.parts) == 1 and (answer.kind == "set" or len(answer.text) == 1):
        answer = answer.parts[0]
    if answer is not None and answer.kind == "list":
        numbers = [number(part) for part in answer.parts]
        if None not in numbers and len({(each.value, each.percent) for each in numbers if each}) == 1:
            return numbers[0]  # in several forms
    return number(answer) or _said(text)


def _said(text: str) -> Number | None:
    try:
        given = _without_remarks(words_of(_NEGATIVE.sub("-", counted(plain(text)))))
        first = next((index for index, token in enumerate(given) if _is_number(token)), None)
        if first is None:
            return None
        while first and given[first - 1].text in ("+", "-", "$", *CURRENCIES):
            first -= 1
        last = next((index for index in range(first, len(given)) if given[index].kind in ("word", "text")), len(given))
        while given[last - 1].kind == "sign" and given[last - 1].text in ".,;:'!?-/&":
            last -= 1
        if last < len(given) and given[last].kind == "word" and given[last].close and not units_of(given[last].text):
            return None  # a product, as `3ab`
        lead, tail = spelled(given[:first]).replace(r"\approx", "≈"), _WHICH.sub("", spelled(given[last:]))
        if re.search(r"[0-9]", tail) or not _leads(lead) or not _follows(tail):
            return None
        found = number(quantity(given[first:last]))
    except NotUnderstood:
        return None
    unit = _WORD.findall(tail.lower())
    scale = SCALES.get(unit[0], 1) if unit else 1
    if found is None or (COUNTS.keys() | SCALES) & set(unit[1 if scale > 1 else 0 :]):
        return None
    percent = found.percent or unit[:1] == ["percent"]
    return Number(found.value * scale, found.divided, percent, found.units or _units_of(tail.strip(".,;:!? ")))


def last_number(text: str) -> Number | None:
    """Return the last number of a text, wherever it stands."""
    found = _IN_TEXT.findall(plain(text[-1000:]))
    return read_number(found[-1].rstrip(",")) if found else None


def _is_number(token: Token) -> bool:
    return token.kind in ("number", "grouped") or token.text == r"\frac"


def _without_remarks(given: list[Token]) -> list[Token]:
    """Remove what stands in parentheses behind a blank; where they hold the number, remove only them."""
    kept, depth = [], 0
    for token in given:
        depth += token.text == "(" and (depth > 0 or not token.close)
        kept += [] if depth else [token]
        depth -= token.text == ")" and depth > 0
    kept = kept if any(map(_is_number, kept)) else given
    alone = [token for token in kept if token.text not in ("(", ")", "[", "]")]
    return alone if len(kept) - len(alone) == 2 and "grouped" not in [token.kind for token in kept] else kept


def _leads(before: str) -> bool:
    """Return whether a number may stand behind these words, or behind the name of a variable, as in `x = 24`."""
    before = re.sub(r"(?<=\w)['’]s\b", " is", before)
    if _NAME.fullmatch(before):
        return True
    words = _WORD.findall(before)
    lower = [word.lower() for word in words]
    if (not _BEFORE.fullmatch(before) or before.rstrip().endswith(("-", "&")) or _NOT_BEFORE & set(lower)
        or _LIMITING.search(before) or any(len(word) < 3 and word not in _SHORT and word.lower() not in _LEADS
                                          and not IDEOGRAPHS.match(word) for word in words)):
        return False
    if lower[-2:-1] and lower[-1] == "of":
        lower.pop()
        return lower[-1] in ("answer", "total", "cost", "value", "result")
    return not lower or lower[-1] in _LEADS or _SAYS.fullmatch(lower[-1]) is not None or \
        _LABEL.search(before) is not None


def _follows(after: str) -> bool:
    """Return whether what stands behind a number are units and words that leave it what it is."""
    words = _WORD.findall(after)
    lower = [word.lower() for word in words]
    return (_AFTER.fullmatch(after) is not None and not _OPERATOR.search(after) and not NO_UNITS & set(lower)
            and "times" not in lower[:-1] and lower[:1] not in (["a"], ["i"]) and lower[-1:] not in (["a"], ["i"])
            and all(is_unit(word) if IDEOGRAPHS.search(word) else len(word) > 2 or word in _SHORT for word in words))


def _units_of(text: str) -> dict[str, str]:
    """Return the unit, by what it may measure, of one word behind a number, or of a currency."""
    words = _WORD.findall(text)
    return units_of(text.strip()) or (units_of(words[0]) if len(words) == 1 else {})
