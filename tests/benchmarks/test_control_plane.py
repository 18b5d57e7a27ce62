"""What ranks ask of the store is counted right, and does not grow with the number of ranks."""

from __future__ import annotations

import pytest

from benchmarks import control_plane
from benchmarks.control_plane import PARTS, Cost, growth_exponent, table, tcp_store, together

SIZES = (16, 64)


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"):  # `measure` sets them: they are taken back
        monkeypatch.setenv(name, "0")


def test_the_power_is_the_slope_of_the_logarithms():
    assert growth_exponent({ranks: 3.0 * ranks**2 for ranks in SIZES}) == pytest.approx(2.0)
    assert growth_exponent(dict.fromkeys(SIZES, 7.0)) == pytest.approx(0.0)
    assert growth_exponent({16: 0.0, 64: 5.0}) == 0.0, "what was not seen to cost anything has no slope"


def test_operations_bytes_and_connections_are_of_each_rank():
    with tcp_store() as kept:
        clients = [kept.client() for _ in range(3)]
        with control_plane.Part(kept, clients) as part:
            together(clients, lambda number, client: [client.put(f"key {number}", "x" * 1000) for _ in range(number)])
        assert [client.counts.operations for client in clients] == [0, 1, 2]
        assert [client.counts.connections for client in clients] == [0, 1, 1]
        assert (part.cost.operations, part.cost.most) == (1.0, 2)
        assert 1000 < part.cost.bytes < 1100
        with control_plane.Part(kept, clients[:1]) as part:
            together(clients[:1], lambda _number, client: client.get("key 2"))
        assert (part.cost.operations, 1000 < part.cost.bytes < 1100) == (1.0, True), "answers count, too"


def test_the_failure_of_a_rank_ends_a_measurement():
    def work(number, _client):
        assert number != 1, "rank 1 fails"

    with pytest.raises(AssertionError, match="rank 1 fails"):
        together([None] * 3, work)


def test_no_part_asks_more_of_the_store_when_there_are_more_ranks(capsys):
    found = control_plane.measured("torch's TCPStore", tcp_store, SIZES)
    for part in PARTS:
        operations = {ranks: cost[part].operations for ranks, cost in found.items()}
        assert min(operations.values()) >= 1, part
        limit = 0.5 if part == "join" else 0.05  # who joins looks again as long as machines come
        assert growth_exponent(operations) < limit, (part, operations)
    said = capsys.readouterr().out
    assert all(said.count(f"\n  {part:8} {ranks:5}  ") == 1 for part in PARTS for ranks in SIZES), said


def test_the_table_gives_powers_beside_the_last_size():
    found = {ranks: dict.fromkeys(PARTS, Cost(ranks, ranks, 1024.0 * ranks**2, 1.0)) for ranks in SIZES}
    lines = list(table("a store", found))
    assert lines[2].split() == ["start", "16", "16.00", "(", "16.0)", "256.00", "1.00"]
    assert lines[3].split() == ["start", "64", "64.00", "(", "64.0)", "4096.00", "1.00", "1.00", "2.00", "0.00"]
