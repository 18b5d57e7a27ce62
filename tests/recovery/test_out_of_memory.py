"""What a supervisor can know of an out-of-memory kill of its worker; a real kill: tests/test_recovery.py."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from stores import hosted

from distflow.config.robust import Robust
from distflow.recovery import out_of_memory
from distflow.recovery.restarts import RestartGroup
from distflow.recovery.supervisor import SupervisedRun, Supervisor


@pytest.mark.parametrize(("before", "now", "said"), [
    (3, 3, "Another process sent it"),
    (3, 5, "The kernel probably ended it because memory was full: it has ended 2 since"),
    (None, 5, "The kernel may have ended it"), (3, None, "The kernel may have ended it")])
def test_the_cause_of_a_kill_is_no_more_than_is_known(monkeypatch, before, now, said):
    monkeypatch.setattr(out_of_memory, "kill_count", lambda: now)
    assert out_of_memory.kill_cause(before).startswith(said)


WITHOUT_PROCESSES = """
import os, resource, socket, subprocess
from distflow.recovery.out_of_memory import is_exhausted

here, there = socket.socketpair()
here.setblocking(False)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:
    os.setuid(65534)  # root has no such limit
for act in (lambda: here.recv(1), lambda: subprocess.Popen(["true"])):
    try:
        act()
    except BlockingIOError as error:
        print(is_exhausted(error))
"""


def test_only_the_start_of_a_process_says_with_eagain_that_processes_have_run_out():
    """A socket says with it that nothing has come."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_PROCESSES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(("now", "outside"), [(3, True), (4, False)])
def test_what_the_kernel_ends_for_its_memory_is_not_ended_by_somebody_else(tmp_path, monkeypatch, now, outside):
    """The same batch would not fit the next time either."""
    store = hosted()
    supervisor = Supervisor(SimpleNamespace(rank=0, ranks=1, store=store), RestartGroup("the run", range(1), "ranks"),
                            print, SupervisedRun(tmp_path, Robust()))
    supervisor.kills_before = 3
    monkeypatch.setattr(out_of_memory, "kill_count", lambda: now)
    assert supervisor._failure_of_exit(-signal.SIGKILL, b"").outside is outside
    assert supervisor._failure_of_exit(-signal.SIGTERM, b"").outside


@pytest.mark.parametrize(("phase", "said"), [
    ("training", "--set roles.actor.micro_batch_tokens=8192 --set roles.critic.micro_batch_tokens=50"),
    ("generating", "--set roles.actor.generation.batch_rows=256"), ("waiting", "")])
def test_remedy_names_the_smaller_settings_of_the_phase(phase, said):
    settings = {"roles.actor.micro_batch_tokens": "16384", "roles.critic.micro_batch_tokens": "100",
                "roles.actor.generation.batch_rows": "512", "roles.critic.generation.batch_rows": "1"}
    assert out_of_memory.remedy(phase, settings).partition("It takes less with  ")[2] == said
