"""Rewards of a text's content and form: `math`, `format`, `length`. Parses final answers and numbers."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from distflow.contracts.decorators import Regex, reward
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import current
from workers.isolation.rewards import behind_thoughts
from workers.isolation.rewards.answers import SHORT_WORDS, date, parse_whole, readings, same, spelling
from workers.isolation.rewards.latex import FULL_WIDTH, IDEOGRAPHS, names
from workers.isolation.rewards.quantities import CURRENCIES, NO_UNITS, SHORT_UNITS, differ, is_unit, units_of

MARK = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_LONGEST = 1000  # characters of a number; Python turns no more than 4,300 digits into one
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]+)"
_VALUE = (rf"(?:[0-9]+\s+)?{_DIGITS}\s*/\s*[1-9][0-9]*|"
          rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}}(?![0-9]))?")
_NUMBER = re.compile(rf"(?P<before>[^0-9]*?)(?P<sign>[-+]?)\s*[{CURRENCIES}]?\s*(?P<value>{_VALUE})(?P<after>[^0-9]*)")
_REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?\s*([0-9]+)\s*\}?(\s*\\?%)?\.?")
_GOES_ON = re.compile(r"\.([0-9]{0,20}?)(?:([0-9])\2\2+|([0-9]{2,9}?)\3+)(?:\.{3}|…|\\l?dots)")
"""A decimal whose last digits repeat, as `0.333...`."""
_IN_TEXT = re.compile(rf"(?<![0-9.])[-+]?(?:{_VALUE})")
_NAME = re.compile(r"\s*(?:(?:(?:so|thus|hence|therefore|then),?\s+)?[^\W\d_]\s*[=≈:]|"
                   r"(?:उत्तर|উত্তর|คำตอบ|đáp (?:án|số))\s*:)\s*", re.IGNORECASE)
_BEFORE = re.compile(rf"[\w\s.,;:'’{CURRENCIES}&-]*[=≈]?\s*")
_AFTER = re.compile(rf"[\w\s.,;:'’{CURRENCIES}%/&-]*(?:(?<=[^\W\d_])!)?")
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
_SPACES = re.compile(r"\s+")
_LABEL = re.compile(r"[:=≈]\s*$")
_SAYS = re.compile(r".*(?:是|为|為|等于|等於|得|共|有|答案?|は|が|은|는)")
_TAIL = re.compile(r"\s+(?:is|was) (?:the|my) (?:(?:final|correct|right) )?answer$")
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = ["ten", "eleven", "twelve", *(f"{name}teen" for name in (
    "thir", "four", "fif", "six", "seven", "eigh", "nine"))]
_TENS = [f"{name}ty" for name in ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")]
_COUNTS = dict(zip(["zero", *_ONES, *_TEENS, *_TENS], [*range(20), *range(20, 100, 10)]))
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[\s-](?:{'|'.join(_ONES)}))?|{'|'.join(['zero', *_TEENS, *_ONES])})"
_BELOW_1000 = rf"(?:(?:{'|'.join(_ONES)}|a)\shundred(?:(?:\sand)?\s{_BELOW_100})?|{_BELOW_100})"
_COUNTED = re.compile(
    rf"{_BELOW_1000}(?:\s(?:thousand|million|billion)(?:(?:\sand)?\s{_BELOW_1000})?)*(?![\w-]|\sof\b)", re.IGNORECASE)
_PART = r"(?:\{\s*([-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))\s*\}|([0-9]))"


def _divided(braced: str, top: str, below: str, bottom: str) -> str:
    """Return a fraction of LaTeX as a sign and two integers that need not be reduced."""
    parts = [Fraction(braced or top), Fraction(below or bottom)]
    places = 10 ** max((len(part.partition(".")[2]) for part in (braced, below)), default=0)
    whole = [int(abs(part) * places) for part in parts]
    return f"{'-' if (parts[0] < 0) != (parts[1] < 0) else ''}{whole[0]}/{whole[1]}"


def _ungrouped(found: re.Match[str]) -> str:
    """Return a number without what groups its thousands; dots do where a comma or a second dot follows them."""
    whole, part = found.groups()
    if "." in whole and part is None and whole.count(".") < 2:
        return found[0]
    return re.sub(r"(?<=[0-9])[ '’_.]", "", whole) + (f".{part}" if part else "")


_MARKUP = tuple((re.compile(pattern), to) for pattern, to in (
    (r"(?![0-9])\d", lambda found: str(unicodedata.digit(found[0]))),
    (r"[¼-¾⅐-⅞]", lambda found: f" {unicodedata.normalize('NFKC', found[0]).replace('⁄', '/')} "),
    (r"[−–]", "-"),
    (r"(?<=[0-9])\s*([apAP])\.?\s?[mM]\b\.?", lambda found: f" {found[1].lower()}m"),
    (r"\{,\}", ","),
    (r"\A([^\w.,]*[0-9]{1,3}(?:[ '’_.][0-9]{3})+)(?:,([0-9]{1,2}))?(?![0-9.,/ ]*[0-9/])", _ungrouped),
    (r"(?<=10)[⁰¹²³⁴-⁹⁻]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace('−', '-')}}}"),
    (r"\\!|\\(?:left|right|displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge|bf)(?![a-z])|"
     r"(?<!\\)\\+\s*\Z", ""),
    (r"(?<=[0-9])(?:\\,|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\(?:text)?color\s*(?:\[[^\[\]]*\])?\{[^{}]*\}", ""),
    (r"\\(?:text\w*|math\w+|mbox|operatorname|underline|boldsymbol|bm)\s*\{([^{}]*)\}", r" \1 "),
    (rf"\\[cdt]?frac\s*{_PART}\s*{_PART}", lambda found: f" {_divided(*(part or '' for part in found.groups()))} "),
    (r"\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,2})\s*\}|([0-9]))(?![0-9])", r"e\1\2"),
    (r"^\s*\\?\{([^{}\\]*)\\?\}\s*$", r"\1"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°", " degrees "),
    (r"(?:(?<=[A-Za-z]{2})|(?<=[A-Za-z]{2}\.)|(?<=[\s0-9/]m)|(?<=/[sh]))\s*(?:\^\s*(?:([23])|\{([23])\})|([²³]))",
     lambda found: " sq" if (found[1] or found[2] or found[3]) in "2²" else " cu"),
    (r"\\approx", "≈"),
    (r"\\%", "%"),
    (r"\\\$|\\[()\[\],;: ]|\\quad|[$*_`~\"“”\u00a0\u2009\u202f]", " "),
))  # markup without a meaning for the value: patterns and replacements, applied in this order


@dataclass(frozen=True)
class Number:
    """A number, and whether it was written as a fraction or a percentage."""

    value: Fraction
    divided: bool = False
    percent: bool = False

    def answers(self, wanted: Number, strict: bool) -> bool:
        """Return whether this is the wanted number; if `strict`, a division that is not carried out is no integer."""
        if strict and self.divided and self.value == wanted.value and wanted.value.denominator == 1:
            return False
        if self.percent != wanted.percent:
            share, other = (self.value, wanted.value) if self.percent else (wanted.value, self.value)
            return other in (share, share / 100)
        return self.value == wanted.value


def marked_answer(text: str) -> str | None:
    """Return what stands in the last `\\boxed{}` or behind the last `####`, whichever is later, of what follows the
    thoughts; within the last `<answer>`, where there is one, which is a mark itself. None without any."""
    said = _without_thoughts(text)
    _, *tagged = re.split("<answer>", said, flags=re.IGNORECASE)
    if tagged:
        inside = re.split("</answer>", tagged[-1], maxsplit=1, flags=re.IGNORECASE)[0].strip()
        return inside if (marked := _marked(inside)) is None else marked
    return _marked(said)


def _without_thoughts(text: str) -> str:
    """Return what follows thoughts: the whole text where nothing does, and nothing where they are cut off."""
    behind = behind_thoughts(text)
    return "" if behind is None else behind if behind.strip() else text


def _marked(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    hashes = text.rfind(MARK)
    if boxes and boxes[-1].start() > hashes:
        return _inside(text[boxes[-1].end() :])
    return None if hashes < 0 else text[hashes + len(MARK) :].strip()


def read_number(text: str) -> Number | None:
    """Return the number that a final answer gives; None if it gives none, several, or an expression.

    It may have a sign, separators, decimals, a percent sign, a currency, units and some words, be a fraction, mixed or
    scientific, in LaTeX or Markdown, and have remarks in parentheses behind it.
    """
    if len(text) > _LONGEST:
        return None
    bare = _GOES_ON.sub(lambda found: rf".{found[1]}\overline{{{found[2] or found[3]}}}", text.strip().strip("$ "))
    if repeating := _REPEATING.fullmatch(bare):
        sign, whole, digits, again, percent = repeating.groups()
        period = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(digits))
        value = Fraction(f"{whole or 0}.{digits or 0}") + period
        return Number(-value if sign else value, percent=percent is not None)
    plain = _TAIL.sub("", _without_remarks(_without_markup(text)).strip().rstrip(".,;: "))
    if counted := _COUNTED.match(plain):
        plain = f"{_counted(counted[0])}{plain[counted.end():]}"
    found = _NUMBER.fullmatch(_NEGATIVE.sub("-", plain))
    if any(sign.isnumeric() and not sign.isascii() for sign in IDEOGRAPHS.sub("", plain)):  # exponents, other digits
        return None
    if not found or not _leads(found["before"]) or not _follows(found["after"]):
        return None
    unit = _WORD.findall(found["after"].lower())
    scale = _SCALES.get(unit[0], 1) if unit else 1
    if (_COUNTS.keys() | _SCALES) & set(unit[1 if scale > 1 else 0 :]):
        return None
    value = _value(found["value"]) * scale * (-1 if found["sign"] == "-" else 1)
    percent = found["after"].strip().startswith("%") or unit[:1] == ["percent"]
    return Number(value, "/" in found["value"], percent)


def _counted(words: str) -> int:
    """Return the number that words are, such as `forty-two` and `three hundred and five`."""
    total = part = 0
    for word in re.findall(r"[a-z]+", words.lower()):
        part += _COUNTS.get(word, 0)
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
    return total + part


def reference_number(text: str) -> Number | None:
    """Return the number that a reference is, or None. It is read more strictly: it may have a currency, a percent sign,
    a unit and words in `\text{}`, but no remark, variable or words before it (`3a`, `(2,100)` and `5 May` are none)."""
    if counted := _COUNTED.fullmatch(text.strip(" .")):
        return Number(Fraction(_counted(counted[0])))
    bare = IDEOGRAPHS.sub(" ", _without_markup(_TEXT.sub(" ", text[:_LONGEST])))
    glued = re.search(r"[0-9]([^\W\d_]+)", re.sub(r"(?<=[0-9])[eE](?=[-+]?[0-9])", "", bare))
    words = _WORD.findall(re.sub(r"(?<=[0-9])[eE](?=[-+]?[0-9])", "", bare))
    if "(" in bare or date(text[:_LONGEST]) or (glued and len(glued[1]) < 2) or (glued and glued[1] not in SHORT_UNITS):
        return None
    if any(len(word) == 1 or (len(word) == 2 and word not in _SHORT) for word in words):
        return None
    return None if re.match(r"[^0-9]*[^\W\d_]", bare) else read_number(text)


def last_number(text: str) -> Number | None:
    """Return the last number of a text, wherever it stands."""
    found = [match[0] for match in _IN_TEXT.finditer(_without_markup(text[-_LONGEST:]))]
    return read_number(found[-1]) if found else None


def last_sentence(text: str) -> str:
    """Return the last sentence of a text, without signs before it, as `✅`, and Minerva's hope behind it."""
    said, hope, end = text.rpartition(" I hope it is correct")
    lines = [line.strip() for line in (said if hope and end.strip() in ("", ".") else text).splitlines()
             if re.search(r"\w", line)]
    return _SIGNS.sub("", re.split(r"(?<=[.!?])\s+", lines[-1])[-1]) if lines else ""


