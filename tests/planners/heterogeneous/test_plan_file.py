"""`distflow plan` for mixed hardware: what it prints, writes, reads again and refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.qwen3 import folder
from distflow.cli import main, mixed_plan
from distflow.config.load import load
from planners.heterogeneous.explain import bounds, duration, gantt, helps, picture
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.plan_file import digests_of, placement_of, written
from planners.heterogeneous.problem import Placement
from planners.heterogeneous.search import search
from planners.heterogeneous.workload import problem_of


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`plan(command, *arguments, dag="grpo", cluster="h200_a100")`: exit code, output and errors of `distflow plan`."""
    def run(command: str, *arguments: str, dag: str = "grpo", cluster: str = "h200_a100",
            size: str = "4B") -> tuple[int, str, str]:
        sizes = [f"roles.actor.model={folder(size, tmp_path)}", "data.batch=64",
                 "roles.actor.generation.max_new_tokens=512"]
        code = main(["plan", command, dag, "--cluster", cluster, *(part for text in sizes for part in ("--set", text)),
                     *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_plan_is_written_explained_and_read_again(plan: Callable, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    code, printed, _ = plan("mixed", "--within", "0.9", "--out", str(out), "--explain")
    assert code == 0
    for part in ("a prediction of the cost model, not a measurement", "an iteration: ", "what bounds each task",
                 "what would help most", "devices by group (. idles)", "hopper (h200, zone)", "█"):
        assert part in printed
    said = yaml.safe_load(out.read_text())
    ranks = [rank for group in said["groups"] for rank in group["ranks"]]
    devices = sum(count for group in said["groups"] for count in group["devices"].values())
    assert len(ranks) == len(set(ranks)) == devices
    for task in said["tasks"].values():
        assert sum(shares["count"] for shares in task["shares"]) == task["dp"]
        assert sum(shares["count"] * shares["rows"] for shares in task["shares"]) >= 512
        assert sum(task["layers"]) == 36
        assert all(len(shares["stages"]) == task["pp"] for shares in task["shares"])
    again = plan("explain", "--plan", str(out))
    assert again[0] == 0
    assert again[1].startswith(printed)
    assert again[1][len(printed):].startswith(("\ngrpo on 64 ranks", "\nNo run can obey it:"))


def test_a_described_cluster_says_how_many_ranks_there_are(plan: Callable) -> None:
    code, printed, _ = plan("show")
    assert code == 0
    assert printed.startswith("grpo on 64 ranks, mode sync")
    code, _, error = plan("show", "--ranks", "65")
    assert code == 2
    assert "cluster `h200_a100` has 64 ranks, and the plan is for 65" in error


TINY = """
name: tiny
devices: {l4: {tflops: {bfloat16: 121}, memory_gib: 22, memory_gb_s: 300}}
machines: {small: {device: l4, devices: %d, inside: {gb_s: 32}}}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[int], str]:
    def make(devices: int) -> str:
        path = tmp_path / f"tiny{devices}.yaml"
        path.write_text(TINY % devices)
        return str(path)

    return make


def test_the_program_says_what_it_proves_and_what_it_does_not(plan: Callable, tiny: Callable) -> None:
    """Its proof is of the layouts considered; no plan at all undercuts the other bound."""
    code, printed, _ = plan("mixed", "--solver", "ilp", cluster=tiny(8))
    assert code == 0
    assert "solver ilp" in printed
    assert "\nit is the best of the layouts considered\n" in printed
    seconds, bound = map(float, re.search(r"an iteration: (\S+) s; no plan takes less than (\S+) s", printed).groups())
    assert bound < seconds
    assert "proven" not in printed


def test_a_proof_counts_for_the_plan_without_its_idle_machines(plan: Callable, tiny: Callable,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    path, searched = Path(tiny(4)), mixed_plan._searched
    more = "{more: {device: l4, devices: 4, zone: far, inside: {gb_s: 32}}, small: "
    path.write_text(path.read_text().replace("{small: ", more)
                    + "zones: {far: overseas}\nlinks: {world: {gb_s: 1.0e-4, latency_us: 1.0e6}}\n")

    def with_idle(*given: Any) -> tuple[list[Placement], float | None]:
        found, proven = searched(*given)
        assert sorted(found[-1].subsets[0]) == [0, 4]
        return [*found[:-1], replace(found[-1], subsets=((4, 4),))], proven

    monkeypatch.setattr(mixed_plan, "_searched", with_idle)
    code, printed, error = plan("mixed", "--runnable", "--solver", "ilp", cluster=str(path), size="1.7B")
    assert code == 0, error
    assert "\nit is the best of the layouts considered\n" in printed
    assert re.search("\ngroup 1: 4 (small|more)\n", printed)


def embedded(capsys: pytest.CaptureFixture[str], cluster: str, *more: str) -> str:
    words = ["--cluster", cluster, "--set", "data.batch=1", *more]
    assert main(["plan", "mixed", "grpo", "--within", "0.99", *words]) == 0
    return capsys.readouterr().out


def test_a_toy_on_a_data_centre_is_called_one_and_takes_no_time_that_is_zero(
        capsys: pytest.CaptureFixture[str], tiny: Callable, tmp_path: Path) -> None:
    said = embedded(capsys, tiny(1))
    assert "This plan is a toy: `actor` is a tiny model of " in said
    assert "Name yours:  --set roles.actor.model=FOLDER" in said
    assert " 0.00 s" not in said
    slow = tmp_path / "slow.yaml"
    slow.write_text((TINY % 1).replace("121", "0.1"))
    assert "toy" not in embedded(capsys, str(slow))
    sizes = "roles.actor.model={architecture: qwen3, layers: 12, hidden: 1024, heads: 8, kv_heads: 8}"
    assert "toy" not in embedded(capsys, tiny(1), "--set", sizes), "of 200 million parameters"


def test_seconds_as_people_read_them() -> None:
    assert [duration(seconds) for seconds in (0.0, 12.345, 0.012, 0.0042, 0.000321)] == \
        ["0.00 s", "12.35 s", "0.01 s", "4.2 ms", "321 µs"]


@pytest.mark.parametrize(("changed", "says", "key"), [
    ({"cluster": "single_zone"}, "this plan is for another cluster", "cluster"),
    ({"dag": "rloo"}, "this plan is for another DAG", "dag"),
    ({"size": "8B"}, "this plan is for another amount of work", "work"),
])
def test_a_plan_for_something_else_is_refused(plan: Callable, tmp_path: Path, changed: dict, says: str,
                                              key: str) -> None:
    out = tmp_path / "plan.yaml"
    plan("mixed", "--within", "0.9", "--out", str(out))
    code, _, error = plan("explain", "--plan", str(out), **changed)
    assert code == 2
    line = next(number for number, text in enumerate(out.read_text().splitlines(), 1) if f"{key}: " in text)
    assert f"plan.yaml:{line}: {says}" in error


def test_a_key_that_a_cluster_file_does_not_have_makes_no_other_cluster(tmp_path: Path) -> None:
    """The digest is that of plans which were made before there was an `efficiency`."""
    path, found = tmp_path / "cluster.yaml", []
    for more in ("", ", efficiency: {compute: 0.6}"):
        path.write_text((TINY % 2).replace("300}", f"300{more}}}"))
        spec = load("grpo", None, [], str(path))
        found.append(digests_of(spec, problem_of(spec)).cluster)
    assert found[0] == "af3b0e9d0260b9d4" != found[1]


def test_a_file_that_is_no_plan_is_refused(plan: Callable, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    plan("mixed", "--within", "0.9", "--out", str(out))
    out.write_text(out.read_text().replace("solver:", "solvr:"))
    code, _, error = plan("explain", "--plan", str(out))
    assert code == 2
    assert "unknown key `solvr`" in error
    assert "Did you mean `solver`?" in error


@pytest.mark.parametrize(("command", "arguments"), [
    ("show", ("--explain",)), ("show", ("--out", "x.yaml")), ("mixed", ("--plan", "x.yaml")),
    ("mixed", ("--threshold", "0.1")), ("explain", ("--plan", "x.yaml", "--runnable")),
])
def test_options_of_another_command_are_refused(plan: Callable, command: str, arguments: tuple[str, ...]) -> None:
    code, _, error = plan(command, *arguments)
    refused = next(word for word in arguments if word.startswith("--") and (command, word) != ("explain", "--plan"))
    assert code == 2
    assert f"distflow plan {command} takes no `{refused}`" in error


def test_a_file_that_cannot_be_written(plan: Callable, tmp_path: Path) -> None:
    code, _, error = plan("mixed", "--within", "0.9", "--out", str(tmp_path / "none" / "plan.yaml"))
    assert code == 2
    assert "plan.yaml: cannot be written: No such file or directory" in error


def test_impossible_memory_names_the_tenant_and_the_shortfall(plan: Callable, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("name: tiny\ndevices: {l4: {tflops: {bfloat16: 121}, memory_gib: 22, memory_gb_s: 300}}\n"
                    "machines: {small: {device: l4, devices: 2, inside: {gb_s: 32}}}\n")
    code, _, error = plan("mixed", cluster=str(tiny))
    assert code == 2
    assert "`actor` (update) fits no device" in error
    assert "GiB too little" in error


def test_doubling_what_bounds_a_work_helps_it(mixed_spec: Callable) -> None:
    problem = problem_of(mixed_spec("grpo", "a100_l40s_l4"))
    *_, found = search(problem, budget=2000)
    by_task = {bound.task: bound.saved[0][0] for bound in bounds(problem, found.placement)}
    assert by_task["rollout"] == "speed of starting kernels"
    assert by_task["update"] == "compute"
    assert all(times >= 0.999 for _, times in helps(problem, found.placement))
    costed = CostedProblem(problem)
    assert len(list(gantt(costed, found.placement))) == 3
    assert sum(line.count("█") > 0 for line in gantt(costed, found.placement)) == 3
    assert len(list(picture(problem, found.placement))) == len(problem.hardware.device_groups)



def test_the_file_says_the_placement(mixed_spec: Callable) -> None:
    spec = mixed_spec("ppo", "multi_region", "mode=async")
    problem = problem_of(spec)
    *_, found = search(problem, budget=2000)
    plan = written(problem, found.placement, digests_of(spec, problem), "hybrid", found.bound)
    assert placement_of(problem, plan) == found.placement


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_to_search_is_refused(plan, seconds) -> None:
    code, printed, error = plan("mixed", "--seconds", seconds, "--within", "0.99")  # which ends a search that begins
    assert (code, printed) == (2, "")
    assert f"--seconds {seconds} is no time to search; give more than 0" in error
