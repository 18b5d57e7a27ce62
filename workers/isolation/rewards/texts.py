"""Rewards of a text's content and form: `math`, `format`, `length`. Parses final answers and numbers."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
from fractions import Fraction

from distflow.contracts.decorators import Regex, reward
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import current
from workers.isolation.rewards import behind_thoughts
from workers.isolation.rewards.answers import same, settled
from workers.isolation.rewards.prose import Number, last_number, number, read_number
from workers.isolation.rewards.quantities import differ, units_of
from workers.isolation.rewards.reader import SHORT_WORDS, parse_whole, plain, readings, spelling

MARK = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_JOINT = re.compile(r"[\s$]*+[,;]?\s*+(?:\\text\{\s*+)?(and|or|)(?:\s*\})?[\s$]*+")
_LONGEST = 1000


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
    if not boxes or boxes[-1].start() < hashes:
        return None if hashes < 0 else text[hashes + len(MARK) :].strip()
    found = [_inside(text[boxes[-1].end() :])]
    for box, following in zip(boxes[-2::-1], boxes[::-1]):  # others that a comma or a word joins to it
        between = text[box.end() : following.start()]
        joint = _JOINT.fullmatch(between[_closing(between) + 1 :])
        if not joint or not joint[0].strip("$ \n"):
            break
        found += [joint[1] or ",", _inside(between)]
    return found[0] if set(found[::2]) == {found[0]} else " ".join(found[::-1])


def last_sentence(text: str) -> str:
    """Return the last sentence of a text, without signs before it, as `✅`, and Minerva's hope behind it."""
    said, hope, end = text.rpartition(" I hope it is correct")
    lines = [line.strip() for line in (said if hope and end.strip() in ("", ".") else text).splitlines()
             if re.search(r"\w", line)]
    return _SIGNS.sub("", re.split(r"(?<=[.!?])\s+", lines[-1])[-1]) if lines else ""


def spoken_answer(text: str) -> list[str]:
    """Return what the last sentence of a text may give as its answer: what stands behind "answer is", the formula at
    its end, or the last side of an equation there that holds."""
    sentence = last_sentence(text).rstrip(".! ")[-_LONGEST:]
    ends = [found for pattern in (_FORMULA, _SUM) if (found := pattern.search(sentence))
            and not _DENIED.search(sentence[max(0, found.start() - 40) : found.start()])
            and (pattern is _FORMULA or ((sums := parse_whole(found[0].strip())) and settled(sums)))]
    found = [_ANSWER.match(sentence), *ends]
    return [next(part for part in match.groups() if part is not None) for match in found if match]


def _closing(text: str) -> int:
    """Return where the partner of the first brace is; -1 if there is none."""
    depth = 0
    for index, sign in enumerate(text if text.startswith("{") else ""):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            return index
    return -1


def _inside(text: str) -> str:
    """Return what is between the first brace and its partner, or the first word; "" if the brace is never closed."""
    return text[1 : max(1, _closing(text))].strip() if text.startswith("{") else "".join(re.findall(r"\A\w+", text))


_SUBSTANCE = re.compile(r"((?:[A-Z][a-z]?[0-9]*|\((?=[A-Z])|\)[0-9]+)+)(?:\^?([0-9]*[+-]))?")
_CONSTANT = re.compile(r"\+\s*[cC](?=[\s$.]*\Z)")
_AMOUNTS = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([^\W\d_]+)(?:[\s,]*\band\b|,)?")
_LETTERS = re.compile(r"[A-Za-z]{2,3}")
_SIGNS = re.compile(r"\A[^\w\s$\\(\[{.+−–-]+\s*")
_ANSWER = re.compile(
    r".*(?:\b(?<!not the )(?<!than the )(?<!nor the )(?<!wrong )(?<!falsche )(?<!incorrect )"
    r"(?:answer|correct (?:option|choice)|respuesta(?: correcta)?|"
    r"r[ée]ponse(?: correcte)?|(?:richtige )?antwort|"
    r"risposta(?: corretta)?|resposta(?: correta)?)\b(?:\W{0,3}\b(?:is|was|es|est|ist|è|é)\b)?|(?:答案|答え|正解|정답)"
    r"(?:应该?)?[是为為はがは은는]?|(?<![不没])(?:故|[应應](?<!不.))[选選])[^\w$\\(\[{+.−–-]{0,3}[\s*]*"
    r"(?:(?:option|choice|I (?:think|believe)|that|it is)\s+)*([^\s*:=].*?)\**"
    r"\s*(?:です|입니다|이다)?\Z", re.IGNORECASE)
