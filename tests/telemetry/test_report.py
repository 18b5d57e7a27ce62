"""The page of a run: what it reads, also where a run was killed or is hostile, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.errors import InvalidInput
from distflow.telemetry.report import read_run, write_report

PLAN = {"name": "grpo", "mode": "sync", "ranks": 2, "notes": [], "tasks": [
    {"node": node, "role": "actor", "type": "MODEL_INFERENCE", "function": f"workers.functions.x:{node}",
     "reads": [{"producer": producer} for producer in producers],
     "transfers": [{"producer": producer, "kind": "all_to_all" if node == "reference" else "local",
                    "columns": ["tokens"], "bytes_per_step": 1_000_000} for producer in producers]}
    for node, producers in {"rollout": ["source"], "reward": ["rollout"], "reference": ["rollout"],
                            "update": ["reward", "reference"]}.items()]}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title = 'broken'</script> @@DATA@@ \ud800"


def lines(file: Path, content: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in content))


@pytest.fixture
def run(tmp_path):
    def made(name: str, steps: int = 4, rate: str = "0.1") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines(folder / "metrics.jsonl", [
            {"step": step, "reward/mean": step / 8, "loss": float("nan") if step == 2 else 0.1, "seconds/rollout": 0.2,
             "seconds/update": 0.1, "validation/held": step / 9} for step in range(1, steps + 1)])
        lines(folder / "samples.jsonl", [
            {"step": step, "row": 0, "questions": "How many pens?", "completions": f"answer {step} {HOSTILE}",
             "rewards": step / 8, "reward_parts": {"math": step / 8}, "length": 3, "advantage": 0.5,
             "tokens": {"texts": ["answer", f" {step}", HOSTILE], "sampled": [-0.5, -2.0, 0.0]}}
            for step in range(1, steps + 1)])
        failure = {"time": 3.0, "rank": 0, "step": 2, "event": "failure", "group": "trainer", "ranks": [0, 1],
                   "attempt": 0, "phase": "training", "failed_step": 2, "what": "killed", "verdict": "starts again",
                   "seen_after": 0.5}
        ready = {"rank": 0, "event": "worker_ready", "seconds": {"connect": 0.1, "load": 0.2}}
        lines(folder / "events.jsonl", [{"time": 1.0, "step": 0, "attempt": 0, **ready}, failure,
                                        {"time": 4.0, "step": 2, "attempt": 1, **ready},
                                        {"time": 9.0, "step": 4, "rank": 0, "event": "worker_ended"}])
        (folder / "plan.json").write_text(json.dumps(PLAN))
        (folder / "run.yaml").write_text(f"steps: {steps}\nroles: {{actor: {{learning_rate: {rate}}}}}\n")
        (folder / "dag.yaml").write_text("name: grpo\n")
        (folder / "launch.json").write_text('{"search": [], "torchrun": ""}')
        return folder

    return made


def test_what_is_read(run):
    found = read_run(run("one"))
    assert found["metrics"]["reward/mean"] == [[1, 2, 3, 4], [0.125, 0.25, 0.375, 0.5]]
    assert found["metrics"]["loss"][0] == [1, 3, 4], "what is no number is left out"
    assert [(node["id"], node["depth"]) for node in found["nodes"]] == [
        ("rollout", 0), ("reward", 1), ("reference", 1), ("update", 2)]
    assert {(edge["from"], edge["to"]) for edge in found["edges"]} == {
        ("rollout", "reward"), ("rollout", "reference"), ("reward", "update"), ("reference", "update")}
    (failure,) = found["failures"]
    assert (failure["group"], failure["step"], failure["detect"], failure["first"]) == ("trainer", 2, 0.5, None)
    assert found["ettr"]["whole"] == pytest.approx((1.5 + 5.0) / 8)
    assert found["settings"] == {"name": "grpo", "steps": "4", "roles.actor.learning_rate": "0.1"}


def validated(folder: Path, *means: tuple[float, float, float]) -> dict[str, str]:
    """The verdict of a run with these means of a validation and their bounds, after its last steps and before them."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = len(steps) + 1 - len(means)
    kept = [{name: value for name, value in line.items() if name != "validation/held"} | {
        "seconds": 1.0, "wall_seconds": 100.0 * line["step"]} for line in steps]
    lines(folder / "metrics.jsonl", [*kept, *(
        {"step": first + number, "validation/held": mean, "validation_low/held": low, "validation_high/held": high}
        for number, (mean, low, high) in enumerate(means))])
    return read_run(folder)["verdict"]


BAD, GOOD, MIDDLE = (0.25, 0.2, 0.3), (0.8, 0.75, 0.85), (0.5, 0.28, 0.7)


