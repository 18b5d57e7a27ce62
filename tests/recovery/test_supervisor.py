"""A real supervisor in a process of its own, with work that is a few lines long."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from fork_server import ForkedScript
from harness import ROOT, environment

from distflow.telemetry.processes import parent

HEAD = '''
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from distflow.store.tcp import TCPStoreClient, store_on
from distflow.recovery.restarts import RestartGroup
from distflow.recovery.supervisor import SupervisedRun, Supervisor
from distflow.recovery.snapshots import StateShard
from distflow.errors import DistflowError, InvalidInput, RankMissing
from distflow.config.robust import Robust

folder = Path(sys.argv[1])

class RunStore:
    rank, ranks, store = int(os.environ.get("RANK_OF_SUPERVISOR", 0)), 2, None

def write(name, text=""):
    new = folder / f"{name}.of-{os.getpid()}"
    new.write_text(str(text))
    new.rename(folder / name)

def lived(context, steps=1):
    """As a worker that has come so far."""
    context.heartbeat.enter("training")
    context.heartbeat.begin(steps)
    for _ in range(steps):
        context.heartbeat.finish()
'''
TAIL = '''
settings = Robust(**dict(globals().get("robust", {})))
RunStore.store = globals().get("store") or TCPStoreClient.hosting(store_on("127.0.0.1"), 60.0)
given = globals()
view = SupervisedRun(folder, settings, given.get("required", {}), given.get("renews", dict),
               given.get("is_obsolete", lambda: False), given.get("should_run", lambda: True),
               given.get("leave_out", lambda: False), hooks=given.get("hooks"), lock=given.get("lock"))
supervisor = Supervisor(RunStore, RestartGroup("the run", range(given.get("ranks", 1)), "ranks"), work, view)
before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # the store's client has one
code = supervisor.run()
write("left", f"{len(os.listdir('/proc/self/fd')) - before} {threading.active_count() - threads}")
sys.exit(code)
'''
IN_A_HURRY = """
from distflow.recovery import restarts
restarts._SETTLE = 0.2  # for a cause of silence to be known
"""
ABOVE = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from warm import fork_or_execute
subprocess._fork_exec = fork_or_execute
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path):
    """Start a supervisor whose workers do `work(context)` of the text."""
    supervisors = []

    def begin(text: str, shell: str = "", **more: str) -> ForkedScript:
        """`shell`: below another process, as below torchrun."""
        script = tmp_path / f"supervisor{len(supervisors)}.py"
        script.write_text(HEAD + text + TAIL)
        given = {**environment(), "PYTHONPATH": str(ROOT), **more}
        if shell:
            (tmp_path / "above.py").write_text(ABOVE)
            supervisors.append(ForkedScript(str(tmp_path / "above.py"), str(script), str(tmp_path), environment=given))
        else:
            supervisors.append(ForkedScript(str(script), str(tmp_path), environment=given))
        return supervisors[-1]

    yield begin
    for each in supervisors:
        each.kill()
        each.wait()
        each.stderr.close()


@pytest.fixture
def run(start):
    """The exit status and what was said."""

    def to_the_end(text: str) -> tuple[int, str]:
        supervisor = start(text)
        _, said = supervisor.communicate(timeout=120)
        return supervisor.returncode, said

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
    assert run("def work(context):\n    lived(context)\n") == (0, "")
    assert (tmp_path / "left").read_text() == "0 0"


ENDS = {
    "raise ValueError('a broken thing')": "ValueError: a broken thing",
    "os.kill(os.getpid(), signal.SIGKILL)": "it was ended by SIGKILL.",
    "os.kill(os.getpid(), signal.SIGSEGV)": "it was ended by SIGSEGV in ",
    "os._exit(9)": "it ended with exit status 9 and reported nothing",
    "sys.exit(8)": "it left by sys.exit(8)",
    "raise DistflowError('the disk is full')": "the disk is full",
    "raise MemoryError": "MemoryError",
    "raise ValueError('\\U0001f600\\x00\\udcff' * 9999)": "ValueError: \U0001f600",
}


def test_a_worker_that_dies_is_started_again_and_its_exit_report_is_kept(run, tmp_path):
    """One end after the other, in a step of its own each."""
    code, said = run(f"def work(context):\n    number = context.attempt.number\n    lived(context, number + 1)\n"
                     f"    if number < {len(ENDS)}:\n        exec({list(ENDS)!r}[number])\n")
    assert code == 0
    assert said.count(": rank 0 failed in step ") == said.count("the run starts again") == len(ENDS)
    for number, (failure, what) in enumerate(zip(events_of(tmp_path, "failure"), ENDS.values(), strict=True)):
        assert failure["what"].startswith(what)
        assert (failure["phase"], failure["failed_step"]) == ("training", number + 1)
        assert ("Traceback" in failure["details"]) == ("Error" in what or "sys.exit" in what)
    assert [event["attempt"] for event in events_of(tmp_path, "worker_started")] == list(range(len(ENDS) + 1))
    assert {event["verdict"] for event in events_of(tmp_path, "failure")} == {"starts again"}


def test_what_fails_again_ends_with_the_traceback_and_the_first_cause(run, tmp_path):
    code, said = run("def work(context):\n    lived(context, 3)\n"
                     "    raise ValueError(f'in attempt {context.attempt.number}')\n")
    assert code == 1
    assert "Traceback" in said
    assert "the run is not started again: it failed twice in step 3." in said
    assert "The first failure was that of rank 0 in step 3: ValueError: in attempt 0" in said
    verdicts = [event["verdict"] for event in events_of(tmp_path, "failure")]
    assert verdicts == ["starts again", "it failed twice in step 3"]


@pytest.mark.parametrize(("sign", "code", "verdicts"), [
    ("SIGKILL", 0, ["starts again"] * 3), ("SIGTERM", 0, ["starts again"] * 3), ("SIGSTOP", 0, ["starts again"] * 3),
    ("SIGSEGV", 1, ["starts again", "it failed twice in step 3"]),
])
def test_what_comes_from_outside_is_no_mistake_of_the_program(run, tmp_path, sign, code, verdicts):
    """Three times in one step; a fault of its own ends the run at the second time."""
    ended, _ = run(IN_A_HURRY + "robust = {'detectors': {'frozen': {'seconds': 1.0}}}\n\ndef work(context):\n"
                   "    context.heartbeat.start()\n    lived(context, 3)\n    if context.attempt.number < 3:\n"
                   f"        os.kill(os.getpid(), signal.{sign})\n        time.sleep(600)\n")
    assert ended == code
    assert [event["verdict"] for event in events_of(tmp_path, "failure")] == verdicts


ENDS_TWICE = {  # by what a worker does after its last step: its verdict at the second time
    "raise OSError(28, 'No space left on device')": "it failed twice in the same place (ending)",
    "threading.stack_size(1 << 46)\n    threading.Thread(target=print).start()":
        "threads, open files or memory have run out twice (`ulimit -u`, `ulimit -n`, `pids.max`), and each start needs "
        "as many",
}


@pytest.mark.parametrize("does", ENDS_TWICE)
def test_a_failure_at_the_end_of_a_run_is_tried_twice_and_the_command_that_finishes_it_is_named(run, tmp_path, does):
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000003/progress.json").write_text('{"step": 3, "files": {}}')
    code, said = run("from distflow.recovery import restarts\nrestarts._PAUSE = 0.2\n\ndef work(context):\n"
                     "    if not context.attempt.number:\n        lived(context, 3)\n"
                     f"    context.heartbeat.enter('ending')\n    {does}\n")
    failures = events_of(tmp_path, "failure")
    assert [event["verdict"] for event in failures] == ["starts again", ENDS_TWICE[does]]
    assert failures[1]["time"] - failures[0]["time"] > 0.2
    assert code == 1
    assert said.splitlines()[-1] == (
        f"{tmp_path}: all steps are done, and its checkpoint of step 3 is kept. Write its models:  distflow resume "
        f"{tmp_path}   or to another place:  distflow export {tmp_path} FOLDER")


def test_a_run_folder_that_stays_away_ends_the_run_and_what_is_kept_is_named(run, tmp_path):
    code, said = run("from distflow.errors import FolderUnavailable\n\ndef work(context):\n"
                     "    if context.attempt.number:\n        raise FolderUnavailable('it could not be written')\n"
                     "    lived(context, 3)\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert [event["verdict"] for event in events_of(tmp_path, "failure")] == [
        "starts again", "it would fail the next time too"]
    assert (code, said.splitlines()[-2:]) == (1, [
        "it could not be written",
        f"{tmp_path}: it has no checkpoint to go on from (`checkpoint.every` in the run file)"])


def test_a_group_without_which_the_run_goes_on_is_left_out(run, tmp_path):
    """Its supervisor stays until the run is over, and ends well."""
    code, said = run("def is_obsolete():\n    return (folder / 'over').exists()\n\ndef leave_out():\n"
                     "    threading.Timer(1.0, write, ('over',)).start()\n    return True\n\n"
                     "def work(context):\n    lived(context, 3)\n    raise ValueError('a mistake')\n")
    assert code == 0
    assert "the run is left out, and others go on" in said
    event, = events_of(tmp_path, "left_out")
    assert event["why"] == "it failed twice in step 3"


def test_a_mistake_of_the_users_is_said_once_and_not_repeated(run, tmp_path):
    code, said = run("def work(context):\n    lived(context, 3)\n    raise InvalidInput('there is no such file')\n")
    assert (code, said) == (2, "there is no such file.\n")
    assert len(events_of(tmp_path, "worker_started")) == 1


def test_restarts_leave_nothing_behind(run, tmp_path):
    """Thirty attempts: descriptors, threads and processes of the supervisor are as many as before."""
    code, _ = run("robust = {'restarts': 100}\n\ndef work(context):\n    lived(context, context.attempt.number + 2)\n"
                  "    context.snapshots.begin(StateShard(0, context.attempt.number, 1, 0, 1), {}, {})\n"
                  "    context.snapshots.wait()\n"
                  "    if context.attempt.number < 30:\n"
                  "        os.kill(os.getpid(), signal.SIGKILL)\n")
    assert code == 0
    assert (tmp_path / "left").read_text() == "0 0"
    assert all(ends(event["pid"]) for event in events_of(tmp_path, "worker_started"))


def test_a_full_disk_ends_no_supervisor(run):
    """Events cannot be written any more."""
    code, said = run("def work(context):\n    lived(context)\n    if not context.attempt.number:\n"
                     "        (folder / 'events.jsonl').unlink()\n        (folder / 'events.jsonl').mkdir()\n"
                     "        os._exit(9)\n")
    assert (code, said.count("starts again")) == (0, 1)


def test_sigterm_ends_the_worker_and_the_supervisor(start, tmp_path):
    """Which does not end its step in time."""
    supervisor = start("robust = {'shutdown_timeout': 0.2}\n\ndef work(context):\n"
                       "    lived(context)\n    write('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    assert ends(worker)


STEPS = """
def work(context):
    context.heartbeat.enter('training')
    context.heartbeat.begin(7)
    write('worker', os.getpid())
    while not context.heartbeat.page.stop:
        time.sleep(0.01)
    write('asked')
    while (folder / 'step').exists():
        time.sleep(0.01)
    context.heartbeat.page.stop = 2
