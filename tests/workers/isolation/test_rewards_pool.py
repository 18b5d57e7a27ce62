"""Reward functions that misbehave, in real processes: the others go on, and each failure is named and counted."""

from __future__ import annotations

import os
import select
import signal
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from distflow.errors import EngineError
from distflow.telemetry import events
from workers.isolation.rewards_pool import FailedSample, Job, RewardPool, RewardResults
from workers.isolation.rewards_worker import WrongLength, _values

KILLED_TOGETHER = "its process was killed together with the one that had started it"

HOSTILE = '''
import asyncio, msgpack, os, signal, socket, subprocess, sys, time
from distflow import DistflowError, reward

@reward
def hostile(completion, answer):
    if completion == "sleeps":
        time.sleep(600)
    if completion == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if completion == "computes":
        return 97 ** 97 ** 7
    if completion == "raises":
        raise KeyError("rows")
    if completion == "exits":
        sys.exit(3)
    if completion == "leaves":
        os._exit(3)
    if completion == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "crashes":
        os.abort()
    if completion == "recurses":
        return hostile(completion, answer)
    if completion == "eats":
        return len([bytes(1 << 26) for _ in range(64)])  # by calloc: refused before it is touched
    if completion == "forks":
        os.fork()
    if completion == "starts":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", answer])
    if completion == "kills its parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if completion == "stops its parent":
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)
    server = os.getppid()  # it may be killed, and the process that has the pool would be the parent then
    while completion == "stops it for ever":
        try:
            os.kill(server, signal.SIGSTOP)
        except ProcessLookupError:
            time.sleep(600)
    if completion == "closes":
        os.closerange(3, 4096)
    if completion.startswith("["):
        for number in range(3, 4096):
            try:
                os.write(number, b"".join(map(msgpack.packb, eval(completion))))
            except OSError:
                pass
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0],
            "huge": 1e39}.get(completion, 1.0)

@reward
async def slow(completion, answer):
    if completion == "sleeps":
        await asyncio.sleep(600)
    if completion == "blocks":
        time.sleep(600)
    await asyncio.sleep(0.2)
    return float(completion)

@reward
async def meets(completion, answer):
    if not meeting:
        meeting.append(asyncio.Barrier(8))
    await meeting[0].wait()
    return 1.0

meeting = []

@reward
def batch(completions, answers):
    if "sleeps" in completions:
        time.sleep(600)
    return [None if text == "none" else float(text) for text in completions]

@reward
def short(completions, answers):
    return [1.0]

@reward
def one_for_all(completions, answers):
    return 1.0

@reward
async def batch_async(completions, answers, *, add=0.0):
    return [float(text) + add for text in completions]

@reward
def impossible(completion, answer):
    raise DistflowError("there is no compiler")

@reward
def pid(completion, answer):
    return os.getpid()
'''


COROUTINES = ("slow", "meets", "batch_async")


@pytest.fixture
def pool():
    made = RewardPool(2, memory_gib=1.0)
    yield made
    made.stop()


@pytest.fixture
def run(pool, module):
    """Run a reward of the module above for some completions; the results by completion."""
    name = module(HOSTILE)

    def run(reward: str, completions: list[str], answer: str = "", limit: float = 60.0, **more) -> RewardResults:
        batched = reward in ("batch", "short", "one_for_all", "batch_async")
        rows = [[completions, [answer] * len(completions)]] if batched else [[text, answer] for text in completions]
        settings = {"timeout": 2.0, "retries": 0, "batched": batched, "coroutine": reward in COROUTINES}
        return pool.run([Job(reward, name, rows, list(range(len(completions))), **{**settings, **more})], limit)

    return run


def reason(found: float | FailedSample) -> str:
    assert isinstance(found, FailedSample), found
    return found.reason


