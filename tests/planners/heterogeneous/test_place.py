"""`distflow plan` for mixed hardware: what it prints, writes, reads again and refuses."""

from __future__ import annotations

import re

import pytest
import yaml

from benchmarks.shapes import SHAPES
from distflow.cli import main
from planners.heterogeneous.explain import bounds, duration, helps
from planners.heterogeneous.search import search
from planners.heterogeneous.workload import problem_of


@pytest.fixture
def plan(tmp_path, capsys):
    """`plan(*arguments, dag="grpo", cluster="h200_a100")`: exit code, output and errors of `distflow plan`."""
    def run(*arguments: str, dag: str = "grpo", cluster: str = "h200_a100",
            size: str = "4B") -> tuple[int, str, str]:
        sizes = [f"roles.actor.model={SHAPES['Qwen3-' + size].folder(tmp_path)}", "data.batch=64",
                 "roles.actor.generation.max_new_tokens=512"]
        code = main(["plan", dag, "--cluster", cluster, *(part for text in sizes for part in ("--set", text)),
                     *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_placement_is_explained_and_written_as_a_run_file(plan, tmp_path, capsys):
    out = tmp_path / "placed.yaml"
    code, printed, _ = plan("--place", "--within", "0.9", "--out", str(out), "--explain")
    assert code == 0
    for part in ("a prediction of the cost model, not a measurement", "an iteration: ", "what bounds each task",
                 "what would help most", "weights that are sent", "memory of the fullest device",
                 "machines, in the order of ranks: ", "update → rollout",
                 f"distflow run grpo --run {out}"):
        assert part in printed
    said = yaml.safe_load(out.read_text())
    assert main(["plan", "grpo", "--run", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"grpo on {said['ranks']} ranks, mode {said['mode']}")
    for node in ("rollout", "reference", "update"):
        layout = said["layouts"][node]
        assert len(layout["rows"]) * layout["tp"] * layout["pp"] == said["ranks"]


def test_a_described_cluster_says_how_many_ranks_there_are(plan):
    code, printed, _ = plan()
    assert code == 0
    assert printed.startswith("grpo on 64 ranks, mode sync")
    code, _, error = plan("--ranks", "65")
    assert code == 2
    assert "cluster `h200_a100` has 64 ranks, and the plan is for 65" in error


TINY = """
name: tiny
devices: {l4: {tflops: {bfloat16: 121}, memory_gib: 22, memory_gb_s: 300}}
machines: {small: {device: l4, devices: %d, inside: {gb_s: 32}}}
"""


@pytest.fixture
def tiny(tmp_path):
    def make(devices: int) -> str:
        path = tmp_path / f"tiny{devices}.yaml"
        path.write_text(TINY % devices)
        return str(path)

    return make


def test_the_program_says_what_it_proves_and_what_it_does_not(plan, tiny):
    """Its proof is of the layouts considered; no plan at all undercuts the other bound."""
    code, printed, _ = plan("--place", "--solver", "ilp", cluster=tiny(8))
    assert code == 0
    assert "solver ilp" in printed
    assert "\nit is the best of the layouts considered\n" in printed
    seconds, bound = map(float, re.search(r"an iteration: (\S+) s; no plan takes less than (\S+) s", printed).groups())
    assert bound < seconds
    assert "proven" not in printed


def embedded(capsys: pytest.CaptureFixture[str], cluster: str, *more: str) -> str:
    words = ["--cluster", cluster, "--set", "data.batch=1", *more]
    assert main(["plan", "--place", "grpo", "--within", "0.99", *words]) == 0
    return capsys.readouterr().out


def test_a_toy_on_a_data_centre_is_called_one_and_takes_no_time_that_is_zero(capsys, tiny, tmp_path):
    said = embedded(capsys, tiny(1))
    assert "This plan is a toy: `actor` is a tiny model of " in said
    assert "Name yours:  --set roles.actor.model=FOLDER" in said
    assert " 0.00 s" not in said
    slow = tmp_path / "slow.yaml"
    slow.write_text((TINY % 1).replace("121", "0.1"))
    assert "toy" not in embedded(capsys, str(slow))
    sizes = "roles.actor.model={architecture: qwen3, layers: 12, hidden: 1024, heads: 8, kv_heads: 8}"
    assert "toy" not in embedded(capsys, tiny(1), "--set", sizes), "of 200 million parameters"


def test_seconds_as_people_read_them():
    assert [duration(seconds) for seconds in (0.0, 12.345, 0.012, 0.0042, 0.000321)] == \
        ["0.00 s", "12.35 s", "0.01 s", "4.2 ms", "321 µs"]


@pytest.mark.parametrize(("arguments", "of"), [
    (("--explain",), "--place"), (("--out", "x.yaml"), "--place"), (("--fit", "--seconds", "3"), "--place"),
    (("--place", "--margin", "0.2"), "--fit")])
def test_options_that_change_nothing_are_refused(plan, arguments, of):
    code, _, error = plan(*arguments)
    assert code == 2
    assert f"changes nothing here. It goes with {of}." in error


def test_a_file_that_cannot_be_written(plan, tmp_path):
    code, _, error = plan("--place", "--within", "0.9", "--out", str(tmp_path / "none" / "plan.yaml"))
    assert code == 2
    assert "plan.yaml: cannot be written: No such file or directory" in error


def test_impossible_memory_names_the_tenant_and_the_shortfall(plan, tiny):
    code, _, error = plan("--place", cluster=tiny(2))
    assert code == 2
    assert "`actor` (update) fits no device" in error
    assert "GiB too little" in error


def test_doubling_what_bounds_a_work_helps_it(mixed_spec):
    problem = problem_of(mixed_spec("grpo", "a100_l40s_l4"))
    *_, found = search(problem, budget=2000)
    by_task = {bound.task: bound.saved[0][0] for bound in bounds(problem, found.placement)}
    assert (by_task["rollout"], by_task["update"]) == ("speed of starting kernels", "compute")
    assert all(times >= 0.999 for _, times in helps(problem, found.placement))



@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_to_search_is_refused(plan, seconds):
    code, printed, error = plan("--place", "--seconds", seconds, "--within", "0.99")  # which ends a search that begins
    assert (code, printed) == (2, "")
    assert f"--seconds {seconds} is no time to search; give more than 0" in error
