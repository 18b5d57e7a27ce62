"""A loss of the user's own is read from its source: what is wrong with it is found before anything runs."""

from __future__ import annotations

import uuid

import pytest
from harness import ROOT

from distflow.config.load import load
from distflow.errors import Diagnostic, InvalidInput
from planners import plan

MODULE = '''
import distflow
import distflow as df
from distflow import loss

raise RuntimeError("validation imports nothing")

@loss
def fine(logprobs, advantages, *, sharpness: float = 1.0, name: str = ""):
    return -logprobs * advantages

@df.loss
def needy(logprobs, *, sharpness: float):
    return -logprobs

@loss
def of_rewards(logprobs, reward, sharpness=2.0):
    return -logprobs * reward

@loss
def of_nothing(advantages):
    return -advantages

@loss
def shadowed(logprobs, advantages, *, lengths=3):
    return -logprobs

def unmarked(logprobs):
    return -logprobs
'''
LINE = "  update: {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage, reference]"


@pytest.fixture
def mistakes(workspace, monkeypatch):
    """`mistakes("loss: MODULE:fine")`: the module's name, and what is wrong with a DAG whose update has these
    settings."""
    module = f"losses_{uuid.uuid4().hex}"
    (workspace / f"{module}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(workspace))
    text = (ROOT / "dags/grpo.yaml").read_text().partition("  update:")[0]

    def check(settings: str) -> tuple[str, list[Diagnostic]]:
        line = f"{LINE},\n              with: {{{settings.replace('MODULE', module)}}}}}\n"
        (workspace / "mine.yaml").write_text(text + line)
        try:
            plan(load(str(workspace / "mine.yaml"), str(workspace / "tiny.yaml")), 1)
        except InvalidInput as error:
            return module, list(error.mistakes)
        return module, []

    return check


@pytest.mark.parametrize("settings", [
    "loss: MODULE:fine", "loss: MODULE:fine, loss_settings: {sharpness: 2.0}",
    "loss: MODULE:needy, loss_settings: {sharpness: 2.0}", "loss: ppo, clip: 0.3",
])
def test_what_is_right_passes_and_runs_no_code_of_the_user(mistakes, settings):
    assert mistakes(settings)[1] == []


@pytest.mark.parametrize(("settings", "said"), [
    ("loss: MODULE:of_rewards", [
        "MODULE.py:17: loss `of_rewards` has a parameter `reward`, which a loss does not get.\n\n"
        "    17 |  def of_rewards(…)\n\nIt may have: logprobs, old_logprobs, advantages, lengths.",
        "loss `of_rewards` has a parameter `sharpness`, which a loss does not get.\n\n    17 |  def of_rewards(…)\n\n"
        "It may have: logprobs, old_logprobs, advantages, lengths.\n"
        "A setting stands behind a star:  def of_rewards(logprobs, …, *, sharpness=…)"]),
    ("loss: MODULE:of_nothing", [
        "MODULE.py:21: loss `of_nothing` has no parameter `logprobs`, so no gradient reaches the model.\n\n"
        "    21 |  def of_nothing(…)\n\nInstead:  def of_nothing(logprobs, old_logprobs, advantages): …"]),
    ("loss: MODULE:shadowed", ["loss `shadowed` has a setting `lengths`, which is what a loss gets as a parameter",
                               "Put it before the star:  def shadowed(logprobs, …, lengths, *, …)"]),
    ("loss: MODULE:fne", ["module `MODULE` has no function `fne` with @loss above it",
                          "Did you mean `fine`? Losses in it: fine, needy, of_rewards, of_nothing, shadowed."]),
    ("loss: MODULE:unmarked", ["module `MODULE` has no function `unmarked` with @loss above it"]),
    ("loss: nowhere:fine", ["module `nowhere` cannot be found", "It was looked for in"]),
    ("loss: MODULE:needy", ["loss `needy` needs the setting `sharpness`", "with: {…, loss_settings: {sharpness: …}}"]),
    ("loss: MODULE:fine, loss_settings: {sharpnes: 1.0}",
     ["loss `fine` has no setting `sharpnes`", "Did you mean `sharpness`? Settings: sharpness, name."]),
    ("loss: MODULE:fine, loss_settings: {name: 1}", ["setting `name` of loss `fine` must be text, not 1"]),
    ("loss: MODULE:fine, clip: 0.3", ["setting `clip` says nothing with `loss: MODULE:fine`"]),
    ("loss: ppo, loss_settings: {clip: 0.3}", ["`loss_settings` are for a loss of your own, and `loss` is `ppo`"]),
    ("loss: ppoo", ["setting `loss` of `policy_update` must be one of ['ppo', 'gspo', 'cispo', 'reinforce'] or "
                    "MODULE:FUNCTION, not 'ppoo'"]),
    ("loss: 3", ["or MODULE:FUNCTION, not 3"]),
])
def test_what_is_wrong_is_said_with_its_line(mistakes, settings, said):
    module, found = mistakes(settings)
    text = "\n\n".join(map(str, found)).replace(module, "MODULE")
    for part in said:
        assert part in text
    assert all(mistake.where and mistake.where.line for mistake in found)


def test_what_a_loss_module_imports_must_be_there(mistakes, workspace):
    name = f"needs_{uuid.uuid4().hex}"
    (workspace / f"{name}.py").write_text("import nonexistent_package\n" + MODULE)
    found = mistakes(f"loss: {name}:fine")[1]
    assert [(mistake.what, mistake.where.line) for mistake in found] == [
        (f"module `{name}` imports `nonexistent_package`, which cannot be found", 1)]