"""


def test_sigterm_lets_the_step_end(start, tmp_path):
    """Sent twice at once, as `timeout` does."""
    (tmp_path / "step").touch()
    supervisor = start(STEPS)
    eventually(tmp_path / "worker")
    for _ in range(2):
        supervisor.send_signal(signal.SIGTERM)
    eventually(tmp_path / "asked")
    (tmp_path / "step").unlink()
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    assert events_of(tmp_path, "worker_ended")[0]["status"] == 0
    assert events_of(tmp_path, "failure") == []


def test_sigint_for_the_second_time_ends_at_once(start, tmp_path):
    (tmp_path / "step").touch()
    supervisor = start(STEPS)
    worker = int(eventually(tmp_path / "worker"))
    supervisor.send_signal(signal.SIGINT)
    eventually(tmp_path / "asked")
    until = time.monotonic() + 60
    while supervisor.poll() is None and time.monotonic() < until:
        supervisor.send_signal(signal.SIGINT)  # within a second it counts as the first
        time.sleep(0.1)
    assert supervisor.wait(60) == 128 + signal.SIGINT
    assert ends(worker)


def test_a_worker_that_starts_may_tidy_up(start, tmp_path):
    supervisor = start("def work(context):\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n    try:\n"
                 "        write('worker', os.getpid())\n        time.sleep(600)\n    finally:\n        write('tidy')\n")
    eventually(tmp_path / "worker")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "tidy").exists()


def test_what_a_worker_leaves_behind_ends_with_it(start, tmp_path):
    """Processes that a user's function has started; one of them holds the pipe of the last words, and has spoken."""
    supervisor = start("def work(context):\n    if context.attempt.number:\n        return write('again')\n"
                       "    lived(context)\n"
                       "    program = subprocess.Popen(['sleep', '600'])\n    child = os.fork()\n"
                       "    if not child:\n        write('ready')\n        time.sleep(600)\n"
                       "    while not (folder / 'ready').exists():\n        time.sleep(0.01)\n"
                       "    write('left_behind', f'{child} {program.pid}')\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    left = [int(pid) for pid in eventually(tmp_path / "left_behind").split()]
    eventually(tmp_path / "again")
    assert supervisor.wait(60) == 0
    assert all(ends(pid) for pid in left)


HANGS = {"in a call": "threading.Event().wait()", "in a call that holds Python's lock": "ctypes.PyDLL(None).pause()",
         "on a signal": "os.kill(os.getpid(), signal.SIGSEGV)"}


@pytest.mark.parametrize("how", HANGS)
def test_the_line_where_a_worker_hangs_or_crashes_is_named(run, tmp_path, how):
    code, said = run(IN_A_HURRY + "import ctypes\n"
                     "robust = {'detectors': {'frozen': {'seconds': 1.0}, 'stalled': {'seconds': 1.0}}}\n\n"
                     f"def reward():\n    {HANGS[how]}\n\n"
                     "def work(context):\n    context.heartbeat.start()\n    lived(context)\n"
                     "    if not context.attempt.number:\n"
                     f"        for _ in range({0 if how == 'on a signal' else 150}):\n"  # faulthandler writes of 100
                     "            threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
                     "        reward()\n")
    assert code == 0
    script = tmp_path / "supervisor0.py"
    number = script.read_text().splitlines().index(f"    {HANGS[how]}") + 1
    failure, = events_of(tmp_path, "failure")
    assert f" in {script}, line {number}, in reward." in failure["what"]
    assert failure["what"] in said
    assert f'line {number} in reward\n  File "{script}", line ' in failure["details"]
    assert failure["details"].endswith(failure["what"])


def test_ranks_that_have_not_entered_a_collective_are_named(run, tmp_path):
    """As NCCL ends a process whose collective has timed out."""
    inside = json.dumps({"0/dp": [7, "all_reduce", "dp", [0, 1], 0.0]})
    code, _ = run("\n\ndef work(context):\n    lived(context)\n    if not context.attempt.number:\n"
                  f"        RunStore.store.put('the run/0/collectives/0', {inside!r})\n        os.abort()\n")
    assert code == 0
    what = events_of(tmp_path, "failure")[0]["what"]
    script = tmp_path / "supervisor0.py"
    number = script.read_text().splitlines().index("        os.abort()") + 1
    where = f"{script}, line {number}, in work"
    assert what.startswith(f"it was ended by SIGABRT in {where}. Collectives: rank 1 has not said that it entered "
                           "all_reduce 7 of group `dp`, where rank 0 waits for ")


def test_a_worker_whose_supervisor_is_killed_ends(start, tmp_path):
    supervisor = start("\n\ndef work(context):\n"
                       "    lived(context)\n    write('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    supervisor.kill()
    assert ends(worker)


def test_a_signal_to_all_processes_of_a_run_leaves_a_checkpoint(start, tmp_path):
    """As by scancel, or when a container is stopped."""
    supervisor = start("from distflow.telemetry import heartbeat\n\ndef work(context):\n    context.ready()\n"
                       "    lived(context)\n    write('worker', os.getpid())\n"
                       "    while not context.heartbeat.page.stop:\n        time.sleep(0.01)\n    time.sleep(0.3)\n"
                       "    context.heartbeat.page.stop = heartbeat.STOPPED\n"
                       "    write('saved', subprocess.run(['sh', '-c', 'kill -TERM $$']).returncode)\n")
    worker = int(eventually(tmp_path / "worker"))
    for process in (worker, supervisor.pid, worker):
        os.kill(process, signal.SIGTERM)
    assert supervisor.wait(60) == 128 + signal.SIGTERM
    assert eventually(tmp_path / "saved") == str(-signal.SIGTERM), "what it executes is ended by the signal"


def test_while_a_new_run_starts_its_folder_has_no_open_file(start, tmp_path):
    """On NFS a folder with one cannot be removed, as that of a start that fails must be."""
    supervisor = start("from distflow.telemetry.run_lock import RunLock\n\nlock = RunLock(folder)\n\n"
                       "def work(context):\n    time.sleep(0.6)\n"
                       "    write('locked', (folder / 'run.lock').exists())\n    context.ready()\n"
                       "    while not (folder / 'run.lock').exists():\n        time.sleep(0.01)\n")
    assert supervisor.wait(60) == 0
    assert (tmp_path / "locked").read_text() == "False"


def test_a_supervisor_without_a_store_ends(start, tmp_path):
    """The machine that kept it is gone."""
    from stores import hosted  # most tests here need no torch

    store = hosted()
    supervisor = start(f"store = TCPStoreClient('127.0.0.1', {store.port}, 60.0)\n\ndef work(context):\n"
                       "    lived(context)\n    write('worker', os.getpid())\n    time.sleep(600)\n")
    worker = int(eventually(tmp_path / "worker"))
    port = store.port
    del store
    assert supervisor.wait(60) == 1
    assert f"the store at 127.0.0.1:{port} does not answer any more" in supervisor.stderr.read()
    assert ends(worker)


@pytest.fixture
def store_process(forked):
    from stores import StoreProcess  # most tests here need no torch

    made = StoreProcess()
    yield made
    made.end()


STALLED = """
store = TCPStoreClient('127.0.0.1', {port}, {seconds})

def work(context):
    lived(context, context.attempt.number + 2)
    write(f'worker {{context.attempt.number}}', os.getpid())
    while not context.heartbeat.page.stop:
        time.sleep(0.01)
    write('asked')
"""


def test_a_worker_is_watched_while_the_store_stands_still(start, tmp_path, store_process):
    """Its death is seen at once; what follows is decided when the store answers again, and signals are heard."""
    supervisor = start(STALLED.format(port=store_process.port, seconds=120))
    worker = int(eventually(tmp_path / "worker 0"))
    store_process.stop()
    os.kill(worker, signal.SIGKILL)
    until = time.monotonic() + 20
    eventually(tmp_path / "events.jsonl")
    while not (ended := events_of(tmp_path, "worker_ended")) and time.monotonic() < until:
        time.sleep(0.05)
    assert [event["status"] for event in ended] == [-signal.SIGKILL]
    assert not (tmp_path / "worker 1").exists(), "the store has not said who begins which attempt"
    store_process.go_on()
    worker = int(eventually(tmp_path / "worker 1"))
    store_process.stop()
    supervisor.send_signal(signal.SIGTERM)
    eventually(tmp_path / "asked", 20)
    assert ends(worker)
    store_process.go_on()
    assert supervisor.wait(60) == 0


def test_a_store_that_stands_still_for_too_long_ends_the_run(start, tmp_path, store_process):
    supervisor = start(STALLED.format(port=store_process.port, seconds=5))
    worker = int(eventually(tmp_path / "worker 0"))
    store_process.stop()
    assert supervisor.wait(60) == 1
    assert f"the store at 127.0.0.1:{store_process.port} has not answered for" in supervisor.stderr.read()
    assert ends(worker)


ENDED = "\n\ndef work(context):\n    continue_stopped(context.supervisor_pid, {seconds})\n    lived(context)\n" \
        "    write('worker', os.getpid())\n    while not (folder / 'go').exists():\n        time.sleep(0.01)\n"


DOCK = "from distflow.dock.process import start\nchild = start(bytes(16))\nwrite('dock', child.process.pid)\n"


@pytest.mark.parametrize(("which", "what"), [("supervisor", "the supervisor of a rank"), ("torchrun", "torchrun"),
                                             ("dock", "a helper process of a supervisor, such as the dock's,")])
def test_a_process_that_nothing_else_monitors_is_named_and_continued(start, tmp_path, which, what):
    """By the worker, which goes on."""
    text = DOCK + "from distflow.recovery.stopped import continue_stopped" + ENDED.format(seconds=0.5)
    above = start(text, shell="yes", TORCHELASTIC_RUN_ID="none")
    worker = int(eventually(tmp_path / "worker"))
    supervisor = parent(worker)
    assert parent(supervisor) == above.pid
    victim = {"supervisor": supervisor, "torchrun": above.pid, "dock": int(eventually(tmp_path / "dock"))}[which]
    os.kill(victim, signal.SIGSTOP)
    said = ""
    while not said.endswith("\n"):
        said += above.stderr.readline()
    assert f"{what} (process {victim}) stood stopped for" in said
    (tmp_path / "go").touch()
    assert above.wait(60) == 0


@pytest.mark.parametrize("torchrun", [True, False])
def test_a_supervisor_ends_with_torchrun_and_not_with_a_shell(start, tmp_path, torchrun):
    """Also if no signal says so; its worker ends with it."""
    above = start("def work(context):\n    lived(context)\n    write('worker', os.getpid())\n"
                  "    while not (folder / 'go').exists():\n        time.sleep(0.01)\n", shell="yes",
                  **({"TORCHELASTIC_RUN_ID": "none"} if torchrun else {}))
    worker = int(eventually(tmp_path / "worker"))
    supervisor = parent(worker)
    above.kill()
    if torchrun:
        assert ends(worker)
        assert ends(supervisor)
        return
    until = time.monotonic() + 60.0
    while parent(supervisor) == above.pid:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not ends(worker, 1.0)
    (tmp_path / "go").touch()
    assert "0 0" in eventually(tmp_path / "left")


TWO = """
from distflow.recovery import restarts
restarts._SETTLE = 30.0  # for a cause to be known: this machine may be busy
store, ranks = TCPStoreClient('127.0.0.1', {port}, 60.0), 2
robust = {{'restarts': 100}}

def work(context):
    lived(context, context.attempt.number + 2)
    write(f'{{RunStore.rank}} in {{context.attempt.number}}')
    {body}
"""


def two_supervisors(start, folder: Path, body: str, says: str | None = None) -> list[list[int]]:
    """Run two supervisors to their end, and return the attempts of each. `says`: all that they write."""
    from stores import hosted  # most tests here need no torch

    store = hosted()
    supervisors = [start(TWO.format(port=store.port, body=body), RANK_OF_SUPERVISOR=str(rank)) for rank in range(2)]
    said = [supervisor.communicate(timeout=120)[1] for supervisor in supervisors]
    assert [supervisor.returncode for supervisor in supervisors] == [0, 0], said
    assert says is None or said == [says] * 2
    return [[event["attempt"] for event in events_of(folder, "worker_started") if event["rank"] == rank]
            for rank in range(2)]


@pytest.mark.parametrize(("body", "restarts"), [
    # one is done, the other dies then: both do it again
    ("""if RunStore.rank == 1 and not context.attempt.number:
        while not store.has('restarts/the run/0/done/0'):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)""", 2),
    # both die at once, many times
    ("""other = folder / f'{1 - RunStore.rank} in {context.attempt.number}'
    while context.attempt.number < 8 and not other.exists():
        time.sleep(0.001)
    if context.attempt.number < 8:
        os.kill(os.getpid(), signal.SIGKILL)""", 9),
    # one only misses the other, and says so first
    ("""if not context.attempt.number:
        if RunStore.rank == 0:
            while not (folder / '1 in 0').exists():
                time.sleep(0.01)
            raise RankMissing('rank 1 does not come')
        while not store.has('restarts/the run/0/failed/1'):
            time.sleep(0.01)
        raise ValueError('the cause')""", 2),
], ids=["done and dead", "both", "symptom"])
def test_two_supervisors_have_the_same_attempts(start, tmp_path, body, restarts):
    assert two_supervisors(start, tmp_path, body) == [[*range(restarts)]] * 2
    verdicts = events_of(tmp_path, "failure")
    assert [event["attempt"] + 1 for event in verdicts] == list(range(1, restarts)), "one supervisor speaks for all"
    if "the cause" in body:
        assert events_of(tmp_path, "failure")[0]["what"] == "ValueError: the cause"
    assert os.path.exists(tmp_path / f"1 in {restarts - 1}")


def test_supervisors_whose_workers_reload_begin_the_next_attempt_together(start, tmp_path):
    """One of them a moment later, when the other has begun already; nothing has failed."""
    body = "if context.attempt.number < 3:\n        time.sleep(0.5 * (RunStore.rank == context.attempt.number % 2))\n" \
           "        return False"
    assert two_supervisors(start, tmp_path, body, "") == [[0, 1, 2, 3]] * 2
    assert events_of(tmp_path, "failure") == []


def test_a_supervisor_that_rests_is_not_missed_by_the_other(start, tmp_path):
    """Its worker ends, and the other one's, which notices that, has not failed: both begin another attempt, once it is
    scaled up again."""
    body = """if context.attempt.number == 0 and RunStore.rank == 0:
        write('pid', os.getpid())
        signal.pause()
    if context.attempt.number == 0:
        while not (folder / 'pid').exists() or Path('/proc', (folder / 'pid').read_text(), 'fd').exists():
            time.sleep(0.01)
        raise ValueError('the other rank has gone')

def should_run():
    return RunStore.rank == 1 or not (folder / 'pid').exists() or (folder / '1 in 1').exists()
"""
    assert two_supervisors(start, tmp_path, body) == [[0, 1]] * 2
    assert events_of(tmp_path, "failure") == []
    assert [event["rank"] for event in events_of(tmp_path, "worker_scaled_down")] == [0]


@pytest.mark.parametrize(("renews", "code"), [("None", 1), ("lambda: write('renewed') or {}", 0)])
def test_a_group_that_cannot_go_on_without_a_process_ends_with_it(start, tmp_path, renews, code):
    """Whatever its budget of restarts: what the process held cannot be made again."""
    supervisor = start(f'''
ended, end = os.pipe()
required, renews = {{ended: "the samples have ended: go on from a checkpoint"}}, {renews}

def work(context):
    lived(context, 3)
    if context.attempt.number == 0:
        os.write(end, b"x")
        time.sleep(600)
''')
    _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == code
    assert "the samples have ended: go on from a checkpoint" in said
    assert (tmp_path / "renewed").exists() == (code == 0)