BAD = {"sleeps": "took longer than 2 s", "ignores": "took longer than 2 s", "computes": "took longer than 2 s",
       "raises": "raised KeyError: 'rows'", "exits": "raised SystemExit: 3",
       "leaves": "its process ended with code 3", "crashes": "its process was killed by SIGABRT in ",
       "is killed": "its process was killed by SIGKILL (out of memory?)",
       "recurses": "raised RecursionError", "eats": "raised MemoryError", "nan": "returned nan, not",
       "inf": "returned inf, not", "huge": "returned 1e+39, not",
       "none": "returned None, not", "list": "returned [1.0], not",
       "text": "returned '1.0', not",
       "starts": "left 1 processes running", "closes": "its process"}


def test_each_way_to_fail_is_named_and_the_others_go_on(run, monkeypatch):
    monkeypatch.setattr("workers.isolation.pool.EXIT_GRACE", 20.0)  # how a process has ended may be known late
    completions = [text for bad in BAD for text in ("good", bad)]
    results = run("hostile", completions)
    assert len(results.values) == len(completions)
    for place, text in enumerate(completions):
        if text == "good":
            assert results.values[place] == 1.0
        else:
            assert reason(results.values[place]).startswith(BAD[text])
    assert results.timeouts == 3
    assert 'raise KeyError("rows")' in results.values[completions.index("raises")].trace


SHARES = '''
import mmap, os, time
from distflow import reward

def fill(file, size):
    for _ in range(size >> 20):
        os.write(file, bytes(1 << 20))

def touch(size):
    room = mmap.mmap(-1, size)
    for place in range(0, size, 4096):
        room[place] = 1
    return room

@reward
def shares(completion, answer):
    size = 384 << 20
    if completion == "memfd":
        fill(os.memfd_create("x"), size)
    if completion == "open":
        fill(os.open(answer, os.O_CREAT | os.O_RDWR), size)
    if completion == "left":
        file = os.open(answer, os.O_CREAT | os.O_RDWR)
        time.sleep(2)
        fill(file, size)
        os.close(file)
    if completion in ("mapped", "in a child") and (completion == "mapped" or not os.fork()):
        room = touch(size)
    if completion == "little":
        room, file = touch(size // 4), os.memfd_create("x")
        fill(file, size // 4)
        seen = mmap.mmap(file, size // 4)
        return float(sum(seen[::4096]) == 0 and not os.fork() or os.wait()[1] == 0)
    time.sleep(600)
'''


@pytest.mark.parametrize("way", ["memfd", "open", "left", "mapped", "in a child"])
def test_shared_memory_counts_too(module, way):
    """384 MiB where 256 MiB are allowed, of a kind that no limit of the kernel sees."""
    pool, file = RewardPool(1, memory_gib=0.25), Path(f"/dev/shm/distflow-test-{uuid.uuid4().hex}")
    try:
        found = pool.run([Job("shares", module(SHARES), [[way, str(file)]], [0], timeout=60.0, retries=0)], 90.0)
        assert reason(found.values[0]).startswith("its process was killed by SIGKILL")
    finally:
        pool.stop()
        file.unlink(missing_ok=True)


def test_shared_memory_below_the_limit_is_counted_once(module):
    """96 MiB mapped, and 96 MiB that are both open and mapped, in two processes."""
    pool = RewardPool(1, memory_gib=0.25)
    found = pool.run([Job("shares", module(SHARES), [["little", ""]], [0], timeout=60.0, retries=0)], 90.0)
    pool.stop()
    assert found.values == {0: 1.0}


VARIABLES = '''
import os
from distflow import reward

@reward
def sees(completion, answer, *, key_variable=None):
    return float(completion in os.environ)
'''


def test_a_screen_with_few_characters_fails_no_reward(module, monkeypatch):
    name = module("import sys\nfrom distflow import reward\nsys.stdout.reconfigure(encoding='utf-8')\n"
                  "assert sys.stdout.line_buffering in (True, False)\n@reward\n"
                  "def prints(completion, answer):\n    print(completion)\n"
                  "    return 1.0\n")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    pool = RewardPool(1, memory_gib=1.0)
    results = pool.run([Job("prints", name, [["grüße … \ud83d", ""]], [0], retries=0)], 60.0)
    pool.stop()
    assert results.values == {0: 1.0}