@pytest.mark.parametrize(("means", "kind", "headline", "said"), [
    ((BAD, GOOD), "good", "It has learned", "The mean reward of held-out problems (held) went from 0.250 (95% interval "
     "0.200 to 0.300) to 0.800 (95% interval 0.750 to 0.850) in 4 steps and 6.67 min."),
    ((GOOD, BAD), "bad", "It has become worse", "from 0.800"),
    ((BAD, MIDDLE), "open", "It has not clearly changed", "to 0.500"),
    ((BAD, GOOD, MIDDLE), "open", "It has not clearly changed",
     "6.67 min; the best was 0.800 (95% interval 0.750 to 0.850) after step 3."),
    ((BAD,), "open", "Not known whether it has learned",
     "The run has no two validations. The reward in training went from 0.125 to 0.500 in 4 steps")])
def test_the_verdict_is_no_better_than_the_intervals(run, means, kind, headline, said):
    found = validated(run("one"), *means)
    assert (found["kind"], found["headline"]) == (kind, headline)
    assert said in found["text"]


def test_the_verdict_tells_of_failures_and_of_the_end(run):
    folder = run("one")
    assert validated(folder, BAD, GOOD)["text"].endswith(
        "It is not running, after 4 of 4 steps. It has had 1 failure.")
    (folder / "summary.json").write_text('{"steps": 4}')
    assert read_run(folder)["verdict"]["text"].endswith("6.67 min. It has survived 1 failure.")
    (folder / "events.jsonl").unlink()
    assert read_run(folder)["verdict"]["text"].endswith("6.67 min. Nothing has failed.")
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").unlink()
    assert read_run(folder)["verdict"] == {
        "kind": "open", "headline": "Not known yet", "text": "No step is done; the run is not running."}