def spoken_answer(text: str) -> list[str]:
    """Return what the last sentence of a text may give as its answer: what stands behind "answer is", or the formula at
    its end."""
    sentence = last_sentence(text).rstrip(".! ")
    formula = _FORMULA.search(sentence)
    denied = formula and _DENIED.search(sentence[max(0, formula.start() - 40) : formula.start()])
    found = [_ANSWER.search(sentence), None if denied else formula]
    return [next(part for part in match.groups() if part is not None) for match in found if match]


def _inside(text: str) -> str:
    """Return what is between the first brace and its partner, or the first word; "" if the brace is never closed."""
    if not text.startswith("{"):
        return "".join(re.findall(r"\A\w+", text))
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            return text[1:index].strip()
    return ""


def _without_markup(text: str) -> str:
    """Remove what says nothing about the value; blanks are single before the patterns see them and afterwards."""
    text = _SPACES.sub(lambda found: found[0] if len(found[0]) == 1 else " ", text.translate(FULL_WIDTH))
    for pattern, to in _MARKUP:
        text = pattern.sub(to, text)
    return _SPACES.sub(" ", text)


def _without_remarks(text: str) -> str:
    """Remove what stands in parentheses behind a blank; where they hold the whole text, remove only them."""
    whole = re.fullmatch(r"\s*\(([^(),]*)\)\s*", text)
    return whole[1] if whole else re.sub(r"(?<=\s)\([^()]*\)", " ", text)


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
    """Return the unit, by what it may measure, of a number that has one word or a currency behind it, or a currency
    before it."""
    text = text.translate(FULL_WIDTH)
    currency = re.match(rf"[-+\s]*\\?([${CURRENCIES}])", text)
    if currency and (currency[1] != "$" or text.count("$") == 1):
        return units_of(currency[1])
    found = _NUMBER.fullmatch(_without_remarks(_without_markup(text)).strip().rstrip(".,;: "))
    after = found["after"].strip() if found else ""
    words = _WORD.findall(after)
    return units_of(after) or (units_of(words[0]) if len(words) == 1 else {})