def test_secrets_of_the_run_are_not_passed_on(module, monkeypatch):
    """But those that a setting names, while its reward is called, and those that the user passes on to all; the run's
    own token in no case."""
    names = ["DISTFLOW_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "ASKED_KEY",
             "PASSED_KEY", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "MONKEYS"]
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DISTFLOW_PASS_ENV", "PASSED_KEY,OTHER,DISTFLOW_TOKEN")
    name, pool, seen = module(VARIABLES), RewardPool(1, memory_gib=1.0), []
    for settings in ({}, {"key_variable": "ASKED_KEY"}, {"key_variable": "DISTFLOW_TOKEN"}):
        job = Job("sees", name, [[each, ""] for each in names], list(range(len(names))), settings)
        seen.append({names[key] for key, value in pool.run([job], 90.0).values.items() if value == 1.0})
    pool.stop()
    public = set(names[-4:])
    assert seen == [public, public | {"ASKED_KEY"}, public]


def test_one_that_forks_and_comes_back_twice_counts_once(run):
    results = run("hostile", ["good", "forks", "good", "good"])
    assert [results.values[place] for place in (0, 2, 3)] == [1.0] * 3
    assert results.values[1] == 1.0 or "left 1 processes running" in reason(results.values[1])


@pytest.mark.parametrize("message", [
    "['value']", "[[]]", "[['value'], 1]", "[{'call': 0}]", "[{'call': [0], 'values': [1.0], 'metrics': []}]",
    "[{'call': 0, 'values': [1.0]}]", "[{'call': 0, 'values': ['1.0'], 'metrics': []}]",
    "[{'call': 0, 'values': [float('nan')], 'metrics': []}]", "[{'call': 0, 'values': [1.0, 1.0], 'metrics': []}]",
    "[{'call': 0, 'values': [['failed', 0]], 'metrics': []}]", "[{'call': 0, 'values': [1.0], 'metrics': [['x', 1]]}]"])
def test_a_message_that_is_none_costs_the_sample_alone(run, message):
    results = run("hostile", [message, "good"])
    assert reason(results.values[0]).startswith("its process")
    assert results.values[1] == 1.0


def test_failed_calls_are_repeated(run, tmp_path, module, pool):
    name = module(f"""
        from distflow import reward
        import pathlib

        @reward
        def second_time(completion, answer):
            place = pathlib.Path({str(tmp_path)!r}, completion)
            if not place.exists():
                place.touch()
                raise OSError("not yet")
            return 0.5
    """)
    results = pool.run([Job("second_time", name, [["a", ""], ["b", ""]], [7, 9], retries=1)], 60.0)
    assert results.values == {7: 0.5, 9: 0.5}
    assert results.retried == 2
    results = run("hostile", ["raises", "good"], retries=2)
    assert (results.retried, results.values[1]) == (2, 1.0)


def test_processes_are_kept_and_the_hung_are_replaced(run, pool):
    first = {run("pid", ["x"]).values[0] for _ in range(5)}
    assert len(first) == 1
    assert first != {os.getpid()}
    run("hostile", ["sleeps"] * 2)
    assert not first & set(run("pid", ["x"] * 8).values.values())


def test_a_process_that_died_between_steps_costs_no_sample(run, pool):
    run("pid", ["x"] * 8)
    for child in pool.children:
        kill_and_wait(child.pid)
    assert set(run("hostile", ["good"] * 8).values.values()) == {1.0}


def kill_and_wait(process: int) -> None:
    watched = os.pidfd_open(process)
    os.kill(process, signal.SIGKILL)
    assert select.select([watched], [], [], 20.0)[0]
    os.close(watched)


def test_async_calls_wait_together(run):
    """Each call waits for seven others in its process; sixteen are shared by two processes."""
    assert set(run("meets", ["x"] * 16, timeout=30.0, concurrency=8).values.values()) == {1.0}
    results = run("meets", ["x"] * 16, concurrency=7)
    assert {reason(found) for found in results.values.values()} == {"took longer than 2 s"}
    assert results.timeouts == 16


def test_async_function_that_blocks_is_found_and_the_others_are_repeated(run):
    results = run("slow", ["1", "2", "blocks", "3"], retries=1)
    assert [results.values[place] for place in (0, 1, 3)] == [1.0, 2.0, 3.0]
    assert reason(results.values[2]) == "took longer than 2 s"


