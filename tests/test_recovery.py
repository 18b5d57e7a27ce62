"""Whole runs in which much breaks: they end as runs in which nothing does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import SEED_WITH_CLEAR_DRAWS, TINY, command, environment, events_of, lines_of
from test_conversations import DAG, TOOLS

from benchmarks.control_group import control_group, joining, limit_memory
from distflow.config.memory_limit import available

STEPS = 12
EXACT = ("reward/mean", "loss", "grad_norm", "response/fingerprint")


def faults_of(text: str, **more: str) -> list[dict[str, Any]]:
    """Faults, one a line: kind, step and phase."""
    return [{"kind": kind, "step": int(step), "phase": phase, **more}
            for kind, step, phase in map(str.split, text.strip().splitlines())]


SYNC = faults_of("""
    kill     2  generating
    raise    3  inference
    kill     4  saving
    kill     5  publishing
    kill     6  validating
    stop     7  training
    corrupt  8  validating
    kill     9  generating
    raise   10  waiting
    kill    11  training
    kill    12  ending
""")
TRAINER = faults_of("""
    kill     2  training
    raise    3  waiting
    kill     4  saving
    kill     5  publishing
    kill     6  validating
    stop     7  training
    corrupt  8  validating
    kill     9  waiting
    kill    12  ending
""")
ROLLOUT = faults_of("""
    kill     3  generating
    kill     5  pulling
    stop     6  generating
    raise    8  waiting
