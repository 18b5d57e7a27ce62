"""Reader of mathematical expressions, in LaTeX or plain text: an expression is understood whole, or not at all.

    tokens      text → tokens, without markup that says nothing about the value
    expression  tokens → an `Expression`; raises NotUnderstood if one token is left over or not known
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_DEEPEST = 60  # levels of brackets; each costs ten frames of Python
_SPACES = re.compile(r"\s\s+")
_MOST_LEVELS = 150  # of a tree
_LONGEST = 1000
FUNCTIONS = names(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp cis")
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = names(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell")
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "≈": r"\approx ", "⩽": r"\le ",
    "⩾": r"\ge ", "∛": r"\sqrt[3]", "√": r"\sqrt ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "½": " 1/2 ",
    "¼": " 1/4 ", "¾": " 3/4 ", "⅓": " 1/3 ", "⅔": " 2/3 ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "⟨": r"\langle ", "⟩": r"\rangle "}

FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, ord("。"): ".", ord("、"): ",",
              0xFFE1: "£", 0xFFE5: "¥", 0xFFE6: "₩", **dict.fromkeys(map(ord, "‐‑﹣"), "-"),
              **dict.fromkeys(map(ord, "⁄∕"), "/")}
"""Signs of East Asian texts and others, and the ASCII signs that they mean, for `str.translate`."""
_SIGNS = {**FULL_WIDTH, **str.maketrans(_UNICODE)}
_SHIFTED = {"^": re.compile("[⁻⁺]?[⁰¹²³⁴-⁹ⁿ]+[⁻⁺]?|[⁻⁺]"), "_": re.compile("[₀-₉]+")}
"""Runs of raised and lowered signs."""
_HAN = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+"
IDEOGRAPHS = re.compile(_HAN)
def _ungrouped(found: re.Match[str]) -> str:
    """Return a number without what groups its thousands; dots do where a comma or a second dot follows them."""
    whole, part = found.groups()
    if "." in whole and part is None and whole.count(".") < 2:
        return found[0]
    return re.sub(r"(?<=[0-9])[ '’_.]", "", whole) + (f".{part}" if part else "")


_MARKUP = tuple((re.compile(pattern), to) for pattern, to in (
    (r"(?![0-9])\d", lambda found: str(unicodedata.digit(found[0]))),
    (r"\A([^\w.,]*[0-9]{1,3}(?:[ '’_.][0-9]{3})+)(?:,([0-9]{1,2}))?(?![0-9.,/ ]*[0-9/])", _ungrouped),
    (r"\.([0-9]{0,20}?)(?:([0-9])\2\2+|([0-9]{2,9}?)\3+)(?:\.{3}|…|\\l?dots)",  # digits that go on, as `0.333...`
     lambda found: rf".{found[1]}\overline{{{found[2] or found[3]}}}"),
    (r"(?<=[0-9])\s*([apAP])\.?\s?[mM]\b\.?", lambda found: f" {found[1].lower()}m"),
    (r"\\(?:text)?color\s*(?:\[[^\[\]]*\])?\{[^{}]*\}|\A\s*[*_]+|(?<!\\)[\\*_]+\s*\Z|[\"“”]|"
     r"\\(?:tiny|small|large|Large|LARGE|huge|Huge|bf|underline|displaystyle)(?![a-z])", " "),
    (r"\A(?:[^$]|\$(?=\s?-?\.?[0-9]))*\Z|\\\$", lambda found: found[0].replace("\\$", "$").replace("$", "＄")),
    (r"\\(?:left|right|middle)\s*\.", " "),
    (r"\\(?:(?:left|right|middle)(?![a-z])|[bB]igg?[lrm]?(?![a-z])|displaystyle|textstyle|limits|nolimits|strut)", " "),
    (r"\\(?:[dtcs]|nice)frac(?![a-zA-Z])", r"\\frac"),
    (r"(?<=\bsq)\.|(?<=\bcu)\.", ""),
    (r"\\num\s*\{([^{}]*)\}", r"\1"),
    (r"(?<=[)\]}])\s*(?:U|union)\s*(?=[(\[\\{])", r"\\cup "),
    (r"\\(?:dbinom|tbinom)(?![a-zA-Z])", r"\\binom"),
    (r"(?<=[0-9])(?:\{,\}|,?\\!|\\,|[\u00a0\u2009\u202f]|\\ )(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\(begin|end)\{(?:array\}(?:\{[^{}]*\})?|(?:small)?matrix\})", r"\\\1{pmatrix}"),
    (r"(?<!\\)(?:\\[()\[\]]|\$)|[`\u200b]", " "),
    (r"(?<=[\w)}])\*\*(?=[\w({\\-])", "^"),
    (r"\*\*", " "),
    (r"(?<!\\)\\[ ,;:!>]|\\q?quad(?![a-z])|~|\\(?:thinspace|hspace\{[^{}]*\})", " "),
    (r"\\cdotp?(?![a-z])|\\times|\\ast|\\star", "*"),
    (r"\\div(?![a-z])", "/"),
    (r"(?<=[0-9])\s+to\s+(?=[0-9])", "∶"),  # a ratio, and no time
    (r"\A(\s*)\b(?:inf|Inf)\b|(?<=[(,+-])\s*\binf\b", r"\1\\infty "),
    (r"(?<![a-z])\{\s*:\s*\}|\\colon(?![a-z])", ":"),
    (r"(?<=[0-9])\s*(?:\^\s*\{?\s*)?(?:\\(?:text|mathrm|textsuperscript)\{\s*)?(?:st|nd|rd|th)(?![a-z])\s*\}*", ""),
    (r"\\(?:leq?q?|leqslant)(?![a-z])|<=", r"\\le "),
    (r"\\(?:geq?q?|geqslant)(?![a-z])|>=", r"\\ge "),
    (r"\\lt(?![a-z])|&lt;", "<"),
    (r"\\gt(?![a-z])|&gt;", ">"),
    (r"\\(?:neq|not\s*=)|!=|\\ne(?![a-z])", r"\\ne "),
    (r"\\(?:lbrace|\{)", r"\\{"),
    (r"\\(?:rbrace|\})", r"\\}"),
    (r"\\lbrack", "["),
    (r"\\rbrack", "]"),
    (r"\\(?:lvert|rvert|vert|mid)(?![a-z])", "|"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-z])", r"\\degree "),
    (r"\\(?:varnothing|O(?![a-zA-Z]))", r"\\emptyset "),
    (r"\\%|%", r"\\% "),
    ("＄", "$"),
))  # patterns and replacements, applied in this order
_WRAPPERS = "text|textbf|textit|textrm|textnormal|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname|rm|boldsymbol|bm"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|\\(?:{_WRAPPERS})\s*\{{(?P<text>[^{{}}]*)\}}|(?P<ring>\\mathbb\s*(?:\{{[A-Z]\}}|[A-Z]))|"
    r"(?P<grouped>[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])(?:\.[0-9]+)?)|"
    r"(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)|"
    r"(?P<command>\\[a-zA-Z]+|\\.)|(?P<han>" + _HAN + r")|(?P<word>[^\W\d_]+)|(?P<sign>.)", re.DOTALL)
_MATRIX = re.compile(r"\\begin\{([pb])matrix\}(.*?)\\end\{\1matrix\}", re.DOTALL)


class NotUnderstood(ValueError):
    """A text that is not understood whole."""


@dataclass(frozen=True)
class Token:
    """`kind`: number, grouped (`1,234`), word (a run of letters), text (of `\\text{}`), ring, command, sign or matrix.
    `close`: no blank stands before it."""

    kind: str
    text: str
    close: bool = False


@dataclass(frozen=True)
class Expression:
    """An expression: `kind` names an operation or a function of `parts`, a `symbol`, a `number` or a `matrix`."""

    kind: str
    parts: tuple[Expression, ...] = ()
    value: Fraction | str | int = ""


def _folded(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("−", "-")


def tokens(text: str) -> list[Token]:
    """Return the tokens of a text; raise NotUnderstood if it is too long."""
    if len(text) > _LONGEST:
        raise NotUnderstood(f"more than {_LONGEST} characters")
    text = _SPACES.sub(" ", text.translate(_SIGNS))
    for mark, signs in _SHIFTED.items():
        text = signs.sub(lambda found, mark=mark: f"{mark}{{{_folded(found[0])}}}", text)
    for pattern, to in _MARKUP:
        text = pattern.sub(to, text)
    found: list[Token] = []
    at, close = 0, False
    for matrix in _MATRIX.finditer(text):
        _scan(text[at : matrix.start()], close, found)
        found.append(Token("matrix", matrix[2]))
        at = matrix.end()
    _scan(text[at:], close, found)
    return found


def _scan(text: str, close: bool, found: list[Token]) -> None:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind != "space":
            found.append(Token("text" if kind == "han" else kind, match[kind], close))
        close = kind != "space"


def expression(given: list[Token]) -> Expression:
    """Return the tree of an expression; raise NotUnderstood if it is none."""
    parser = _Parser(given)
    node = parser.sum()
    if parser.at < len(parser.tokens):
        raise NotUnderstood(f"`{parser.tokens[parser.at].text}`")
    level, nodes = 0, [node]
    while nodes:
        level, nodes = level + 1, [part for above in nodes for part in above.parts]
        if level > _MOST_LEVELS:
            raise NotUnderstood("too many operations")
    return node


_ADD, _PLUS_MINUS = ("+", "-"), (r"\pm", r"\mp")
_CLOSERS = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", "|": "|"}
_BRACKETS = {"|": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}
_MANY_LETTERS = frozenset("abcdxyzkmnpqrstuvw")
"""Letters of which three or more stand for a product; other words do not."""
_FRACTION = re.compile(r"\\frac (?:\{ \d+ \}|\d) ?(?:\{ \d+ \}|\d)(?: |$)")


class _Parser:
    """Recursive descent: sum → product → power → atom."""

    def __init__(self, given: list[Token]):
        self.tokens = [part for token in given for part in _letters(token)]
        self.at = self.depth = self.bars = 0

    def peek(self, *texts: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].text in texts and \
            self.tokens[self.at].kind not in ("text", "matrix")

    def take(self) -> Token:
        if self.at >= len(self.tokens):
            raise NotUnderstood("its end")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str) -> None:
        if not self.peek(text):
            raise NotUnderstood(f"`{text}` is missing")
        self.at += 1

    def sum(self) -> Expression:
        node = None
        while node is None or self.peek(*_ADD, *_PLUS_MINUS):
            sign = self.take().text if self.peek(*_ADD, *_PLUS_MINUS) else "+"
            if sign in _ADD and self.peek("-") and self._skip():
                sign = "-" if sign == "+" else "+"
            term = self.product()
            if sign in _PLUS_MINUS:
                term, sign = Expression(sign, (term,)), "+"
            term = Expression("neg", (term,)) if sign == "-" else term
            node = term if node is None else Expression("+", (node, term))
        if self.peek(r"\choose") and self._skip():
            node = Expression("binom", (node, self.sum()))
        return node

    def product(self) -> Expression:
        node = self.power()
        while True:
            if self.peek("*"):
                self.at += 1
                node = Expression("*", (node, self.signed()))
            elif self.peek("/"):
                self.at += 1
                node = Expression("/", (node, self.divisor()))
            elif self._mixed():
                node = Expression("mixed", (node, self.power()))
            elif self._starts_atom():
                node = Expression("*", (node, self.power()))
            else:
                return node

    def signed(self) -> Expression:
        """Read a factor that may have a sign, as in `2 * -3`."""
        if self.peek("-"):
            self.at += 1
            return Expression("neg", (self.signed(),))
        return self.power()

    def divisor(self) -> Expression:
        """Read what stands behind `/`: a product of letters belongs to it, as in `a/bc`, but `1/2x` is half of x."""
        node = self.signed()
        while node.kind != "number" and self._starts_atom() and not self.peek("(") and not self._starts_function():
            node = Expression("*", (node, self.power()))
        return node

    def _mixed(self) -> bool:
        """Return whether a fraction of whole numbers follows a whole number, as in `3\\frac{1}{2}` or `3 1/2`."""
        before, rest = self.tokens[self.at - 1], self.tokens[self.at : self.at + 7]
        if before.kind != "number" or not before.text.isdigit():
            return False
        if self.at > 1 and self.tokens[self.at - 2].text in ("^", "_", "*", "/", r"\frac", r"\sqrt"):
            return False
        if _FRACTION.match(" ".join(token.text for token in rest)):
            return True
        if [token.kind for token in rest[:3]] != ["number", "sign", "number"] or rest[0].close or rest[1].text != "/":
            return False
        if not (rest[0].text.isdigit() and rest[2].text.isdigit()):
            return False
        braced = [Token("sign", "{"), rest[0], Token("sign", "}"), Token("sign", "{"), rest[2], Token("sign", "}")]
        self.tokens[self.at : self.at + 3] = [Token("command", r"\frac"), *braced]
        return True

    def _starts_function(self) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].text.lstrip("\\") in FUNCTIONS

    def _starts_atom(self) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        if token.kind == "number":
            return self.tokens[self.at - 1].text in (")", "}", "]", "!")
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)
        if token.kind == "command":
            return token.text[1:] in FUNCTIONS | _GREEK | {"pi", "frac", "sqrt", "binom", "lfloor", "lceil", "infty"}
        return token.kind in ("word", "matrix")

    def power(self) -> Expression:
        node = self.atom()
        while True:
            if self.peek("!"):
                self.at += 1
                node = Expression("!", (node,))
            elif self.peek(r"\degree"):
                self.at += 1
                node = Expression("degree", (node,))
            elif self.peek("^"):
                self.at += 1
                node = Expression("^", (node, self.exponent()))
            else:
                return node

    def exponent(self) -> Expression:
        if self.peek("-"):
            self.at += 1
            return Expression("neg", (self.exponent(),))
        node = self.atom()
        return Expression("^", (node, self.exponent())) if self.peek("^") and self._skip() else node

    def _skip(self) -> bool:
        self.at += 1
        return True

    def atom(self) -> Expression:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise NotUnderstood("too deep")
        node = self._atom()
        self.depth -= 1
        return node

    def _atom(self) -> Expression:
        token = self.take()
        if token.kind in ("number", "grouped"):
            return self._number(token)
        if token.kind == "matrix":
            return _matrix(token.text)
        if token.kind == "word":
            return self._word(token.text)
        if token.kind == "sign" and token.text in ("(", "[", "{", "|"):
            return self._group(token.text)
        if token.kind == "command":
            return self._command(token.text[1:])
        raise NotUnderstood(f"`{token.text}`")

    def _number(self, token: Token) -> Expression:
        text = token.text.replace(",", "")
        whole, mark, digits = text.lower().partition("e")
        if mark and abs(int(digits)) > 10_000:
            raise NotUnderstood("a number that is too large")
        value = Fraction(whole) * Fraction(10) ** int(digits or 0)
        if self.peek(".") and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text in _BARS:
            self.at += 1
            return Expression("number", value=value + self._repeating(0))
        if self.peek(*_BARS) and "." in whole:
            return Expression("number", value=value + self._repeating(len(whole.partition(".")[2])))
        return Expression("number", value=value)

    def _repeating(self, places: int) -> Fraction:
        """Read the repeating digits of a decimal, as `\\overline{3}`, behind `places` others."""
        self.at += 1
        braced = self.peek("{") and self._skip()
        digits = self.take()
        if digits.kind != "number" or not digits.text.isdigit():
            raise NotUnderstood("a bar")
        if braced:
            self.expect("}")
        return Fraction(int(digits.text), (10 ** len(digits.text) - 1) * 10**places)

    def _group(self, opener: str) -> Expression:
        self.bars += opener == "|"
        before, self.bars = self.bars, self.bars if opener == "|" else 0
        node = self.sum()
        self.bars = before
        self.expect(_CLOSERS[opener])
        self.bars -= opener == "|"
        return Expression(_BRACKETS[opener], (node,)) if opener in _BRACKETS else node

    def _word(self, name: str) -> Expression:
        if name in FUNCTIONS:
            return self._function(name)
        if name == "sqrt":
            return self._root()
        return self._symbol(name)

    def _symbol(self, name: str) -> Expression:
        name = {"infinity": r"\infty", "oo": r"\infty", "pi": r"\pi"}.get(name, name)
        if self.peek("_"):
            self.at += 1
            name += "_" + self._subscript()
        while self.peek("'"):
            self.at += 1
            name += "'"
        return Expression("symbol", value=name)

    def _subscript(self) -> str:
        if not self.peek("{"):
            token = self.take()
            if token.kind not in ("number", "word", "text"):
                raise NotUnderstood(f"`_{token.text}`")
            return token.text
        self.at += 1
        texts = []
        while not self.peek("}"):
            texts.append(self.take().text)
        self.at += 1
        return "".join(texts)

    def _command(self, name: str) -> Expression:
        if name in FUNCTIONS:
            return self._function(name)
        if name in _GREEK or name in ("pi", "infty"):
            return self._symbol(f"\\{name}")
        if name == "frac":
            return Expression("/", (self._argument(), self._argument()))
        if name == "binom":
            return Expression("binom", (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name in ("lfloor", "lceil"):
            return self._group(f"\\{name}")
        raise NotUnderstood(f"`\\{name}`")

    def _root(self) -> Expression:
        if not self.peek("["):
            return Expression("root", (self._argument(whole=True), Expression("number", value=Fraction(2))))
        self.at += 1
        degree = self.sum()
        self.expect("]")
        return Expression("root", (self._argument(whole=True), degree))

    def _argument(self, whole: bool = False) -> Expression:
        """Read an argument without operators: one digit of a number, unless that is `whole` and has but one."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else self.take()
        if token.kind == "number" and len(token.text) > 1:
            if whole and token.close or not token.text.isdigit() or len(token.text) > 2:
                raise NotUnderstood(f"`{token.text}` without braces")
            if not whole:
                self.tokens[self.at : self.at + 1] = [Token("number", digit, True) for digit in token.text]
        return self.atom()

    def _function(self, name: str) -> Expression:
        base = exponent = None
        while self.peek("^", "_"):
            if self.take().text == "^":
                exponent = self.exponent()
            else:
                base = self.atom()
        if exponent == Expression("neg", (Expression("number", value=Fraction(1)),)) and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        if base is not None and name != "log":
            raise NotUnderstood(f"`{name}_`")
        argument = self._function_argument()
        node = Expression(name, (argument,) if base is None else (argument, base))
        return node if exponent is None else Expression("^", (node, exponent))

    def _function_argument(self) -> Expression:
        if self.peek("(", "[", "{", "|"):
            return self.atom()
        sign = self.peek("-") and self._skip()
        node = self.power()
        while self._starts_atom() and not self._starts_function() and not self.peek("(", "["):
            node = Expression("*", (node, self.power()))
        return Expression("neg", (node,)) if sign else node