def test_functions_of_lists(run):
    assert run("batch", ["1", "2", "3"]).values == {0: 1.0, 1: 2.0, 2: 3.0}
    results = run("batch", ["1", "none", "3"])
    assert (results.values[0], reason(results.values[1])) == (1.0, "returned None, not a finite number")
    assert run("batch_async", ["1", "2"], settings={"add": 1.0}).values == {0: 2.0, 1: 3.0}


def test_a_list_of_another_length_ends_the_run_and_names_its_definition(run):
    said = (r"^my_rewards\.py:7: reward `short` cannot be computed: it returned a list of 1 for 3 samples, where it "
            "must return a list of 3 numbers$")
    with pytest.raises(EngineError, match=said):
        run("short", ["1", "2", "3"], retries=1, where="my_rewards.py:7")


def test_a_number_for_all_samples_is_a_failure_of_each(run):
    results = run("one_for_all", ["1", "2", "3"], retries=1)
    said = "returned 1.0, not a list with a number for each sample"
    assert [reason(each) for each in results.values.values()] == [said] * 3
    assert results.retried == 3


def test_a_batch_that_fails_is_repeated_sample_by_sample(run):
    results = run("batch", ["1", "x", "3", "sleeps"], retries=1)
    assert (results.values[0], results.values[2]) == (1.0, 3.0)
    assert "could not convert string to float: 'x'" in reason(results.values[1])
    assert reason(results.values[3]) == "took longer than 2 s"


def test_a_function_that_can_never_work_ends_the_run(run, pool):
    with pytest.raises(EngineError, match="reward `impossible` cannot be computed: there is no compiler"):
        run("impossible", ["x"] * 4)
    assert run("pid", ["x"]).values


def test_a_module_that_cannot_be_imported_there_ends_the_run(pool):
    with pytest.raises(EngineError, match="module `no_such_module` fails when it is imported"):
        pool.run([Job("x", "no_such_module", [["a", "b"]], [0])], 60.0)


