"""A real seat in a process of its own, with work that is a few lines long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, environment

HEAD = '''
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch.distributed as dist
from distflow.robust.lives import Unit
from distflow.robust.seat import Seat
from distflow.robust.snapshots import Piece
from distflow.schema.errors import DistflowError, InvalidInput, RankMissing
from distflow.schema.robust import Robust

folder = Path(sys.argv[1])

class Board:
    rank, store = int(os.environ.get("SEAT", 0)), None

def told(name, text=""):
    new = folder / f"{name}.of-{os.getpid()}"
    new.write_text(str(text))
    new.rename(folder / name)

def lived(berth, steps=1):
    """As a worker that has come so far."""
    berth.pulse.enter("training")
    berth.pulse.begin(steps)
    for _ in range(steps):
        berth.pulse.finish()
'''
TAIL = '''
settings = Robust(**dict(globals().get("robust", {})))
Board.store = globals().get("store") or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
seat = Seat(Board, Unit("the run", range(globals().get("ranks", 1)), "ranks"), work, folder, settings, {},
            globals().get("needless", lambda: False), globals().get("wanted", lambda: True),
            hooks=globals().get("hooks"))
before = len(os.listdir("/proc/self/fd"))
code = seat.run()
told("left", f"{len(os.listdir('/proc/self/fd')) - before} {threading.active_count()}")
sys.exit(code)
'''


@pytest.fixture
def start(tmp_path):
    """Start a seat whose worker's life is `work(berth)` of the text."""
    seats = []

    def begin(text: str, **more: str) -> subprocess.Popen:
        script = tmp_path / f"seat{len(seats)}.py"
        script.write_text(HEAD + text + TAIL)
        seats.append(subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True,
                                      env={**environment(), "PYTHONPATH": str(ROOT), **more}))
        return seats[-1]

    yield begin
    for each in seats:
        each.kill()
        each.wait()
        each.stderr.close()


@pytest.fixture
def run(start):
    """The exit status and what was said."""

    def to_the_end(text: str) -> tuple[int, str]:
        seat = start(text)
        _, said = seat.communicate(timeout=120)
        return seat.returncode, said

    return to_the_end