def test_a_run_that_was_killed_is_read(run):
    """Its last lines are torn, and what comes at a run's end is missing."""
    folder = run("killed")
    for name in ("metrics", "samples", "events"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 5, "rewa')
    (folder / "plan.json").unlink()
    (folder / "run.yaml").write_text("steps: [")
    found = read_run(folder)
    assert found["metrics"]["reward/mean"][0] == [1, 2, 3, 4]
    assert found["nodes"] == []
    assert found["summary"] == {}
    (folder / "metrics.jsonl").write_text("")
    assert write_report([folder], folder / "report.html") > 0


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(InvalidInput, match=r"is not the folder of a run: it has no launch.json"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert f"there is no run folder `{tmp_path / 'missing'}`" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "distflow report runs/grpo-1" in capsys.readouterr().err


def test_a_long_run_stays_small(run):
    """Curves have less points, and samples of steps in between are left out."""
    found = read_run(run("long", steps=5001), characters=20_000)
    steps, values = found["metrics"]["reward/mean"]
    assert len(steps) == len(values) <= 2001
    assert (steps[0], steps[-1]) == (1, 5001)
    kept = [row["step"] for row in found["samples"]]
    assert (kept[0], kept[-1]) == (1, 5001)
    assert len(json.dumps(found["samples"])) < 25_000
    assert found["samples_total"] == 5001


def test_the_command_says_where(run, tmp_path, capsys, monkeypatch):
    one, other = run("one"), run("other", rate="0.2")
    assert main(["report", str(one)]) == 0
    assert f"wrote {one / 'report.html'}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(one), str(other)]) == 0
    assert "wrote report.html" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    assert main(["report", str(one), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "--out FILE" in capsys.readouterr().err


def in_browser(file: Path, fragment: str = "") -> tuple[str, str]:
    """The page's elements once its scripts have run, and what the browser says of it."""
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
                           f"--user-data-dir={file.parent / 'profile'}", "--enable-logging=stderr", "--dump-dom",
                           f"{file.as_uri()}{fragment}"], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.run
def test_a_browser_draws_it_and_finds_samples(run, tmp_path):
    file = tmp_path / "report.html"
    write_report([run("one"), run("other", rate="0.2")], file)
    page, said = in_browser(file)
    assert said == ""
    assert 'data-ready="true"' in page
    assert "<title>one, other · distflow report</title>" in page, "what a sample holds is no script"
    assert page.count('class="js-plotly-plot') + page.count("js-plotly-plot\"") >= 6
    assert page.count('class="sample"') == 4
    assert page.index('<p class="verdict open"><b>Not known yet.</b>one: No step is done') < page.index('class="cards"')
    assert "Settings that differ (1 of 3)" in page
    assert "roles.actor.learning_rate" in page
    page, said = in_browser(file, "#search=answer%203")
    assert said == ""
    assert page.count('class="sample"') == 1
    assert "<mark>answer 3</mark>" in page
    page, said = in_browser(file, "#search=answer%203&colour=sampled")
    assert said == ""
    painted, = re.findall(r'<pre class="tokens">(.*?)</pre>', page, flags=re.DOTALL)
    assert re.findall(r"--(good|bad)\) ([0-9.]+)%", painted) == [("bad", "8"), ("bad", "30"), ("good", "0")]
    assert 'title="log-probability when sampled: -2"> 3</span>' in painted


@pytest.fixture
def timed(run):
    """A run with validation and timelines."""
    folder = run("one", steps=6)
    lines(folder / "validation.jsonl", [
        {"step": step, "set": "validation/held", "row": row, "questions": f"question {row}", "answers": str(row),
         "completions": f"answer of step {step}", "rewards": reward}
        for step, rewards in ((0, (0.0, 1.0, 0.0)), (3, (0.0, 0.0, 0.0)), (6, (1.0, 1.0, 0.0)))
        for row, reward in enumerate(rewards)])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = {4: 1.5, 6: 0.3}
    lines(folder / "metrics.jsonl", [{**line, "seconds": seconds.get(line["step"], 0.5), "staleness/tokens/0": 30,
                                      "staleness/tokens/1": 10 * line["step"],
                                      "data/bytes/rollout/reference": 1_100_000 + 10_000 * line["step"]}
                                     for line in metrics])
    (folder / "timeline").mkdir()
    for rank in range(2):
        spans = [["", "computing node `rollout`", step, 1_000_000 * step, 400_000, {"phase": "generating",
                                                                                    "node": "rollout"}]
                 for step in range(1, 7)]
        line = {"steps": [1, 6], "role": "trainer", "attempt": 0, "rank": rank, "host": "one", "pid": 7,
                "base": 0, "time": 0, "now": None, "spans": spans}
        lines(folder / "timeline" / f"rank{rank}.jsonl", [line])
    return folder


def test_bytes_of_edges_are_planned_and_measured(timed):
    edges = {(edge["from"], edge["to"]): (edge["kind"], edge["bytes"], edge["moved"])
             for edge in read_run(timed)["edges"]}
    assert edges["rollout", "reference"] == ("all_to_all", 1_000_000, 1_135_000), "the mean of the steps"
    assert edges["rollout", "reward"] == ("local", 1_000_000, None)


def test_learned_answers_and_timed_steps_are_found(timed):
    found = read_run(timed)
    answers = found["answers"]
    assert [answers[kind] for kind in ("better", "worse", "equal")] == [1, 0, 2]
    first = answers["pairs"][0]
    assert (first["question"], first["rewards"], first["steps"]) == ("question 0", [0.0, 1.0], [0, 6])
    assert first["texts"] == ["answer of step 0", "answer of step 6"]
    by_kind = {step["kind"]: step["step"] for step in found["steps"]}
    assert by_kind["the slowest step"] == 4
    assert by_kind["the last step"] == 6
    assert found["steps"][0]["spans"] == [[rank, "trainer", "", "rollout", "generating", 0.0, 0.4] for rank in (0, 1)]


@pytest.mark.parametrize(("recipe", "best"), [
    ("", 1.0), ("math", 1.0), ("[math, format]", 2.0), ("{math: 1.0, format: {weight: 0.5, tags: [answer]}}", 1.5),
    ("{math: 1.0, length: 0.2}", 1.0), ("{math: 1.0, mine: 0.5}", 1.0), ("my_rewards:near", 1.0),
    ("{by: source, rewards: {gsm8k: math, mbpp: {code: 3.0}}}", 3.0)])
def test_best_reward_is_that_of_the_recipe_not_the_best_seen(run, recipe, best):
    folder = run("one")  # whose samples earn 0.125 to 0.5
    given = f", with: {{reward: {recipe}}}" if recipe else ""
    (folder / "dag.yaml").write_text(f"nodes: {{reward: {{role: reward, function: score{given}}}}}\n")
    parts = {"math": 1.0, "mine": -0.3}
    lines(folder / "samples.jsonl", [{"step": 1, "row": 0, "rewards": 0.5, "reward_parts": parts}])
    assert read_run(folder)["best"] == best
    lines(folder / "samples.jsonl", [{"step": 1, "row": 0, "rewards": 7.0}])
    assert read_run(folder)["best"] == 7.0, "of which the recipe knows nothing"


@pytest.fixture
def talking(run):
    """A run with seven conversations."""
    folder = run("talk", steps=7)
    (folder / "trajectories").mkdir()
    lines(folder / "trajectories" / "rank0.jsonl", [
        {"step": step, "row": 0, "turn": turn, "text": f"I ask {turn}", "observation": observation}
        for step in range(1, 8) for turn, observation in ((1, "It says 5"), (2, None))])
    return folder


def test_a_conversation_is_read_turn_by_turn(talking):
    assert read_run(talking)["samples"][0]["conversation"] == [
        ["assistant", "I ask 1"], ["environment", "It says 5"], ["assistant", "I ask 2"]]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.run
def test_a_browser_draws_what_ranks_did_and_what_was_learned(timed, tmp_path):
    write_report([timed], tmp_path / "report.html")
    page, said = in_browser(tmp_path / "report.html")
    assert said == ""
    assert "answer of step 6" in page
    assert "<b>It has not clearly changed.</b>The mean reward of held-out problems (held) went from 0.111 to " in page
    assert "↑ better" in page
    assert "rank 1 · trainer" in page
    assert "Tokens by their age (updates)" in page
    label, = re.findall(r'<text[^>]*text-anchor="end"[^>]*class="soft">([^<]*)</text>', page)
    assert label == "1.1 MB"
    assert "<td>all to all</td><td>tokens</td><td>1 MB</td><td>1.1 MB</td>" in page
    assert "step 5: an ordinary step" in page