_FORMULA = re.compile(r"\$([^$]+)\$\**\Z|\\\(((?:[^\\]|\\[^()])+)\\\)\**\Z")
_SUM = re.compile(r"(?:\A|\s)[-+($€£]*[0-9][-+*/×÷().,0-9\s$€£%]*=([-\s$€£]*[0-9][0-9,.%]*)\Z")
_DENIED = re.compile(
    r"(?:\b(?:not|cannot|nor|than|or|and|maybe|be|nicht|pas|n[ãa]o|non|no es|(?:wrong|incorrect|falsche) \w+)\b|"
    r"n['’]t\b|不[是等])"
    r"[^,.;:]{0,10}\Z", re.IGNORECASE)
"""What right before a formula keeps it from being the answer."""
_CHOICE = re.compile(
    r"(?:(?i:option|choice|选项?|選項?)\s*[:：]?\s*\(?(?P<named>[A-Ja-j])\)?|\(?(?P<letter>[A-J]|[a-j](?=\)?[.)]\s)))"
    r"(?:(?:\)?[.)]\s+|(?:\)?:|\s[-–—])\s(?=[A-Z]?[a-z]*\s[a-z]|[A-Za-z]{4,}))(?!(?:and|or)\b)"
    r"(?P<behind>(?:(?![.!?]\s|\s\(?[A-J]\)\s).)+)|,?\s(?:because|since|not|as(?!\s+well\b|\s+[A-J]\b))\s.*|\)?[:项項]?)")
"""A letter of a choice, and one sentence that may stand behind it and names no other letter."""
_LETTERS_ALONE = re.compile(r"(?:\b(?:[A-J]|and|or)\b|\W)+")
_FIGURE = re.compile(r"(?:\\approx|[^\w(\\])*[0-9]")  # a number before all words
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
    parsed = parse_whole(wanted)
    expected = read_number(wanted) if parsed is None and _FIGURE.match(wanted) else number(parsed)
    if given is None:
        found = None if strict else last_number(_without_thoughts(completion))
        return float(found is not None and expected is not None and found.answers(expected, strict))
    if given and given == wanted:
        return 1.0
    if expected is None:
        return 0.0 if _LONG.fullmatch(wanted) else None
    found = _given_number(completion, given)
    if found is not None:
        return float(found.answers(expected, strict))
    return 0.0 if strict or _LONG.fullmatch(given) else None


def _problem(answer: str) -> str:
    """Return why nobody can match a record's answer; "" if one of its references is understood."""
    problems = [_problem_of(reference) for reference in references_of(answer)]
    return "" if "" in problems else problems[0]


def _problem_of(reference: str) -> str:
    marked = marked_answer(reference)
    wanted = reference.strip() if marked is None else marked
    if not wanted:
        return "it has no final answer"
    kinds = _choices(wanted)[0], _substance(wanted), _amounts(wanted)[1:], readings(wanted), _LONG.fullmatch(wanted)
    if any(kinds):
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
    marked = marked_answer(completion) is not None
    texts = given.split("\n")[:1] if marked else [given, last_sentence(given), *spoken_answer(given)]
    return next(filter(None, map(read_number, texts)), None)


def _choices(text: str) -> tuple[str, str]:
    """Return the letters of the choices that an answer names, "" if it names none, and what stands behind a letter, as
    in `(B)` and `B. 24`."""
    if "\n" in text.strip():
        return "", ""
    said = plain(text).rstrip(".")
    if named := _CHOICE.fullmatch(said):
        return (named["named"] or named["letter"]).upper(), named["behind"] or ""
    letters = re.sub(r"[\s,()]|\band\b", "", said)
    return letters if re.fullmatch("[A-J]{2,}", letters) and [*letters] == sorted({*letters}) else "", ""


def _substance(text: str) -> str:
    """Return a chemical formula in one spelling, as `SO4^2-`; "" if a text is none."""
    found = _SUBSTANCE.fullmatch(re.sub(r"[\s_{}]|\\(?:ce|mathrm)", "", spelling(text)))
    return f"{found[1]}^{found[2] or ''}" if found else ""


def _amounts(text: str) -> list[tuple[Fraction, dict[str, str]]]:
    """Return the numbers of an amount in several units, as `1 hour 30 minutes`, each with its unit."""
    said = plain(text).rstrip(".")
    found = _AMOUNTS.findall(said) if len(said) < 100 and re.fullmatch(rf"(?:{_AMOUNTS.pattern})+", said) else []
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
    if letters == named != "" and not (whole and " " in behind) and (not right or not behind or _equal(right, behind)):
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
    one, other = read_number(wanted), read_number(given)
    return one is not None and other is not None and bool(one.units and other.units) and other.answers(one, True)