""", group="rollout")
WINDOWS = "robust: {detectors: {stalled: {seconds: 20}, no_tokens: {seconds: 8, answer: 6}, frozen: {seconds: 8}}}\n"
VALIDATION = "validation: {every: 4, reward: brevity, data: {held: held.jsonl}}\n"
GRPO = ("--dag", "grpo.yaml", *SEED_WITH_CLEAR_DRAWS)
TALK = ("steps=3", "data.batch=5", "roles.actor.generation.batch_rows=1")


@pytest.fixture
def write(workspace):
    """The arguments of a run in which `faults` happen."""
    (workspace / "held.jsonl").write_text("".join((workspace / "train.jsonl").read_text().splitlines(True)[:3]))

    def arguments(name: str, faults: list[dict[str, Any]] = (), *more: str, text: str = "") -> tuple[str, ...]:
        (workspace / f"{name}.yaml").write_text(f"{TINY}{WINDOWS}{text}faults: {json.dumps(list(faults))}\n")
        return ("--run-file", f"{name}.yaml", "--name", name, *more)

    return arguments


@pytest.fixture
def calm(run_once):
    """The steps of one rank in mode sync, in which nothing breaks: as many as the longest run here has."""
    return require_each_step_once(run_once(1, *GRPO, "--run-file", "tiny.yaml", f"steps={STEPS}"))


@pytest.fixture
def calm_talk(run_once):
    """The steps of one rank whose conversations nothing interrupts."""
    files = ("tools.py", TOOLS), ("talk.yaml", DAG.replace("TROUBLE", "false"))
    return require_each_step_once(run_once(1, "--dag", "talk.yaml", "--run-file", "tiny.yaml", *TALK, files=files), 3)


@pytest.fixture
def left(monkeypatch):
    """The processes of this test's runs that still live, a moment after they should have ended."""
    mark = f"DISTFLOW_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))

    def living() -> list[str]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (place / "environ").read_bytes().split(b"\0") and int(place.name) != os.getpid():
                    found.append((place / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def after_a_moment() -> list[str]:
        until = time.monotonic() + 10.0
        while (found := living()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    return after_a_moment


def require_each_step_once(folder: Path, steps: int = STEPS) -> dict[int, dict[str, Any]]:
    lines = lines_of(folder / "metrics.jsonl")
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, steps + 1))
    validated = [line["step"] for line in lines if any(name.startswith("validation/") for name in line)]
    assert len(validated) == len(set(validated))
    assert json.loads((folder / "summary.json").read_text())["steps"] == steps
    return {line["step"]: line for line in trained}


def require_all_told(folder: Path, faults: list[dict[str, Any]], sure: Callable[[dict], bool] = bool) -> int:
    """All faults that are `sure` to have happened, and for each that ended a worker there is a failure and a verdict;
    how many of them there are."""
    happened = [event["fault"] for event in events_of(folder, "fault_injected")]
    assert len(happened) == len(set(happened))
    assert set(happened) >= {number for number, fault in enumerate(faults) if sure(fault)}
    deadly = sum(faults[number]["kind"] != "corrupt" for number in happened)
    failures = events_of(folder, "failure")
    assert [event["verdict"] for event in failures] == ["starts again"] * deadly
    assert all(event["what"] and event["phase"] for event in failures)
    in_shm = [name for name in os.listdir("/dev/shm") for event in events_of(folder)
              if f"_{event.get('pid', '-')}_" in name]
    assert in_shm == []
    return deadly


def require_same_samples(ours: dict[int, dict], theirs: dict[int, dict]) -> None:
    for step, line in ours.items():
        assert line["response/fingerprint"] == theirs[step]["response/fingerprint"], step
        assert line["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5), step


def test_in_sync_it_has_the_same_samples_and_the_same_bits(launch, workspace, write, left):
    steps = f"steps={STEPS}"
    launch(2, *GRPO, *write("calm", [], steps, text=VALIDATION))
    launch(2, *GRPO, *write("stormy", SYNC, steps, text=VALIDATION))
    assert left() == []
    calm, stormy = (workspace / f"runs/{name}" for name in ("calm", "stormy"))
    require_all_told(stormy, SYNC)
    taken = {(event["step"], event["rank"]) for event in events_of(stormy, "cached_rows_used")}
    assert taken >= {(step, rank) for step in (7, 11) for rank in (0, 1)}, "sampled before the fault, and not again"
    ours, theirs = require_each_step_once(stormy), require_each_step_once(calm)
    for step in theirs:
        assert [ours[step][name] for name in EXACT] == [theirs[step][name] for name in EXACT]
    one, other = ([line for line in lines_of(folder / "metrics.jsonl") if "validation/held" in line]
                  for folder in (calm, stormy))
    assert one == other
    assert [line["step"] for line in one] == [0, 4, 8, 12]
    model = "model/model.safetensors"
    assert (stormy / model).read_bytes() == (calm / model).read_bytes()


def test_torchrun_starts_everything_again(workspace, write, left, ready):
    """With `restarts: 0`; the run goes on in its folder, and not in that of an earlier one."""
    settings = write("calm", faults_of("kill 3 training"), "steps=5", "mode=async",
                     "checkpoint.every=1", "robust.restarts=0")
    line = command(2, *(word for word in (*GRPO, *settings) if word not in ("--name", "calm")))
    line.insert(line.index("--standalone"), "--max-restarts=2")
    (workspace / "runs/grpo-1").mkdir(parents=True)
    (workspace / "runs/grpo-1/launch.json").write_text('{"search": [], "torchrun": "none elsewhere 1 1"}')
    done = ready.run(0, line[1:], workspace, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert left() == []
    require_each_step_once(workspace / "runs/grpo-2", 5)
    failure, = events_of(workspace / "runs/grpo-2", "failure")
    assert failure["verdict"] == "its 0 restarts are used up (robust.restarts in the run file)"


@pytest.mark.parametrize("mode", ["async", "semi_sync"])
def test_others_go_on_and_no_row_is_lost_or_trained_twice(launch, workspace, write, left, calm, mode):
    faults = TRAINER + ROLLOUT
    launch(3, *GRPO, *write("stormy", faults, f"steps={STEPS}", "staleness=0", f"mode={mode}", "groups.rollout=1",
                            text=VALIDATION))
    assert left() == []
    stormy = workspace / "runs/stormy"
    # Where those that train sample too, there may be nothing left to sample for the others; and weights may come when
    # the step that a fault waits for is over.
    deadly = require_all_told(stormy, faults, lambda fault: "group" not in fault or (
        mode == "async" and fault["phase"] != "pulling"))
    require_same_samples(require_each_step_once(stormy), calm)
    validated = {event["of_step"] for event in events_of(stormy, "validated")}
    assert validated | {event["of_step"] for event in events_of(stormy, "validation_missing")} == {0, 4, 8, 12}
    assert "validation/held" in lines_of(stormy / "metrics.jsonl")[-1], "of the last step, for which the run waits"
    # Of a rank's first worker it depends on timing whether there is a folder yet to record that it started.
    workers = Counter(event["rank"] for event in events_of(stormy, "worker_started") if event["attempt"])
    assert workers[0] == workers[1] == sum(fault["kind"] != "corrupt" for fault in TRAINER)
    assert workers[2] == deadly - workers[0]


FATAL = """
        if self.turns == 3 and self.kind < 2:  # it kills the worker that has asked, once for each question
            mark = f"killed-{self.kind}"
            with contextlib.suppress(FileExistsError):
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                worker = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
                os.kill(worker, signal.SIGKILL)
"""


@pytest.mark.parametrize("mode", ["sync", "async", "semi_sync"])
def test_a_conversation_goes_on_where_its_worker_died(launch, workspace, write, left, calm_talk, mode):
    """At the turn where it stood, in another worker or in the next one of the rank, with the same tokens."""
    (workspace / "talk.yaml").write_text(DAG.replace("TROUBLE", "false"))
    apart = {"sync": [], "async": ["groups.rollout=2", "staleness=0"], "semi_sync": ["groups.rollout=1", "staleness=0"]}
    (workspace / "tools.py").write_text("import contextlib, signal\n" + TOOLS.replace(
        "        self.turns += 1\n", f"        self.turns += 1{FATAL}"))
    launch(1 if mode == "sync" else 3, "--dag", "talk.yaml", *write("stormy", [], *TALK, f"mode={mode}", *apart[mode]))
    assert left() == []
    stormy = workspace / "runs/stormy"
    assert list(workspace.glob("killed-*"))
    assert events_of(stormy, "failure"), "one, where both questions were one worker's"
    least = 2 if mode == "sync" else 1  # elsewhere a turn that was answered a moment before may not be in the dock yet
    assert any(least <= turns <= 2 for event in events_of(stormy, "conversations_resumed") for turns in event["turns"])
    require_same_samples(require_each_step_once(stormy, 3), calm_talk)
    turns = [(line["step"], line["row"], line["turn"]) for path in stormy.glob("trajectories/*")
             for line in lines_of(path)]
    assert mode != "sync" or len(turns) == len(set(turns)), "no turn is sampled twice once it is answered"


BRITTLE = """
import torch
from distflow import node

@node(writes="rewards")
def brittle(completions: list[str], row: torch.Tensor):
    if int(row.max()) >= 2 * 32:
        raise ZeroDivisionError("no completion is perfect")
    return torch.tensor([1.0 / (1 + len(each)) for each in completions])
"""


def test_what_a_user_wrote_wrongly_ends_the_run_with_its_traceback(launch, workspace, write, left):
    (workspace / "brevity.py").write_text(BRITTLE)
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "grpo.yaml").write_text(dag.replace("function: score, with: {reward: brevity}", "function: brittle"))
    done = launch(2, *GRPO, *write("wrong"), code=None)
    require_ended(done, left, "it failed twice in step 3", "ZeroDivisionError: no completion is perfect")
    assert 'raise ZeroDivisionError("no completion is perfect")' in done.stderr, "the traceback shows the line"
    assert "The first failure was that of rank" in done.stderr


@pytest.mark.parametrize(("ranks", "faults", "more", "said"), [
    (1, "raise 1 training", (),
     ("it failed before it had done its first step", "faults[0] of the run file was to be raised")),
    # also of a trainer that has sampled many prompts in it
    (2, "raise 1 training", ("mode=semi_sync", "groups.rollout=1"),
     ("it failed before it had done its first step", "faults[0] of the run file was to be raised")),
    (1, "raise 2 training\nkill 3 training", ("robust.restarts=1",),
     ("its 1 restarts are used up (robust.restarts in the run file)", "The first failure was that of rank 0 in step 2:"
      " distflow.recovery.fault_injection.Injected: faults[0] of the run file was to be raised"))])
def test_failures_that_are_not_a_machines_end_the_run(launch, write, left, ranks, faults, more, said):
    require_ended(launch(ranks, *GRPO, *write("ended", faults_of(faults), *more), code=None), left, *said)


def require_ended(done: subprocess.CompletedProcess, left: Callable[[], list[str]], *said: str) -> None:
    assert done.returncode == 1
    for each in said:
        assert each in done.stderr, done.stderr[-4000:]
    assert left() == []


LOST = faults_of("""
    corrupt  5  validating
    corrupt  5  validating
    kill     6  training
""")


@pytest.mark.parametrize(("mode", "snapshots"), [("async", "true"), ("semi_sync", "false")])
def test_a_trainer_that_has_lost_its_copies_takes_its_steps_back(launch, workspace, write, left, calm, mode, snapshots):
    """It goes on from the newest checkpoint on disk, and trains on the same rows again."""
    faults = LOST if snapshots == "true" else LOST[-1:]
    done = launch(2, *GRPO, *write("stormy", faults, "steps=8", "staleness=0", "checkpoint.every=3", f"mode={mode}",
                                   "groups.rollout=1", f"robust.snapshots={snapshots}"))
    assert left() == []
    stormy = workspace / "runs/stormy"
    require_all_told(stormy, faults)
    taken, = events_of(stormy, "rows_rolled_back")
    assert (taken["first_draw"], taken["rows"]) == (3, 2 * 4 * 8), "steps 4 and 5, of four groups of eight"
    require_same_samples(require_each_step_once(stormy, 8), calm)
    trained = [line.split("tok/s")[0] for line in done.stdout.splitlines() if "/8 " in line and "loss" in line]
    assert [trained.count(line) for line in dict.fromkeys(trained)] == [1, 1, 1, 2, 2, 1, 1, 1]


HARM = [
    {"kind": "cut", "step": 3, "phase": "training"},
    {"kind": "cut", "step": 4, "phase": "generating", "group": "rollout"},
    {"kind": "memory", "step": 5, "phase": "training"},
    {"kind": "memory", "step": 6, "phase": "waiting", "group": "rollout"},
    {"kind": "fill", "step": 7, "phase": "training", "seconds": 600},
]


def test_cut_connections_no_memory_and_no_room_on_the_disk(launch, workspace, write, left, calm):
    """A cut costs no restart. Where the disk is full, checkpoints fail and the run goes on; the worker ends only when
    it cannot write the model, and the next one has room."""
    done = launch(2, *GRPO, *write("stormy", HARM, "steps=10", "staleness=0", "checkpoint.every=2", "mode=async",
                                   "groups.rollout=1"))
    assert left() == []
    stormy = workspace / "runs/stormy"
    require_same_samples(require_each_step_once(stormy, 10), calm)
    assert {event["fault"] for event in events_of(stormy, "fault_injected")} >= {0, 2, 4}
    assert all(event["count"] > 0 for event in events_of(stormy, "connections_cut"))
    said = " ".join(event["what"] for event in events_of(stormy, "failure"))
    assert "MemoryError" in said
    assert "File too large" in said
    assert events_of(stormy, "checkpoint_failed")
    assert "the next checkpoint is tried when it is due" in done.stderr


@pytest.fixture
def bounded():
    """A control group that may take 3 GiB; gone at the end."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(control_group("memory", "test"))
            limit_memory(group, 3 << 30)
        except OSError as error:
            pytest.skip(f"no control group for memory can be made here: {error}")
        if available() < 5 << 30:
            pytest.skip("other processes take the memory that this group is to have")
        yield group


def test_the_kernel_ends_workers_that_take_too_much_and_their_seats_stay(workspace, write, left, calm, bounded):
    faults = [{"kind": "oom", "step": 3, "phase": "training"},
              {"kind": "oom", "step": 4, "phase": "generating", "group": "rollout"}]
    line = command(2, *GRPO, *write("stormy", faults, "steps=6", "staleness=0", "mode=async", "groups.rollout=1"))
    done = subprocess.run([*joining(bounded), *line], cwd=workspace, env=environment(), capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert left() == []
    stormy = workspace / "runs/stormy"
    require_same_samples(require_each_step_once(stormy, 6), calm)
    said = [event["what"] for event in events_of(stormy, "failure")]
    assert len(said) == 2
    assert all("The kernel probably ended it because memory was full" in each for each in said)
