"""A run is not started where its processes alone would fill the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.cli.launcher import check_memory
from distflow.errors import InvalidInput


def test_more_ranks_than_the_memory_has_room_for_are_refused(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24683340 kB\nMemAvailable:   20971520 kB\n")
    check_memory(50, meminfo)
    with pytest.raises(InvalidInput, match=r"64 ranks take 25.6 GiB .* has 20.0 GiB left: .* --ranks 50"):
        check_memory(64, meminfo)
    check_memory(64, tmp_path / "not_of_linux")


def test_a_run_of_too_many_ranks_ends_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    from distflow.cli import main

    assert main(["run", "grpo", "--ranks", "4000", "--set", "data.batch=4000"]) == 2
    assert "4000 ranks take 1,600.0 GiB of host memory or more" in capsys.readouterr().err
