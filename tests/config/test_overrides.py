"""Values of `--set`: a key that takes text takes it as it is, and any other YAML."""

import pytest

from distflow.config.load import load
from distflow.config.overrides import given_value, joined
from distflow.config.run import Run

SUFFIX = " End with #### and the number. "


@pytest.mark.parametrize(("key", "text", "value"), [
    *(("data.prompt_suffix", text, text) for text in (SUFFIX, "", "yes", "1e3", "null", "[x]", "a: b", "{{", "it's")),
    *(("data.system_prompt", text, text) for text in (" # Rules", "no", "- a", "'a' or 'b'")),
    ("data.system_prompt", "null", None), ("data.tools", "", None),
    ("data.prompt_suffix", "' quoted '", " quoted "), ("data.prompt_suffix", '"\\n"', "\n"),
    ("roles.actor.generation.stop", "\n", "\n"), ("roles.actor.generation.stop", " ###", " ###"),
    ("roles.actor.generation.stop", "[a, b]", ["a", "b"]),
    ("validation.data.test", "my #1: a.jsonl", "my #1: a.jsonl"),
    ("roles.actor.model", "my model #2", "my model #2"), ("data.train", "{a.jsonl: 2}", {"a.jsonl": 2}),
    ("steps", " 5 # few", 5), ("nodes.reward.with.reward", "{math: 1}", {"math": 1}), ("mode", " async", "async"),
])
def test_set_takes_text_as_it_is(key, text, value):
    assert given_value(Run, tuple(key.split(".")), text, f"--set {key}={text}") == value


def test_set_keeps_what_looks_like_a_comment():
    assert load("grpo", None, [f"data.prompt_suffix={SUFFIX}"]).run.data.prompt_suffix == SUFFIX
    assert load("grpo", None, ["data.prompt_suffix = Now."]).run.data.prompt_suffix == "Now."


@pytest.mark.parametrize("words", ["--set steps = 2 --set seed=3 --name a", "--set steps = 2 seed=3 --name a",
                                   "--set steps=2 seed=3 --name a"])
def test_set_takes_what_the_shell_has_split(words):
    assert joined(words.split()) == ["--set", "steps=2", "--set", "seed=3", "--name", "a"]