_BARS = (r"\overline", r"\bar")


def literal(node: Expression) -> tuple[Fraction, bool] | None:
    """Return the value of a number as it is written, also with a sign, as a fraction, mixed or scientific, and whether
    it is a division; None if an operation is to be carried out."""
    if isinstance(node.value, Fraction):
        return node.value, False
    if node.kind == "*" and (power := node.parts[1]).kind == "^" and power.parts[0].value == 10:
        parts = [literal(node.parts[0]), literal(power.parts[1])]
    else:
        parts = [literal(part) for part in node.parts] if node.kind in ("neg", "/", "mixed") else [None]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    (value, divided), (other, fraction) = known[0], known[-1]
    if node.kind == "neg":
        return -value, divided
    if node.kind == "mixed":
        return value + other, True
    if node.kind == "/":
        return (value / other, True) if other and not divided and not fraction else None
    return (value * Fraction(10) ** int(other), False) if not fraction and abs(other) < 100 else None


def _letters(token: Token) -> list[Token]:
    """Return a run of letters as the names in it: `xy` is a product. Raises NotUnderstood for other words."""
    if token.kind == "text":
        name = token.text.strip()
        if len(name) == 1 and name.isalpha() and not IDEOGRAPHS.match(name) or name in FUNCTIONS:
            return [Token("word", name, token.close)]
        raise NotUnderstood(f"the text `{name}`")
    if token.kind != "word" or len(token.text) == 1 or token.text in FUNCTIONS | {"sqrt", "pi", "infinity", "oo"} or \
            re.fullmatch("[IVX]+", token.text):
        return [token]
    for name in (*FUNCTIONS, "sqrt", "pi"):
        if len(name) > 1 and token.text.endswith(name) and len(token.text) - len(name) <= 2:
            return [*_letters(Token("word", token.text[: -len(name)], token.close)), Token("word", name, True)]
    if len(token.text) > 4 or (len(token.text) > 2 and not set(token.text.lower()) <= _MANY_LETTERS):
        raise NotUnderstood(f"the word `{token.text}`")
    return [Token("word", letter, token.close or index > 0) for index, letter in enumerate(token.text)]


def _matrix(text: str) -> Expression:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])", text) if row.strip()]
    cells = [[expression(tokens(cell)) for cell in row.replace(r"\hline", "").split("&")] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1:
        raise NotUnderstood("a matrix with rows of several lengths")
    return Expression("matrix", tuple(cell for row in cells for cell in row), len(cells))