def eventually(path: Path, seconds: float = 60.0) -> str:
    """What it says, once it is there."""
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)
    return path.read_text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def events_of(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_done_is_done(run, tmp_path):
    assert run("def work(berth):\n    lived(berth)\n") == (0, "")
    assert (tmp_path / "left").read_text() == "0 1"


ENDS = {
    "raise ValueError('a broken thing')": "ValueError: a broken thing",
    "os.kill(os.getpid(), signal.SIGKILL)": "it was ended by SIGKILL.",
    "os.kill(os.getpid(), signal.SIGSEGV)": "it was ended by SIGSEGV.",
    "os._exit(9)": "it ended with exit status 9 and without a word",
    "sys.exit(8)": "it left by sys.exit(8)",
    "raise DistflowError('the disk is full')": "the disk is full",
    "raise MemoryError": "MemoryError",
    "raise ValueError('\\U0001f600\\x00\\udcff' * 9999)": "ValueError: \U0001f600",
}


def test_a_worker_that_dies_is_started_again_and_its_last_words_are_kept(run, tmp_path):
    """One end after the other, in a step of its own each."""
    code, said = run(f"def work(berth):\n    number = berth.life.number\n    lived(berth, number + 1)\n"
                     f"    if number < {len(ENDS)}:\n        exec({list(ENDS)!r}[number])\n")
    assert code == 0
    assert said.count("the run starts again: rank 0 failed in step ") == len(ENDS)
    for number, (failure, what) in enumerate(zip(events_of(tmp_path, "failure"), ENDS.values(), strict=True)):
        assert failure["what"].startswith(what)
        assert (failure["phase"], failure["failed_step"]) == ("training", number + 1)
        assert ("Traceback" in failure["details"]) == ("Error" in what or "sys.exit" in what)
    assert [event["life"] for event in events_of(tmp_path, "worker started")] == list(range(len(ENDS) + 1))
    assert {event["verdict"] for event in events_of(tmp_path, "failure")} == {"starts again"}


def test_what_fails_again_ends_with_the_traceback_and_the_first_cause(run, tmp_path):
    code, said = run("def work(berth):\n    lived(berth, 3)\n    raise ValueError(f'in life {berth.life.number}')\n")
    assert code == 1
    assert "Traceback" in said
    assert "the run is not started again: it failed twice in step 3." in said
    assert "The first failure was that of rank 0 in step 3: ValueError: in life 0" in said
    verdicts = [event["verdict"] for event in events_of(tmp_path, "failure")]
    assert verdicts == ["starts again", "it failed twice in step 3"]


def test_a_mistake_of_the_users_is_said_once_and_not_repeated(run, tmp_path):
    code, said = run("def work(berth):\n    lived(berth, 3)\n    raise InvalidInput('there is no such file')\n")
    assert (code, said) == (2, "there is no such file.\n")
    assert len(events_of(tmp_path, "worker started")) == 1


def test_restarts_leave_nothing_behind(run, tmp_path):
    """Thirty lives: descriptors, threads and processes of the seat are as many as before."""
    code, _ = run("robust = {'restarts': 100}\n\ndef work(berth):\n    lived(berth, berth.life.number + 2)\n"
                  "    berth.snapshots.begin(Piece(0, berth.life.number, 1, 0, 1), {}, {})\n"
                  "    berth.snapshots.wait()\n"
                  "    if berth.life.number < 30:\n"
                  "        os.kill(os.getpid(), signal.SIGKILL)\n")
    assert code == 0
    assert (tmp_path / "left").read_text() == "0 1"
    assert all(ends(event["pid"]) for event in events_of(tmp_path, "worker started"))


def test_a_full_disk_ends_no_seat(run):
    """Events cannot be written any more."""
    code, said = run("def work(berth):\n    lived(berth)\n    if not berth.life.number:\n"
                     "        (folder / 'events.jsonl').unlink()\n        (folder / 'events.jsonl').mkdir()\n"
                     "        os._exit(9)\n")
    assert (code, said.count("starts again")) == (0, 1)


def test_sigterm_ends_the_worker_and_the_seat(start, tmp_path):
    seat = start("def work(berth):\n    lived(berth)\n    told('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    seat.send_signal(signal.SIGTERM)
    assert seat.wait(60) == 128 + signal.SIGTERM
    assert ends(worker)


def test_a_worker_that_starts_may_tidy_up(start, tmp_path):
    seat = start("def work(berth):\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n    try:\n"
                 "        told('worker', os.getpid())\n        time.sleep(600)\n    finally:\n        told('tidy')\n")
    eventually(tmp_path / "worker")
    seat.send_signal(signal.SIGTERM)
    assert seat.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "tidy").exists()


def test_what_a_worker_leaves_behind_ends_with_it(start, tmp_path):
    """Processes that a user's function has started; one of them holds the pipe of the last words, and has spoken."""
    seat = start("def work(berth):\n    if berth.life.number:\n        return told('again')\n    lived(berth)\n"
                 "    program = subprocess.Popen(['sleep', '600'])\n    child = os.fork()\n"
                 "    if not child:\n        told('ready')\n        time.sleep(600)\n"
                 "    while not (folder / 'ready').exists():\n        time.sleep(0.01)\n"
                 "    told('left_behind', f'{child} {program.pid}')\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    left = [int(pid) for pid in eventually(tmp_path / "left_behind").split()]
    eventually(tmp_path / "again")
    assert seat.wait(60) == 0
    assert all(ends(pid) for pid in left)


def test_a_stopped_worker_is_ended(run, tmp_path):
    code, _ = run("robust = {'detectors': {'frozen': {'seconds': 1.0}}}\n\ndef work(berth):\n    berth.pulse.answer()\n"
                  "    lived(berth)\n    if not berth.life.number:\n        os.kill(os.getpid(), signal.SIGSTOP)\n")
    assert code == 0
    assert "(detector `frozen`)" in events_of(tmp_path, "failure")[0]["what"]


def test_a_worker_whose_seat_is_killed_ends(start, tmp_path):
    seat = start("from workers.start import end_with\n\ndef work(berth):\n    end_with(berth.seat)\n"
                 "    lived(berth)\n    told('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    seat.kill()
    assert ends(worker)


def test_a_seat_without_a_board_ends(start, tmp_path):
    """The machine that kept it is gone."""
    import torch.distributed as dist  # most tests here need no torch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seat = start(f"store = dist.TCPStore('127.0.0.1', {store.port}, is_master=False)\n\ndef work(berth):\n"
                 "    lived(berth)\n    told('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    del store
    assert seat.wait(60) == 1
    assert "the board does not answer" in seat.stderr.read()
    assert ends(worker)


def test_one_that_nobody_needs_may_end_as_it_likes(run, tmp_path):
    """A rollout whose trainer has done its last step."""
    code, said = run("needless = lambda: (folder / 'over').exists()\n\ndef work(berth):\n    lived(berth)\n"
                     "    told('over')\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert (code, said) == (0, "")
    assert len(events_of(tmp_path, "worker started")) == 1


@pytest.mark.parametrize(("listens", "told"), [
    ("0", ["on_failure 1", "on_leave 2"]),
    ("hooks_page()", []),
    ("hook(when='on_leave')(print) and hooks_page()", ["on_leave 2"]),
], ids=["not known", "none", "one of both"])
def test_hooks_are_looked_for_where_there_may_be_some(run, tmp_path, listens, told):
    """The worker has said which there are; one that failed before it could has left it open."""
    code, said = run("from distflow.robust.hooks import hook, page as hooks_page\n\ndef hooks(when, life):\n"
                     "    told(f'{when} {life.number}')\n\ndef work(berth):\n    lived(berth, berth.life.number + 1)\n"
                     f"    berth.pulse.page.hooks = {listens}\n    if berth.life.number == 1:\n        return False\n"
                     "    if not berth.life.number:\n        os._exit(9)\n")
    assert code == 0, said
    found = {path.name for path in tmp_path.iterdir() if path.name.startswith("on_")}
    assert found == {*told, *(["on_leave 1"] if "on_leave 2" in told else [])}
    assert [event["life"] for event in events_of(tmp_path, "worker started")] == [0, 1, 2]
    assert len(events_of(tmp_path, "failure")) == 1


TWO = """
from distflow.robust import lives
lives._SETTLE = 30.0  # for a cause to be told: this machine may be busy
store, ranks = dist.TCPStore('127.0.0.1', {port}, is_master=False), 2
robust = {{'restarts': 100}}

def work(berth):
    lived(berth, berth.life.number + 2)
    told(f'{{Board.rank}} in {{berth.life.number}}')
    {body}
"""


@pytest.mark.parametrize(("body", "lives"), [
    # one is done, the other dies then: both do it again
    ("""if Board.rank == 1 and not berth.life.number:
        while not store.clone().check(['lives/the run/0/done/0']):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)""", 2),
    # both die at once, many times
    ("""other = folder / f'{1 - Board.rank} in {berth.life.number}'
    while berth.life.number < 8 and not other.exists():
        time.sleep(0.001)
    if berth.life.number < 8:
        os.kill(os.getpid(), signal.SIGKILL)""", 9),
    # one only misses the other, and says so first
    ("""if not berth.life.number:
        if Board.rank == 0:
            while not (folder / '1 in 0').exists():
                time.sleep(0.01)
            raise RankMissing('rank 1 does not come')
        while not store.clone().check(['lives/the run/0/failed/0']):
            time.sleep(0.01)
        raise ValueError('the cause')""", 2),
], ids=["done and dead", "both", "symptom"])
def test_two_seats_live_the_same_lives(start, tmp_path, body, lives):
    import torch.distributed as dist  # most tests here need no torch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [start(TWO.format(port=store.port, body=body), SEAT=str(rank)) for rank in range(2)]
    said = [seat.communicate(timeout=120)[1] for seat in seats]
    assert [seat.returncode for seat in seats] == [0, 0], said
    for rank in range(2):
        numbers = [event["life"] for event in events_of(tmp_path, "worker started") if event["rank"] == rank]
        assert numbers == list(range(lives))
    verdicts = events_of(tmp_path, "failure")
    assert [event["life"] + 1 for event in verdicts] == list(range(1, lives)), "one seat speaks for all"
    if "the cause" in body:
        assert events_of(tmp_path, "failure")[0]["what"] == "ValueError: the cause"
    assert os.path.exists(tmp_path / f"1 in {lives - 1}")


def test_seats_whose_workers_give_way_begin_the_next_life_together(start, tmp_path):
    """One of them a moment later, when the other has begun already; nothing has failed."""
    import torch.distributed as dist  # most tests here need no torch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    body = "if berth.life.number < 3:\n        time.sleep(0.5 * (Board.rank == berth.life.number % 2))\n" \
           "        return False"
    seats = [start(TWO.format(port=store.port, body=body), SEAT=str(rank)) for rank in range(2)]
    said = [seat.communicate(timeout=120)[1] for seat in seats]
    assert [(seat.returncode, words) for seat, words in zip(seats, said)] == [(0, ""), (0, "")]
    assert events_of(tmp_path, "failure") == []
    for rank in range(2):
        numbers = [event["life"] for event in events_of(tmp_path, "worker started") if event["rank"] == rank]
        assert numbers == [0, 1, 2, 3]


def test_a_seat_that_rests_is_not_missed_by_the_other(start, tmp_path):
    """Its worker ends, and the other one's, which notices that, has not failed: both begin another life, once it is
    wanted again."""
    import torch.distributed as dist  # most tests here need no torch

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    body = """if berth.life.number == 0 and Board.rank == 0:
        told('pid', os.getpid())
        signal.pause()
    if berth.life.number == 0:
        while not (folder / 'pid').exists() or Path('/proc', (folder / 'pid').read_text(), 'fd').exists():
            time.sleep(0.01)
        raise ValueError('the other rank has gone')

def wanted():
    return Board.rank == 1 or not (folder / 'pid').exists() or (folder / '1 in 1').exists()
"""
    seats = [start(TWO.format(port=store.port, body=body), SEAT=str(rank)) for rank in range(2)]
    said = [seat.communicate(timeout=120)[1] for seat in seats]
    assert [seat.returncode for seat in seats] == [0, 0], said
    assert events_of(tmp_path, "failure") == []
    assert [event["rank"] for event in events_of(tmp_path, "worker rests")] == [0]
    for rank in range(2):
        assert [event["life"] for event in events_of(tmp_path, "worker started") if event["rank"] == rank] == [0, 1]
