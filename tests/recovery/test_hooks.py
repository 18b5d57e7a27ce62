"""Hooks of a role are called for ranks of that role alone."""

import pytest

from distflow.errors import InvalidInput
from distflow.plan import INFERENCE, ROLLOUT, TRAINER
from distflow.recovery.hooks import HOOKS, HookContext, call, hook


@pytest.mark.parametrize("role", [TRAINER, ROLLOUT, INFERENCE, None])
def test_a_hook_is_called_for_the_ranks_of_its_role(role, monkeypatch):
    monkeypatch.setitem(HOOKS, "on_join", [])
    groups, called = (TRAINER, ROLLOUT, INFERENCE), []
    hook(when="on_join", role=role)(lambda moment: called.append(moment.group))
    for group in groups:
        call("on_join", group, HookContext(group, 0, 0, None))
    assert called == [group for group in groups if role in (None, group)]


def test_another_role_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidInput, match="give `trainer`, `rollout` or `inference`, or leave it out for all"):
        hook(when="on_join", role="reference")