def _value(text: str) -> Fraction:
    whole, _, rest = text.replace(",", "").rpartition("/")
    if not whole:
        return Fraction(rest)
    *before, top = whole.split()
    return sum(map(Fraction, before), Fraction(f"{top}/{rest.strip()}"))


_SUBSTANCE = re.compile(r"((?:[A-Z][a-z]?[0-9]*|\((?=[A-Z])|\)[0-9]+)+)(?:\^?([0-9]*[+-]))?")
_CONSTANT = re.compile(r"\+\s*[cC](?=[\s$.]*\Z)")
_AMOUNTS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([^\W\d_]+)(?:[\s,]*\band\b|,)?")
_LETTERS = re.compile(r"[A-Za-z]{2,3}")
_SIGNS = re.compile(r"\A[^\w\s$\\(\[{.+−–-]+\s*")
_ANSWER = re.compile(
    r"(?:\b(?<!wrong )(?<!falsche )(?<!incorrect )(?:answer|correct (?:option|choice)|respuesta(?: correcta)?|"
    r"r[ée]ponse(?: correcte)?|(?:richtige )?antwort|"
    r"risposta(?: corretta)?|resposta(?: correta)?)\b(?:\W{0,3}\b(?:is|was|es|est|ist|è|é)\b)?|(?:答案|答え|正解|정답)"
    r"(?:应该?)?[是为為はがは은는]?|(?<![不没])(?:故|[应應](?<!不.))[选選])[^\w$\\(\[{+.−–-]{0,3}[\s*]*(?:(?:option|choice)\s+)?([^\s*:=].*?)\**"
    r"\s*(?:です|입니다|이다)?\Z", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$\**\Z|\\\(((?:[^\\]|\\[^()])+)\\\)\**\Z")
_DENIED = re.compile(
    r"(?:\b(?:not|cannot|nor|than|nicht|pas|n[ãa]o|non|no es|(?:wrong|incorrect|falsche) \w+)\b|n['’]t\b|不[是等])"
    r"[^,.;:]{0,10}\Z", re.IGNORECASE)
"""What right before a formula keeps it from being the answer."""
_CHOICE = re.compile(
    r"(?:(?i:option|choice|选项?|選項?)\s*[:：]?\s*\(?(?P<named>[A-Ja-j])\)?|\(?(?P<letter>[A-J]))"
    r"(?:(?:\)?[.)]\s+|(?:\)?:|\s[-–—])\s(?=[A-Z]?[a-z]*\s[a-z]|[A-Za-z]{4,}))(?!(?:and|or)\b)"
    r"(?P<behind>(?:(?![.!?]\s|\s\(?[A-J]\)\s).)+)|\s(?:because|since|as(?!\s+well\b|\s+[A-J]\b))\s.*|\)?[:项項]?)")
"""A letter of a choice, and one sentence that may stand behind it and names no other letter."""
_LETTERS_ALONE = re.compile(r"(?:\b(?:[A-J]|and|or)\b|\W)+")
_LONG = re.compile(r"[-+]?[0-9.,]{1000,}")  # A number of so many digits is compared as text


def references_of(answer: str) -> list[str]:
    """Return the references of a record, of which each is right: the texts of a list in JSON; those of a list as
    Python prints it, and that list, which may be the answer; else the answer itself."""
    for read in (json.loads, ast.literal_eval) if answer.lstrip().startswith("[") and len(answer) < _LONGEST else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(answer.strip())
            if found and all(isinstance(each, str) for each in found):
                return found if read is json.loads else [*found, answer]
    return [answer]


def _without_a_process(completion: str, answer: str, cut_thoughts: bool = False, *,
                       strict: bool = True) -> float | None:
    """Return what `math` gives where it has only numbers to compare; None where it must compute."""
    completion = "" if cut_thoughts else completion
    verdicts = [_of_numbers(completion, reference, strict) for reference in references_of(answer)]
    verdict = 1.0 if 1.0 in verdicts else None if None in verdicts else 0.0
    if verdict is not None:
        current().mean("reward/unanswered", float(not verdict and not marked_answer(completion)))
    return verdict


def _of_numbers(completion: str, answer: str, strict: bool) -> float | None:
    wanted, given = _final_answers(completion, answer)
    expected = reference_number(wanted)
    if given is None:
        found = None if strict else last_number(_without_thoughts(completion))
        return float(found is not None and expected is not None and found.answers(expected, strict))
    if given and given == wanted:
        return 1.0
    if expected is None:
        return 0.0 if _LONG.fullmatch(wanted) else None
    found = _given_number(completion, given)
    if found is not None:
        return float(found.answers(expected, strict) and not differ(_units_of(wanted), _units_of(given)))
    return 0.0 if strict or _LONG.fullmatch(given) else None


def unmatched(references: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each reference that only the same text can answer, as it is not understood, and why."""
    for index, reference in enumerate(references):
        if problem := _problem(reference):
            yield index, problem


def _problem(answer: str) -> str:
    """Return why nobody can match a record's answer; "" if one of its references is understood."""
    problems = [_problem_of(reference) for reference in references_of(answer)]
    return "" if "" in problems else problems[0]


def _problem_of(reference: str) -> str:
    marked = marked_answer(reference)
    wanted = reference.strip() if marked is None else marked
    if not wanted:
        return "it has no final answer"
    if reference_number(wanted) is not None or _LONG.fullmatch(wanted) or readings(wanted):
        return ""
    return f"`{wanted[:80]}` is not understood whole, so that only the same text would be right"


def _boxed(answer: str, *, strict: bool = True) -> str:
    """Return a record's final answer in the form that `math` asks for."""
    if problem := _problem(answer):
        raise ValueError(problem)
    reference = next(each for each in references_of(answer) if not _problem_of(each))
    wanted = _final_answers("", reference)[0]
    return f"{MARK} {wanted}" if MARK in reference or _inside(f"{{{wanted}}}") != wanted else rf"\boxed{{{wanted}}}"


@reward(timeout=10.0, shortcut=_without_a_process, reference=_boxed)
def math(completion: str, answer: str, cut_thoughts: bool = False, *, strict: bool = True) -> float:
    """Return 1.0 if the completion's final answer equals the reference's, else 0.0.

    The final answer follows the thoughts (`</think>`); thoughts that are cut off have none. It is in the last
    `\\boxed{}` or behind the last `####` (GSM8K), whichever comes later, or in the last `<answer>`; without these, and
    if the reference has no `####` too, it is the whole text, or its last sentence. Where the reference is a number, the
    answer must be one (see `number`), compared exactly: `50%` answers 50 and 0.5, and each of them answers `50%`; `1/2`
    answers 0.5, but `48/2` does not answer 24. Formulas, lists, sets, intervals, equations, matrices and words are
    compared by value, if both are understood whole (see `answers`); else only the same text is right. Of a reference
    that is a list of texts, such as `["4", "four"]`, each is right. `answers.jsonl` and `references.jsonl` in
    `tests/workers/isolation/rewards` list verdicts.

    `strict: false` also accepts an expression that equals the number, as `13-7` for 6, and a completion's last number.
    """
    completion = "" if cut_thoughts else completion
    verdict = _without_a_process(completion, answer, strict=strict)
    if verdict is not None:
        return verdict
    right = any(_is_right(completion, reference) for reference in references_of(answer))
    current().mean("reward/unanswered", float(not right and not marked_answer(completion)))
    return float(right)


def _is_right(completion: str, reference: str) -> bool:
    wanted, given = _final_answers(completion, reference)
    marked = marked_answer(completion) is not None
    lettered = bool(_choices(given or "")[0] or _LETTERS_ALONE.fullmatch(given or ""))
    if marked and _choices(wanted)[0] and not lettered:  # a formula in a box, before the letter
        said = spoken_answer(_without_thoughts(completion))
    else:
        said = [] if marked or given is None else spoken_answer(given)
    return _equal(wanted, given or "", whole=not marked) or any(_equal(wanted, text) for text in said)


def _wrong_form(pattern: str | None = None, tags: list[str] | None = None, opened: bool = False) -> str:
    if tags == []:
        return "has `tags` without one\nreward: {format: {tags: [think, answer]}}"
    return "takes a `pattern` or `tags`, not both" if pattern is not None and (tags is not None or opened) else ""


def _wrong_length(cap: int | None = None, margin: int = 0, target: int | None = None) -> str:
    if (cap is None) == (target is None):
        return "needs a `cap` or a `target`\nreward: {length: {cap: 1024, margin: 256}}"
    if target is not None and (target < 1 or margin):
        return f"needs a `target` of at least 1, without `margin`, not {target} and {margin}"
    return "" if cap is None or 0 <= margin <= cap else f"needs a `margin` from 0 to its cap of {cap}, not {margin}"


def _formed(answer: str = "", opening: str | None = None, *, pattern: str | None = None,
            tags: list[str] | None = None, opened: bool = False) -> str | None:
    """Return a completion of the form; raise ValueError where the chat template keeps all from having it."""
    if pattern is not None:
        return None
    first, *rest = ["think", "answer"] if tags is None else tags
    if opening is not None and opening.rstrip().endswith(f"<{first}>") != opened:
        begins, right = ("does not begin", "false") if opened else ("begins", "true")
        raise ValueError(f"the chat template {begins} each answer with <{first}>\n"
                         f"reward: {{format: {{opened: {right}}}}}")
    others = "".join(f"\n<{tag}>{answer}</{tag}>" for tag in rest)
    return f"{'' if opened else f'<{first}>'}{'' if rest else answer}</{first}>{others}"


@reward(check=_wrong_form, reference=_formed)
def format(completion: str, *, pattern: Regex | None = None, tags: list[str] | None = None,  # noqa: A001
           opened: bool = False) -> float:
    """Return 1.0 if the completion has the form, else 0.0.

    `pattern` is a regular expression for the whole completion, `.` for line ends too. `tags` name its elements, each
    once and in order, with only space between; default `[think, answer]`, unless there is a pattern. `opened: true`
    where the chat template begins each answer with the first tag, so that no completion has it.
    """
    if wrong := _wrong_form(pattern, tags):
        raise InvalidInput(f"reward `format` {wrong}")
    if pattern is not None:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    tags = ["think", "answer"] if tags is None else tags
    completion = f"<{tags[0]}>{completion}" if opened else completion
    if any(completion.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    whole = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return float(re.fullmatch(rf"\s*{whole}\s*", completion, re.DOTALL) is not None)


@reward(in_rank=True, check=_wrong_length)
def length(response: list[int], *, cap: int | None = None, margin: int = 0, target: int | None = None) -> float:
    """Return a penalty between 0.0, for a good length in tokens, and -1.0.

    With `cap`, the penalty is 0.0 up to `cap - margin` tokens and falls linearly to -1.0 at `cap` (the soft overlong
    punishment of DAPO, Yu et al. 2025, eq. 13). With `target`, it is -|tokens - target| / target, at least -1.0.
    """
    if wrong := _wrong_length(cap, margin, target):
        raise InvalidInput(f"reward `length` {wrong}")
    if target is not None:
        return -min(1.0, abs(len(response) - target) / target)
    over = len(response) - ((cap or 0) - margin)
    return -min(1.0, max(0.0, over / margin)) if margin else -float(over > 0)


def _final_answers(completion: str, answer: str) -> tuple[str, str | None]:
    """Return the final answers of the reference and of the completion; None where the completion has none."""
    wanted, given = marked_answer(answer), marked_answer(completion)
    if given is None and MARK not in answer:
        given = _without_thoughts(completion).strip()
    return answer.strip() if wanted is None else wanted, given


def _given_number(completion: str, given: str) -> Number | None:
    """Read the first line behind a mark; without a mark the whole text, or else its last sentence."""
    if marked_answer(completion) is not None:
        return read_number(given.split("\n")[0])
    return read_number(given) or read_number(last_sentence(given))


def _choices(text: str) -> tuple[str, str]:
    """Return the letters of the choices that an answer names, "" if it names none, and what stands behind a letter, as
    in `(B)` and `B. 24`."""
    if "\n" in text.strip():
        return "", ""
    plain = _without_markup(text).strip().rstrip(".")
    if named := _CHOICE.fullmatch(plain):
        return (named["named"] or named["letter"]).upper(), named["behind"] or ""
    letters = re.sub(r"[\s,()]|\band\b", "", plain)
    return letters if re.fullmatch("[A-J]{2,}", letters) and [*letters] == sorted({*letters}) else "", ""


def _substance(text: str) -> str:
    """Return a chemical formula in one spelling, as `SO4^2-`; "" if a text is none."""
    found = _SUBSTANCE.fullmatch(re.sub(r"[\s_{}]|\\(?:ce|mathrm)", "", spelling(text)))
    return f"{found[1]}^{found[2] or ''}" if found else ""


def _amounts(text: str) -> list[tuple[Fraction, dict[str, str]]]:
    """Return the numbers of an amount in several units, as `1 hour 30 minutes`, each with its unit."""
    plain = _without_markup(text).strip().rstrip(".")
    found = _AMOUNTS.findall(plain) if len(plain) < 100 and re.fullmatch(rf"(?:{_AMOUNTS.pattern})+", plain) else []
    return [(Fraction(number), units if any((units := units_of(unit)).values()) else {unit.lower(): ""})
            for number, unit in found]


@functools.lru_cache(maxsize=65536)
def _equal(wanted: str, given: str, whole: bool = False) -> bool:
    """Return whether an answer is the wanted one. A `whole` completion that begins with a letter may discuss a choice,
    without taking it."""
    if spelling(wanted) == spelling(given) != "" or _substance(wanted) == _substance(given) != "":
        return True
    if _CONSTANT.search(wanted) and _CONSTANT.search(given):
        wanted, given = (_CONSTANT.sub("+ C", text) for text in (wanted, given))
    (letters, right), (named, behind) = _choices(wanted), _choices(given)
    if letters == named != "" and not (whole and behind) and (not right or not behind or _equal(right, behind)):
        return True
    if _LETTERS.fullmatch(wanted.strip()) and _LETTERS.fullmatch(given.strip()):  # words, of which the factors of a
        return wanted.strip().casefold() == given.strip().casefold() in SHORT_WORDS  # product would have any order
    answer = parse_whole(given)
    return (answer is not None and any(same(reading, answer) for reading in readings(wanted))) or \
        _is_amount(wanted, given)


def _is_amount(wanted: str, given: str) -> bool:
    """Return whether both are one number of one unit, which may be a single letter as in `5 m`."""
    several = _amounts(wanted), _amounts(given)
    if len(several[0]) == len(several[1]) > 1:
        return all(one == other and units and named and not differ(units, named)
                   for (one, units), (other, named) in zip(*several))
    number, other = read_number(wanted), read_number(given)
    units = _units_of(wanted), _units_of(given)
    return number is not None and other is not None and other.answers(number, True) and all(units) and \
        not differ(*units)
