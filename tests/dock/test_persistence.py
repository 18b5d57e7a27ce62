"""What was answered is never forgotten; what was cut off was not answered."""

import pytest

from distflow.dock import DockError
from distflow.dock.persistence import Journal
from distflow.errors import CheckpointError

COMMITS = [("update", 5, 0, [3, 1, 2, 9]), ("reward", 6, None, []), ("update", 7, 1, [4])]


def filled(path):
    journal = Journal(path)
    journal.begin(11)
    for name, lease, step, ids in COMMITS:
        journal.commit(name, lease, step, ids)
    journal.close()


def test_commits_come_back(tmp_path):
    filled(tmp_path / "j")
    journal = Journal(tmp_path / "j")
    assert list(journal.commits("update")) == [(5, 0, [1, 2, 3, 9]), (7, 1, [4])]
    assert list(journal.commits("reward")) == [(6, None, [])]
    assert journal.epochs == {11}
    journal.close()


def test_wherever_it_is_cut_the_rest_stands_and_it_goes_on(tmp_path):
    filled(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        journal = Journal(tmp_path / "cut")
        kept = list(journal.commits("update"))
        assert kept in ([], [(5, 0, [1, 2, 3, 9])])
        journal.commit("update", 8, 2, [5])
        journal.close()
        again = Journal(tmp_path / "cut")
        assert list(again.commits("update")) == [*kept, (8, 2, [5])]
        again.close()


def test_a_disk_that_takes_nothing_is_said(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Journal(tmp_path / "nowhere" / "j")
    journal = Journal(tmp_path / "j")
    journal.file, file = -1, journal.file
    with pytest.raises(DockError, match="cannot be written, so it does not count"):
        journal.commit("update", 1, None, [1])
    journal.file = file
    journal.close()