def test_a_module_that_ends_the_process_ends_the_run(pool, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(EngineError, match="`x` cannot be computed: its process ended with code 7, and so 3 times"):
        pool.run([Job("x", "deadly", [["a", "b"]] * 9, list(range(9)))], 60.0)


def test_a_call_that_kills_the_fork_server_fails_alone(run):
    results = run("hostile", ["good", "good", "kills its parent", "good"] * 4)
    assert [results.values[row] for row in range(16) if row % 4 != 2] == [1.0] * 12
    assert {reason(results.values[row]) for row in range(2, 16, 4)} == {KILLED_TOGETHER}


def test_a_call_that_stops_the_fork_server_costs_its_own_time(run):
    results = run("hostile", ["good", "stops its parent", "stops it for ever", "is killed"] + ["good"] * 8)
    assert [results.values[row] for row in (0, *range(4, 12))] == [1.0] * 9
    assert reason(results.values[1]) == "took longer than 2 s"
    assert reason(results.values[3]) == "its process was killed by SIGKILL (out of memory?)"
    assert results.values[2] != 1.0


def test_a_late_call_that_still_stops_the_fork_server_is_blamed_alone(pool, module, monkeypatch):
    """Once it is late, the third call needs a new process, for which the fork server does not answer."""
    monkeypatch.setattr("workers.isolation.pool._MOST_STOPS", 1)
    calls, name = [("stops it for ever", 1.0), ("sleeps", 2.0), ("good", 2.0)], module(HOSTILE)
    values = pool.run([Job("hostile", name, [[text, ""]], [key], timeout=seconds, retries=0)
                       for key, (text, seconds) in enumerate(calls)], 60.0).values
    assert reason(values[0]) in ("took longer than 1 s", KILLED_TOGETHER), "the second if it was asked meanwhile"
    assert reason(values[1]) == "took longer than 2 s"
    assert values[2] == 1.0


def test_the_limit_of_a_step(run):
    start = time.monotonic()
    results = run("hostile", ["sleeps"] * 50 + ["good"], timeout=60.0, limit=2.0)
    assert time.monotonic() - start < 30
    assert reason(results.values[0]) == "was not done when the 2 s of all rewards of a step were over"
    assert len(results.values) == 51


def test_much_and_odd_text_goes_to_and_fro(run):
    assert run("hostile", ["x" * 300_000 + "\ud800é"] * 8).values == dict.fromkeys(range(8), 1.0)


def test_a_slow_reward_is_reported_once_while_it_still_runs(run, capfd, monkeypatch, recorded):
    """The line says which one, where it stands, since when, and what limits it; a second step says nothing more."""
    run("hostile", ["good"])  # the module's import is over
    monkeypatch.setattr("workers.isolation.rewards_pool._SLOW", 0.5)
    for _ in range(2):
        run("hostile", ["sleeps"], timeout=2.0, where="mine.py:5")
    said = capfd.readouterr().err
    assert said.count("mine.py:5: reward `hostile` is slow: after 0.5 s, since ") == 1
    assert ", 0 of 1 samples have it; its call stands in " in said
    assert ", line 8, in hostile." in said
    assert "One call may take 2 s. To change that:  reward: {hostile: {timeout: 4}}" in said
    assert "All rewards of a step may take 60 s. To change that:  limit: 120 " in said
    event, = recorded("reward_slow")
    assert (event["reward"], event["done"], event["samples"]) == ("hostile", 0, 1)


def test_of_several_ranks_only_the_first_prints_that_a_reward_is_slow(run, capfd, monkeypatch, recorded):
    monkeypatch.setattr("workers.isolation.rewards_pool._SLOW", 0.2)
    events.current().rank = 7
    events.record("reward_slow", reward="hostile")
    events.current().rank = 3
    run("hostile", ["sleeps"], timeout=1.0)
    assert "is slow" not in capfd.readouterr().err
    assert len(recorded("reward_slow")) == 2


TALKS = '''
import logging, sys
from distflow import reward

logging.basicConfig(level="INFO", format="%(message)s")

@reward
def talks(completion, answer):
    if completion == "floods":
        for number in range(1000):
            print("line", number)
    print("half", end=" ")
    print("a line \\x1b[31mred", file=sys.stderr)
    logging.info("logged")
    return 1.0
'''


def test_what_a_reward_prints_has_its_name_and_is_bounded(module, capfd):
    name = module(TALKS)
    pool = RewardPool(1, memory_gib=1.0)
    pool.run([Job("talks", name, [["quiet", ""]], [0])], 60.0)
    said = capfd.readouterr().err.splitlines()
    assert sorted(said) == ["[reward talks] a line \\x1b[31mred", "[reward talks] logged"]
    pool.run([Job("talks", name, [["floods", ""]], [0])], 60.0)
    said = capfd.readouterr().err.splitlines()
    assert said[:2] == ["[reward talks] half ", "[reward talks] line 0"]
    assert len(said) < 30
    assert any(line.endswith("(… more is left out)") for line in said)
    pool.stop()


@pytest.mark.parametrize(("value", "numbers"), [
    (np.array([1.0, 2.0]), [1.0, 2.0]), (np.array([[1.0], [2.0]]), [1.0, 2.0]),
    ([np.array([1.0]), np.bool_(True)], [1.0, 1.0]),
    ([{"score": 0.5, "acc": True}, {"acc": 1.0}], [0.5, ["returned {'acc': 1.0}, not a finite number", ""]]),  # verl
    ((each for each in (1, 2)), [1.0, 2.0]), (map(float, (1, 2)), [1.0, 2.0])])
def test_values_of_a_batch_may_be_arrays_and_iterators(value, numbers):
    assert _values(value, 2) == numbers


def test_an_array_with_other_shapes_than_the_batch_is_no_list_of_rewards():
    with pytest.raises(WrongLength, match="a list of 6 for 2 samples"):
        _values(np.zeros((2, 3)), 2)
    assert _values([np.zeros(2), 1], 2) == [["returned array([0., 0.]), not a finite number", ""], 1.0]
