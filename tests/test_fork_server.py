"""What the fork server of the tests gives to processes, so that none has what another one's is."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from harness import ROOT, environment
from ranks import end_processes, run_ranks

from distflow.telemetry import heartbeat

SHARED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import fork_server

def show():
    print(*(os.environ.get(name) for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")), flush=True)

if __name__ == "__main__":
    fork_server.FORKED.set_forkserver_preload([])
    fork_server.share()
    fork_server.fork_process(show).join()
"""
BEAT = """
from distflow.telemetry import heartbeat

heartbeat.current().tick()
print(heartbeat.current().read().progress)
"""
FORGOTTEN = """
import gc, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import warm

OWN = "import gc, tempfile; own = tempfile.TemporaryFile(); gc.unfreeze(); gc.collect(); own.seek(0); print('open')"
subprocess._fork_exec = warm.fork_or_execute
gc.disable()
circle = [os.fdopen(os.dup(0))]
circle.append(circle)
del circle
print(subprocess.run([sys.executable, "-c", OWN], capture_output=True, text=True).stdout, end="")
"""


def test_a_shared_fork_server_has_its_own_environment(tmp_path):
    (tmp_path / "shared.py").write_text(SHARED)
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TESTS_FORK_SERVER")}
    done = subprocess.run([sys.executable, "shared.py", str(Path(__file__).parent)], cwd=tmp_path, env=kept,
                          capture_output=True, text=True, check=True)
    assert done.stdout == "1 ERROR\n"


def test_what_is_freed_of_the_parents_closes_no_file_of_a_fork(tmp_path):
    (tmp_path / "forgotten.py").write_text(FORGOTTEN)  # vLLM unfreezes when an engine is closed
    done = subprocess.run([sys.executable, "forgotten.py", str(Path(__file__).parent)], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert done.stdout == "open\n", done.stderr


def test_commands_that_are_forked_have_their_own_heartbeat(tmp_path, ready):
    (tmp_path / "beat.py").write_text(BEAT)
    variables = environment() | {"PYTHONPATH": str(ROOT)}
    assert [ready.run(0, ("beat.py",), tmp_path, variables).stdout for _ in range(2)] == ["1\n"] * 2


def _beat_together() -> int:
    heartbeat.current().tick()
    dist.barrier()
    return heartbeat.current().read().progress


def test_ranks_that_are_forked_have_their_own_heartbeat():
    end_processes()
    assert run_ranks(2, _beat_together) == [1, 1]
