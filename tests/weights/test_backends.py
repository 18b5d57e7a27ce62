"""A backend that is asked for is used, or is an error; only `auto` chooses."""

import pytest

from distflow.weights.backends import Probe, choose, probe
from distflow.weights.errors import NoTransport


def test_gloo_works_and_ucc_says_why_not():
    assert probe("gloo") == Probe(True, "")
    found = probe("ucc")
    assert found.works or "built without it" in found.reason


def test_what_is_missing_is_an_error(monkeypatch):
    monkeypatch.setattr("distflow.weights.backends.probe", lambda name: Probe(False, "this torch was built without it"))
    with pytest.raises(NoTransport, match="`backend: ucc` was asked for and does not work here: this torch was built"):
        choose("ucc", "cpu")
    with pytest.raises(NoTransport, match="Did you mean `gloo`"):
        choose("glo", "cpu")


def test_auto_says_what_it_chose(monkeypatch):
    assert choose("auto", "cpu") == ("gloo", "auto chose gloo, not nccl: tensors are on the CPU")
    monkeypatch.setattr("distflow.weights.backends.probe", lambda name: Probe(True, ""))
    assert choose("auto", "cuda")[0] == "nccl"
