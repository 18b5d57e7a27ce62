"""Any layout of four ranks computes what one rank computes: samples, losses, gradients and weights."""

from __future__ import annotations

import sys

import pytest
from layouts import run_steps, write
from ranks import run_ranks

pytestmark = pytest.mark.run
SPLITS = {"dp4": {}, "dp2-tp2": {"tp": 2}, "tp4": {"tp": 4}, "dp2-cp2": {"cp": 2}, "tp2-cp2": {"tp": 2, "cp": 2}}
REPORTED = {"loss": 1e-6, "grad_norm": 1e-4, "policy/ratio": 1e-5, "policy/kl_reference": 1e-6,
            "mismatch/logprob_mean": 1e-5, "tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    write(folder)
    sys.path.insert(0, str(folder))
    yield str(folder)
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def alone(folder):
    """What one rank computes."""
    return run_ranks(1, run_steps, folder, [])[0]


def overrides(**layouts: dict[str, int]) -> list[str]:
    return [f"layouts.{node}.{size}={count}" for node, split in layouts.items() for size, count in split.items()]


NAMES = list(SPLITS)
PAIRS = [(NAMES[place - 1], NAMES[place]) for place in range(len(NAMES))]
"""From each layout to another one, and to each from another one."""


@pytest.mark.parametrize(("update", "reference"), [*PAIRS, ("dp2-tp2", "dp2-tp2"), ("tp2-cp2", "tp2-cp2")])
def test_pairs_of_layouts_equal_one_rank(folder, alone, update, reference):
    split = SPLITS[reference] or {"tp": 1}  # named, so that it does not follow the actor's
    equals(run_ranks(4, run_steps, folder, overrides(update=SPLITS[update], reference=split))[0], alone)


def equals(found, alone) -> None:
    reports, weights = found
    for step, (report, expected) in enumerate(zip(reports, alone[0], strict=True)):
        assert report["response/fingerprint"] == expected["response/fingerprint"], step
        for name, tolerance in REPORTED.items():
            assert report[name] == pytest.approx(expected[name], rel=1e-4, abs=tolerance), (step, name)
    assert weights.keys() == alone[1].keys()
    for name, weight in weights.items():
        apart = (weight - alone[1][name]).abs()
        assert apart.mean() < 1e-6, name  # a step moves a weight by 1e-3
        assert apart.max() < 2e-4, name  # Adam makes much of gradients that are next to nothing


UNEVEN = {
    "one for all": {"rollout": [2, 1], "advantage": [2, 1], "old": [2, 1], "reference": [2, 1], "update": [2, 1]},
    "each its own": {"rollout": [1, 3], "advantage": [1, 1], "old": [5, 2], "reference": [0, 1], "update": [1, 9]}}


@pytest.mark.parametrize("rows", UNEVEN)
def test_uneven_shares_equal_one_rank(folder, alone, rows):
    """Whoever has how many rows changes nothing of what is computed."""
    wanted = [f"layouts.{node}.rows={parts}" for node, parts in UNEVEN[rows].items()]
    equals(run_ranks(2, run_steps, folder, wanted)[0], alone)


def test_uneven_shares_of_split_models_equal_one_rank(folder, alone):
    wanted = overrides(update={"tp": 2, "rows": [1, 2]}, reference={"tp": 1, "rows": [3, 1, 0, 2]})
    equals(run_ranks(4, run_steps, folder, wanted)[0], alone)


SOME = {
    "a role each": ({"rollout": [1, 1, 0], "old": [1, 1, 0], "update": [2, 1, 0], "reference": [0, 0, 1]},
                    [{"actor", "actor: rollout"}, {"actor", "actor: rollout"}, {"reference"}]),
    "all sample": ({"rollout": [2, 1, 1], "old": [0, 1, 0], "update": [0, 1, 1], "reference": [0, 1, 0]},
                   [{"actor: rollout"}, {"actor", "actor: rollout", "reference"}, {"actor", "actor: rollout"}]),
    "others sample": ({"rollout": [1, 0, 0], "old": [0, 1, 2], "update": [0, 2, 1], "reference": [0, 1, 0]},
                      [{"actor: rollout"}, {"actor", "reference"}, {"actor"}])}


@pytest.mark.parametrize(("case", "swap"), [("a role each", False), ("all sample", True), ("others sample", False)])
def test_ranks_without_rows_of_a_role_have_no_model_of_it(folder, alone, case, swap):
    rows, held = SOME[case]
    wanted = [f"layouts.{node}.rows={parts}" for node, parts in rows.items()]
    found = run_ranks(3, run_steps, folder, [*wanted, f"roles.actor.swap={str(swap).lower()}"])
    equals(next(each for each in found if each[1]), alone)
    assert [{*reports[0]["held"]} for reports, _ in found] == held
    there = [report["resident"]["reference"] for reports, _ in found for report in reports
             if "reference" in report["resident"]]
    assert there
    assert all(count == 0 if swap else count > 0 for count in there), "it swaps as the actor that it copies"
    for name, ranks in (("actor", rows["old"]), ("reference", rows["reference"])):
        parts = [reports[0]["held"].get(name, 0) for reports, _ in found]
        used = sum(any(each) for each in zip(ranks, rows["update"])) if name == "actor" else sum(map(bool, ranks))
        assert sum(map(bool, parts)) == used
        assert max(parts) == pytest.approx(sum(parts) / used, rel=0.01), "they divide it evenly"


def test_the_algorithm_learns_something(alone):
    """Else all layouts would agree on nothing."""
    assert all(report["grad_norm"] > 1e-2 for report in alone[0])
    assert alone[0][0]["policy/kl_reference"] == pytest.approx(0, abs=1e-6) != alone[0][1]["policy/kl_reference"]


def test_fewer_shares_than_ranks_infer_the_same(folder, alone):
    reports, _ = run_ranks(4, run_steps, folder, ["layouts.reference.dp=1", "layouts.reference.tp=2"])[0]
    assert reports[0]["response/fingerprint"] == alone[0][0]["response/fingerprint"]
    assert reports[0]["loss"] == pytest.approx(alone[0][0]["loss"], abs=1e-6)
