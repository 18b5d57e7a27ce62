"""MindSpeed RL's Table 1, row by row, to the digits that it prints."""

import sys

import pytest

from benchmarks import transfer_dock
from benchmarks.transfer_dock import SampleFlow
from distflow.data.row_copies import COPIES

K, GIB, MIB = 1024, 2**30, 2**20
TABLE = [  # G, N, P, n, S, scalars, GiB, seconds at 100 MiB/s, seconds at 1 GiB/s
    (256, 8, 2 * K, 5, 8 * K, 3, 0.96, 9.92, 0.97),
    (256, 16, 2 * K, 5, 16 * K, 3, 3.81, 39.0, 3.81),
    (K, 16, 2 * K, 5, 16 * K, 3, 15.2, 156.1, 15.2),
    (K, 32, 4 * K, 8, 32 * K, 5, 97.0, 993.3, 97.0),
    (4 * K, 32, 4 * K, 8, 32 * K, 5, 388.0, 3900, 388.0),
    (8 * K, 64, 4 * K, 8, 64 * K, 5, 3100, 31000, 3100),
]


@pytest.mark.parametrize("row", TABLE)
def test_table_1(row):
    *sizes, volume, slow, fast = row
    flow = SampleFlow(*sizes)
    assert flow.nbytes / GIB == pytest.approx(volume, rel=0.03)
    assert flow.seconds(100 * MIB) == pytest.approx(slow, rel=0.03)
    assert flow.seconds(GIB) == pytest.approx(fast, rel=0.03)


def test_its_head_says_what_copies_rows(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transfer_dock", "--alone", "--quick"])
    for part in ("show_table", "show_shards", "show_copies", "show_leases"):
        monkeypatch.setattr(transfer_dock, part, lambda *_: None)
    transfer_dock.main()
    assert capsys.readouterr().out == f"{COPIES}\n"


def test_storage_shards_share_the_volume():
    flow = SampleFlow(K, 16, 2 * K, 5, 16 * K, 3)
    alone, shared = flow.bytes_through_each_shard(1, 5), flow.bytes_through_each_shard(16, 5)
    assert shared == alone / 16
    assert alone / flow.nbytes < 1.001, "metadata are next to nothing"
