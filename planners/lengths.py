"""Checks the lengths of rows against the positions of models: learned ones end, rotary frequencies may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES, Contract
from distflow.contracts.nodes import token_columns
from distflow.errors import Diagnostic
from planners.settings import setting_value

_PROMPTS = "data.max_prompt_tokens"


class _Limit(NamedTuple):
    """Most tokens of a prompt and of what follows it."""

    prompt: int
    more: int
    key: str  # of `more`

    def __str__(self) -> str:
        return f"{self.prompt + self.more:,} tokens ({_PROMPTS} {self.prompt:,} + {self.key} {self.more:,})"

    def lower(self, most: int) -> str:
        """Return how to keep rows within `most` tokens."""
        own = ((_PROMPTS, most - self.more), (self.key, most - self.prompt))
        ways = "  or  ".join(f"--set {key}={count}" for key, count in own if count > 0)
        return f"Lower their sum by {self.prompt + self.more - most:,}" + (f":  {ways}" if ways else ".")


def check_lengths(spec: Spec, bound: dict[str, Contract]) -> list[Diagnostic]:
    """Return a mistake for each role whose rows may pass its model's table of positions, and for each that samples
    beyond the length up to which rotary frequencies are those of the whole row."""
    mistakes = []
    sampled = dict(_sampled(spec, bound))
    limits = [*sampled.values(), *([_targets(spec)] if token_columns(spec, ENGINE_TYPES) or not sampled else [])]
    longest = max(limits, key=_tokens)
    used = {node.role for node in spec.dag.nodes.values() if node.type in ENGINE_TYPES}
    for role in sorted(used.intersection(spec.dag.roles)):
        shape, own, where = spec.shape_of(role), sampled.get(role), spec.run_source.location(("roles", role))
        read = own if own and _tokens(own) == _tokens(longest) else longest
        if shape and 0 < shape.learned_positions < _tokens(read):
            what = f"role `{role}`: rows may have {read}, and its model has learned {shape.learned_positions:,} " \
                   "positions: a token beyond them ends the run"
            mistakes.append(Diagnostic(what, where, read.lower(shape.learned_positions)))
        if shape and own and 0 < shape.own_length < _tokens(own):
            what = f"role `{role}` may sample rows of {own}, and beyond {shape.own_length:,} tokens the rotary " \
                   "frequencies of its model depend on a row's length: rows would be trained with others than " \
                   "they are sampled with"
            mistakes.append(Diagnostic(what, where, own.lower(shape.own_length)))
    return mistakes


def length_notes(spec: Spec, bound: dict[str, Contract], generating: set[str]) -> Iterator[str]:
    for role in sorted(generating):
        own, shape, shown = spec.settings_of(role), spec.shape_of(role), _longest_beginning(spec, bound, role)
        longest = spec.run.data.max_prompt_tokens + shown + (own.generation.max_new_tokens if own else 0)
        if shape and shape.positions and longest > shape.positions:
            more = " + max_tokens, by which `start` may lengthen a prompt" if shown else ""
            yield (f"role `{role}` may generate up to {longest:,} tokens (data.max_prompt_tokens + "
                   f"generation.max_new_tokens{more}), but its model was made for {shape.positions:,}")


def _tokens(limit: _Limit) -> int:
    return limit.prompt + limit.more


def _sampled(spec: Spec, bound: dict[str, Contract]) -> Iterator[tuple[str, _Limit]]:
    """Yield each role that samples, for training or to be validated, with the longest of its rows."""
    validated = {role for role, item in spec.dag.roles.items() if item.trained and item.head == "lm"
                 } if spec.run.validation else set[str]()
    generating = {spec.dag.nodes[node].role for node, contract in bound.items() if contract.samples}
    for role in sorted(generating | validated):
        settings = spec.settings_of(role)
        prompt = spec.run.data.max_prompt_tokens + _longest_beginning(spec, bound, role)
        more, key = settings.generation.max_new_tokens if settings else 0, f"roles.{role}.generation.max_new_tokens"
        yield role, _Limit(prompt, more, key)


def _targets(spec: Spec) -> _Limit:
    return _Limit(spec.run.data.max_prompt_tokens, spec.run.data.max_target_tokens, "data.max_target_tokens")


def _longest_beginning(spec: Spec, bound: dict[str, Contract], role: str) -> int:
    """Return the most tokens that an environment of the role's may put into a prompt before the first turn."""
    nodes = [node for node, kind in spec.environments.items()
             if kind.starts and spec.dag.nodes[node].role == role and "max_tokens" in bound[node].settings]
    return max((setting_value(spec, node, bound[node], "max_tokens") for node in nodes), default=0)
