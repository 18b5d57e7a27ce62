"""Exact comparison of expressions (`latex.Expression`), in bounded time.

Without variables, rational values are compared exactly, others to at least twice the digits that separate different
ones of their size. With variables, both are evaluated at the same rational points: expressions that agree at each are
the same function.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath

from workers.isolation.rewards.latex import Expression

Value = Any  # a Fraction, a number of mpmath, or a matrix: a tuple of rows of these
Point = dict[str, Fraction]
_MOST_BITS = 1 << 20  # of a whole number: three times what 10^100000 has
_MOST_WORK = 1 << 26  # of an evaluation, about in operations on words
_MOST_PRECISION = 20_000  # bits of a number that is not rational
_LARGEST_FACTORIAL = 20_000
_POINTS = 6


class Incomputable(ArithmeticError):
    """A value that is not defined, or too large."""


def equal(left: Expression, right: Expression) -> bool:
    """Return whether two expressions have the same value, for all values of their variables."""
    if left == right:
        return True
    return _agree(_same, left, right)


def proportional(left: Expression, right: Expression, positive: bool = False) -> bool:
    """Return whether one expression is the other times a constant, which is not 0 and may have to be `positive`."""
    ratios: list[Value] = []

    def fits(one: Value, other: Value) -> bool:
        if isinstance(one, tuple) or isinstance(other, tuple):
            return False
        if _is_zero(one) or _is_zero(other):
            return _is_zero(one) and _is_zero(other)
        ratios.append(_divided(one, other))
        return _same(ratios[0], ratios[-1]) and (not positive or (_is_real(ratios[0]) and ratios[0] > 0))

    return bool(variables(left) & variables(right)) and _agree(fits, left, right) and len(ratios) > 1


def computable(node: Expression) -> bool:
    """Return whether an expression has a value that can be computed, at one point at least."""
    return any(_values(node, node, point) is not None for point in _points(sorted(variables(node))))


def variables(node: Expression) -> frozenset[str]:
    return _symbols(node) - _CONSTANTS.keys()


def _symbols(node: Expression) -> frozenset[str]:
    return frozenset([str(node.value)]) if node.kind == "symbol" else frozenset().union(*map(_symbols, node.parts))


def _agree(fits: Callable[[Value, Value], bool], left: Expression, right: Expression) -> bool:
    """Return whether the values fit at each point where both have one, of which there must be two if there are
    variables. A point where only one of them is real does not count, nor does one that takes roots of negative numbers
    where they differ."""
    names, counted = sorted(variables(left) | variables(right)), 0
    imaginary = "i" in _symbols(left) | _symbols(right)
    for point in _points(names):
        if (found := _values(left, right, point)) is None:
            continue
        precision, branched, *pair = found
        with mpmath.workprec(precision):
            if names and _is_real(pair[0]) != _is_real(pair[1]):
                continue
            if not fits(*pair):
                if not imaginary and (branched or not all(map(_is_real, pair))):
                    continue  # roots of negative numbers have several values
                return False
        counted += 1
    return counted >= (2 if names else 1)


def _points(names: list[str]) -> Iterator[Point]:
    """Yield points whose values are rational and short; the first are small and positive, those of the second whole."""
    numbers = random.Random(20)
    for trial in range(_POINTS if names else 1):
        point = {}
        for index, name in enumerate(names):
            sign = -1 if trial == _POINTS - 1 or (trial == _POINTS - 2 and index % 2 == 0) else 1
            value = Fraction(numbers.randrange(3_000, 30_000) | 1, 10_007) * (1, 1, 1, 7, 23, 5)[trial]
            point[name] = sign * (Fraction(math.ceil(value) + 3 * index + 1) if trial == 1 else value)
        yield point


def _values(left: Expression, right: Expression, point: Point) -> tuple[int, bool, Value, Value] | None:
    """Return the precision that both values ask for by their largest and smallest parts, whether a root of a negative
    number is within, and the values; None where one has none, or it is too large."""
    precision = 128
    try:
        while True:
            with mpmath.workprec(precision):
                both = _Evaluation(point)
                pair = both.value(left), both.value(right)
            needed = 256 + 4 * both.bits if both.rounded else precision
            if needed <= precision:
                return precision, both.branched, *pair
            if needed > _MOST_PRECISION:
                return None
            precision = needed
    except Incomputable:
        return None


class _Evaluation:
    """Values at a point. `rounded`: whether a value is not rational; `bits`: the most that a part has; `branched`:
    whether one is a root of a negative number."""

    def __init__(self, point: Point):
        self.point, self.rounded, self.branched, self.bits, self.work = point, False, False, 0, 0

    def value(self, node: Expression) -> Value:
        if node.kind == "matrix":
            cells, width = [self.value(part) for part in node.parts], len(node.parts) // int(node.value)
            return tuple(tuple(cells[at : at + width]) for at in range(0, len(cells), width))
        if node.kind == "number":
            return self._noted(node.value)
        if node.kind == "symbol":
            return self._symbol(str(node.value))
        if node.kind not in _OPERATIONS:
            raise Incomputable
        try:
            return self._noted(_OPERATIONS[node.kind](self, *map(self.value, node.parts)))
        except (ZeroDivisionError, OverflowError, ValueError, TypeError, mpmath.mp.NoConvergence) as error:
            raise Incomputable from error

    def _symbol(self, name: str) -> Value:
        if name in self.point:
            return self._noted(self.point[name])
        self.rounded = True
        return _CONSTANTS[name]()

    def _noted(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            less, bits = sorted((value.numerator.bit_length(), value.denominator.bit_length()))
            self.work += bits * (1 + less // 64)  # a common divisor costs the product
            if bits > 2 * _MOST_BITS or self.work > _MOST_WORK:
                raise Incomputable
            self.bits = max(self.bits, bits)
        elif not isinstance(value, tuple):
            self.rounded = True
            if mpmath.isnan(value):
                raise Incomputable
            if value and mpmath.isfinite(value):
                self.bits = max(self.bits, abs(int(mpmath.mag(value))))
        return value


def _number(value: Fraction | Any) -> Any:
    """Return a number of mpmath."""
    if not isinstance(value, Fraction):
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_PRECISION:
        raise Incomputable
    return mpmath.mpf(value.numerator) / value.denominator


def _added(_: _Evaluation, left: Value, right: Value) -> Value:
    if isinstance(left, tuple) or isinstance(right, tuple):
        if [len(row) for row in left] != [len(row) for row in right]:
            raise Incomputable
        return tuple(tuple(_added(_, *cells) for cells in zip(*rows)) for rows in zip(left, right))
    both = isinstance(left, Fraction) and isinstance(right, Fraction)
    return left + right if both else _number(left) + _number(right)


def _multiplied(_: _Evaluation, left: Value, right: Value) -> Value:
    if isinstance(left, tuple) and isinstance(right, tuple):
        raise Incomputable
    if isinstance(left, tuple):
        return tuple(tuple(_multiplied(_, cell, right) for cell in row) for row in left)
    if isinstance(right, tuple):
        return _multiplied(_, right, left)
    both = isinstance(left, Fraction) and isinstance(right, Fraction)
    return left * right if both else _number(left) * _number(right)


def _divided(left: Value, right: Value) -> Value:
    both = isinstance(left, Fraction) and isinstance(right, Fraction)
    if isinstance(left, tuple):
        return tuple(tuple(_divided(cell, right) for cell in row) for row in left)
    return left / right if both else _number(left) / _number(right)


def _power(evaluation: _Evaluation, base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) not in (0, 1) and bits * abs(exponent) > _MOST_BITS:
            raise Incomputable
        return base ** (int(exponent) % 2 if abs(base) == 1 else int(exponent))
    whole = isinstance(exponent, Fraction) and exponent.denominator == 1
    base, exponent = _number(base), _number(exponent)
    evaluation.branched |= not whole and _is_real(base) and mpmath.re(base) < 0
    if base and mpmath.isfinite(base) and abs(exponent) * (1 + abs(mpmath.log(abs(base), 2))) > _MOST_PRECISION:
        raise Incomputable
    return mpmath.power(base, exponent)


def _root(evaluation: _Evaluation, value: Value, degree: Value) -> Value:
    """Return the real root where there is one, as of -8 by 3."""
    odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2 == 1
    if odd and _is_real(value) and value < 0:
        return -mpmath.root(-_number(value), int(degree))
    if isinstance(value, Fraction) and degree == 2 and value >= 0:
        parts = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if parts[0] ** 2 == value.numerator and parts[1] ** 2 == value.denominator:
            return Fraction(*parts)
    return _power(evaluation, value, _divided(Fraction(1), degree))


def _factorial(_: _Evaluation, value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        if value > _LARGEST_FACTORIAL:
            raise Incomputable
        return Fraction(math.factorial(int(value)))
    return mpmath.factorial(_number(value))


def _binomial(_: _Evaluation, top: Value, bottom: Value) -> Value:
    if all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (top, bottom)):
        if top > _LARGEST_FACTORIAL:
            raise Incomputable
        return Fraction(math.comb(int(top), int(bottom)))
    return mpmath.binomial(_number(top), _number(bottom))


def _logarithm(_: _Evaluation, value: Value, base: Value = 10) -> Value:
    return mpmath.log(_number(value)) / mpmath.log(_number(base))


def _rounded(function: Callable[[Any], int]) -> Callable[..., Value]:
    def apply(_: _Evaluation, value: Value) -> Value:
        if isinstance(value, Fraction):
            return Fraction(function(value))
        if not _is_real(value) or abs(value - mpmath.nint(value)) <= abs(value) * mpmath.mpf(2) ** -64:
            raise Incomputable  # errors of rounding would decide
        return Fraction(int(mpmath.floor(value)) + (function is math.ceil))

    return apply


def _of_mpmath(function: Callable[[Any], Any]) -> Callable[..., Value]:
    def apply(_: _Evaluation, value: Value) -> Value:
        return function(_number(value))

    return apply


def _exponential(evaluation: _Evaluation, value: Value) -> Value:
    return _power(evaluation, mpmath.e + 0, value)


_CONSTANTS: dict[str, Callable[[], Any]] = {
    r"\pi": lambda: mpmath.pi + 0, "e": lambda: mpmath.e + 0, "i": lambda: mpmath.mpc(0, 1),
    r"\infty": lambda: mpmath.inf}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": _added, "mixed": _added, "*": _multiplied, "/": lambda _, left, right: _divided(left, right), "^": _power,
    "root": _root, "neg": lambda _, value: _multiplied(_, Fraction(-1), value), "!": _factorial, "binom": _binomial,
    "degree": lambda _, value: _number(value) * mpmath.pi / 180, "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil), "abs": lambda _, value: abs(value), "log": _logarithm,
    "lg": _logarithm, "ln": _of_mpmath(mpmath.log), "exp": _exponential, "cis": _of_mpmath(mpmath.expj),
    "arcsin": _of_mpmath(mpmath.asin),
    "arccos": _of_mpmath(mpmath.acos), "arctan": _of_mpmath(mpmath.atan),
    **{name: _of_mpmath(getattr(mpmath, name)) for name in (
        "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}}


def _is_real(value: Value) -> bool:
    if isinstance(value, tuple | Fraction):
        return True
    return abs(mpmath.im(value)) <= abs(value) * mpmath.mpf(2) ** (-mpmath.mp.prec // 2)


def _is_zero(value: Value) -> bool:
    return value == 0 if isinstance(value, Fraction) else abs(value) <= mpmath.mpf(2) ** (-3 * mpmath.mp.prec // 4)


def _same(left: Value, right: Value) -> bool:
    """Return whether two values are equal: exactly if both are rational, else but for errors of rounding."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        shapes = [[len(row) for row in value] if isinstance(value, tuple) else None for value in (left, right)]
        return shapes[0] == shapes[1] and all(_same(*cells) for rows in zip(left, right) for cells in zip(*rows))
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _number(left), _number(right)
    if not (mpmath.isfinite(left) and mpmath.isfinite(right)):
        return bool(left == right)
    largest = max(abs(left), abs(right))
    return _is_zero(largest) or abs(left - right) <= largest * mpmath.mpf(2) ** (-mpmath.mp.prec // 2)
