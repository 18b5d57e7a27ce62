"""What the GPU benchmark measures, on a CPU: everything but CUDA itself."""

import json
import platform
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, gpu_quarter, gpu_session
from benchmarks.as_published import requests
from benchmarks.shapes import SHAPES

PARTS = {"generation/tokens_per_second", "decoding/milliseconds", "decoding/kernel_milliseconds",
         "decoding/launch_milliseconds", "decoding/launches",
         "sleep/released_bytes", "sleep/sleep_seconds", "sleep/wake_seconds",
         "training/tokens_per_second", "reshard/bytes", "reshard/seconds", "swap weights/released_bytes",
         "swap weights/out_seconds", "swap weights/back_seconds"}


@pytest.mark.run
def test_two_ranks_measure_what_fits_and_say_where(tmp_path, capfd):
    output = tmp_path / "gpu.txt"
    gpu.main(["--device", "cpu", "--shape", "tiny", "--ranks", "2", "--quick", "--output", str(output),
              "--host-gib", "0.0007"])  # enough for the weights, not for the optimizer's state
    text = output.read_text()
    lines, last = text.splitlines(), json.loads(text.splitlines()[-1])
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(lines)
    assert f"CPU ({platform.machine()}" in lines[1]
    assert f"torch {torch.__version__}" in lines[1]
    assert text.count("MFU unknown") == 2
    assert (last["goal"], last["met"], last["unit"]) == (None, None, "tokens/s")
    assert "CPU" in last["claim"]
    figures = {name.removeprefix("tiny/"): value for name, value in last["figures"].items()}
    assert figures.keys() == PARTS
    assert min(value for name, value in figures.items() if "launch" not in name) > 0
    assert last["value"] == figures["training/tokens_per_second"]
    weights = sum(parameter.nbytes for parameter in SHAPES["tiny"].build("cpu").parameters())
    assert figures["sleep/released_bytes"] == figures["reshard/bytes"] == pytest.approx(weights, rel=1e-3)
    assert figures["swap weights/released_bytes"] == pytest.approx(weights / 2, rel=0.01)
    assert sum("optimizer to host memory: not measured" in line for line in lines) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    gpu.main([])
    out = capsys.readouterr().out
    assert out.startswith("skipped: ")
    assert len(out.splitlines()) == 1


def test_flops_are_those_that_torch_counts():
    """Torch counts what a token may not see, too."""
    shape, length = SHAPES["tiny"], 12
    model = shape.build("cpu")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    unseen = length * (length - 1) / 2
    seen_too = shape.flops(0, length) + 4 * shape.layers * shape.sizes.hidden * unseen
    assert counter.get_total_flops() == pytest.approx(seen_too, rel=5e-3), "norms and biases count here"


@pytest.mark.parametrize(("name", "billions"), [("0.5B", 0.494), ("7B", 7.62), ("Qwen3-0.6B", 0.596),
                                                ("Qwen3-4B", 4.02)])
def test_shapes_have_the_parameters_of_their_names(name, billions):
    assert SHAPES[name].sizes.parameters == pytest.approx(billions * 1e9, rel=2e-3)


def test_requests_are_those_that_nano_vllm_draws():
    drawn = requests(256, 1, 10_000)
    assert sum(length for _, length in drawn) == 133_966  # as its README states
    assert all(100 <= len(prompt) <= 1024 and max(prompt) <= 10_000 for prompt, _ in drawn)


@pytest.mark.parametrize(("project", "parts"), [("nano-vllm", ["requests"]),
                                                 ("prime-rl", ["rows of 128", "rows of 256", "rows of 256, RL",
                                                               "rows of 1024, RL"])])
def test_rows_of_other_projects_are_measured(project, parts, capsys):
    gpu.main(["--as", project, "--device", "cpu", "--quick"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert [name for name in figures if not figures[name] > 0] == []
    assert {name.split("/")[1] for name in figures} == set(parts)


@pytest.mark.parametrize(("minutes", "gone"), [
    (60, []), (13.5, ["families"]), (8, ["families", "lora", "vllm", "nano-vllm"]), (0.1, [*gpu_quarter.CUT[:6]])])
def test_parts_are_cut_in_the_order_of_their_worth(minutes, gone):
    kept = gpu_quarter.fitting(list(gpu_quarter.PUBLISHED), minutes)
    assert kept == [name for name in gpu_quarter.PUBLISHED if name not in gone]
    assert set(gpu_quarter.CUT) == set(gpu_quarter.BUDGET) - {"recipe"}


@pytest.mark.run
def test_a_session_goes_on_after_failures_and_ends_in_time(tmp_path, capsys, monkeypatch):
    """The same parts as with a GPU, on a CPU: one fails, one takes too long, and one finds no time left."""
    monkeypatch.setattr(gpu_session, "LEAST", 0.0)
    session = gpu_session.Session(gpu.Report(tmp_path / "gpu.txt"), "cpu", 5.0, tmp_path)
    session.run(gpu_session.Run("wrong", ("roles.actor.dtype=float31",)))
    for_ever = "import threading; print('begun', flush=True); threading.Event().wait()"
    session.part("slow", 2.0, [sys.executable, "-c", for_ever], keep=True)
    session.run(next(run for run in gpu_session.SHORT_RUNS if run.name == "kill"))
    session.until = 0.0
    session.run(gpu_session.Run("late"))
    assert session.outcomes == {"wrong": "failed (1)", "slow": "stopped after 2 s", "kill": "passed",
                                "late": "no time left"}
    said = (tmp_path / "gpu.txt").read_text()
    assert said == capsys.readouterr().out
    for part in ("float31", "wrong: failed (1)", "slow: begun", "grad_norm", "detected in"):
        assert part in said
