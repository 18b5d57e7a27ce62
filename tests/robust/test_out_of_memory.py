"""What a seat can know of the kernel's end of its worker. The end itself: tests/test_recovery.py."""

from __future__ import annotations

import pytest

from distflow.robust import out_of_memory


@pytest.mark.parametrize(("before", "now", "said"), [
    (3, 3, "Somebody sent it"), (3, 5, "The kernel probably ended it because memory was full: it has ended 2 since"),
    (None, 5, "The kernel may have ended it"), (3, None, "The kernel may have ended it")])
def test_the_cause_of_a_kill_is_no_more_than_is_known(monkeypatch, before, now, said):
    monkeypatch.setattr(out_of_memory, "ended", lambda: now)
    assert out_of_memory.cause(before).startswith(said)
