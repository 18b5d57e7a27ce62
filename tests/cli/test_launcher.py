"""A run is not started where its processes alone would fill the machine's memory."""

import pytest

from distflow.cli import launcher, main
from distflow.cli.launcher import check_memory
from distflow.config import memory_limit
from distflow.errors import InvalidInput


def test_more_ranks_than_the_memory_has_room_for_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path)  # without limits
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24683340 kB\nMemAvailable:   20971520 kB\n")
    check_memory(50, meminfo)
    with pytest.raises(InvalidInput, match=r"64 ranks take 25.6 GiB .* has 20.0 GiB left: .* --ranks 50"):
        check_memory(64, meminfo)
    check_memory(64, tmp_path / "not_of_linux")
    meminfo.write_text("MemAvailable:   209715 kB\n")
    with pytest.raises(InvalidInput, match=r"1 rank takes 0.4 GiB .* has 0.2 GiB left: free memory first"):
        check_memory(1, meminfo)


def test_more_ranks_than_the_control_group_allows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path)
    (tmp_path / "memory").mkdir()
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the second and the first version
        (tmp_path / name).write_text(f"{2**30}\n")
    check_memory(2)
    with pytest.raises(InvalidInput, match=r"3 ranks .* limit of this control group is 1.0 GiB: .* --ranks 2$"):
        check_memory(3)
    monkeypatch.setattr(launcher, "_RANK_GIB", 1.5)
    with pytest.raises(InvalidInput, match=r"limit of this control group is 1.0 GiB: raise it"):
        check_memory(1)


def test_a_run_of_too_many_ranks_ends_before_it_starts(capsys, monkeypatch):
    monkeypatch.setattr(launcher, "_RANK_GIB", 1e9)
    monkeypatch.setattr(launcher, "spawn", lambda *_, **__: pytest.fail("ranks are started"))
    assert main(["run", "grpo", "--ranks", "2"]) == 2
    assert "2 ranks take 2,000,000,000.0 GiB of host memory or more" in capsys.readouterr().err
