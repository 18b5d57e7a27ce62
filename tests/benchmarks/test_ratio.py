import json

import pytest

from benchmarks.ratio import Spread, conclude, interleaved, options, parsed


def test_sides_take_turns():
    order = []

    def side(name):
        return lambda repeat: order.append((name, repeat)) or repeat

    pairs = interleaved({"peer": side("peer"), "ours": side("ours")}, 2)
    assert order == [("peer", 0), ("ours", 0), ("peer", 1), ("ours", 1)]
    assert pairs == [{"peer": 0, "ours": 0}, {"peer": 1, "ours": 1}]


@pytest.mark.parametrize(("goal", "at_least", "holds", "met"), [
    (2.0, True, True, True),
    (2.6, True, True, False),
    (2.0, True, False, False),
    (2.6, False, True, True),
    (2.0, False, True, False),
])
def test_last_line(capsys, goal, at_least, holds, met):
    assert conclude("faster", Spread(2.51234, 2.0, 3.0), goal, holds=holds, at_least=at_least) is met
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "claim": "faster", "value": 2.512, "unit": "x", "low": 2.0, "high": 3.0, "goal": goal, "met": met}


@pytest.mark.parametrize(("arguments", "repeats"), [([], 5), (["--quick"], 1), (["--quick", "--repeats", "3"], 3)])
def test_repeats(arguments, repeats):
    assert parsed(options("What it shows.\n\nMore.", repeats=5), arguments).repeats == repeats


def test_no_repeats_are_refused(capsys):
    with pytest.raises(SystemExit):
        parsed(options("What it shows."), ["--repeats", "0"])
    assert "--repeats must be at least 1" in capsys.readouterr().err
