"""Hostile programs in the sandbox: each is stopped, says so, and leaves nothing behind. Real processes throughout."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from harness import ROOT

from distflow.errors import EngineError
from workers.isolation.sandbox import runner, seccomp
from workers.isolation.sandbox.runner import KINDS, Outcome, isolation, run_python

SYSTEM = Path("/usr/bin/python3")


def reachable() -> bool:
    """Whether a program with a user id of its own can start this interpreter."""
    folders = Path(os.path.realpath(sys.executable)).parents
    return os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in folders)


@functools.cache
def refused(kind: str) -> str:
    """Why a kind of isolation cannot be had here; one of them must be (see below)."""
    try:
        run_python("pass", seconds=20.0, kind=kind)
    except OSError as error:
        return str(error)
    return ""


@pytest.fixture(params=KINDS)
def run(request, monkeypatch):
    """`run_python` with one kind of isolation; behind filters, with an interpreter that all users may read."""
    if request.param == "filters" and not reachable():
        if not SYSTEM.exists():
            pytest.skip("root's own interpreter cannot be reached by other users, and there is no other")
        monkeypatch.setattr(runner.sys, "executable", str(SYSTEM))
        readable = [str(path) for path in (SYSTEM.resolve(), *map(Path, runner._SYSTEM)) if path.exists()]
        monkeypatch.setattr(runner, "_interpreter", lambda: readable)

    if refusal := refused(request.param):
        pytest.skip(f"this machine does not allow {request.param}: {refusal}")

    def run(source: str, stdin: str = "", **limits) -> Outcome:
        return run_python(textwrap.dedent(source), stdin, **{"kind": request.param, "seconds": 20.0, **limits})

    run.kind = request.param
    return run


def open_to_all(folder: Path) -> None:
    """Let all users reach a folder of pytest's; two levels of those above it are one's own, three under xdist."""
    for each in (folder, *folder.parents):
        if each.name.startswith(("pytest-", "popen-", folder.name)):
            each.chmod(0o755)


@pytest.fixture
def own_tempdir(tmp_path, monkeypatch):
    """A folder for temporary folders that no other process uses, and that all users reach."""
    monkeypatch.setattr(runner.tempfile, "tempdir", str(tmp_path))
    open_to_all(tmp_path)
    return tmp_path


def processes_with(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def sleeper(marker: str) -> str:
    """Source that becomes a process which can be found by its command line."""
    executable = os.path.realpath(runner.sys.executable)
    return f"os.execv({executable!r}, ['python', '-c', 'import time; time.sleep(600)', {marker!r}])"


def test_sandbox_runs_a_good_program(run):
    outcome = run("import sys\nprint(input() + '!', sys.stdin.read())\nraise SystemExit(3)", "grüße\nrest")
    assert (outcome.ended, outcome.status, outcome.stdout, outcome.stderr) == ("exited", 3, "grüße! rest\n", "")
    assert not outcome.ok
    assert run("import json, threading, tempfile, decimal").ok


def test_sandbox_shows_the_traceback_of_a_program(run):
    outcome = run("def half(x):\n    return x / 0\nhalf(1)")
    assert (outcome.ended, outcome.status) == ("exited", 1)
    assert "line 2, in half" in outcome.stderr
    assert "ZeroDivisionError" in outcome.stderr


@pytest.mark.parametrize("source", [
    "print('so far', flush=True)\nwhile True: pass",
    "import signal, time\nfor number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
    "print('so far', flush=True)\nwhile True: time.sleep(600)",
    "import os, time\nprint('so far', flush=True)\nos.close(1), os.close(2), os.close(0)\ntime.sleep(600)",
    "print('so far', flush=True)\nwhile True: input_ = (lambda n: n ** n ** 7)(97)",
], ids=["spins", "ignores signals", "closes its streams", "one long operation"])
def test_sandbox_ends_a_program_at_its_time_limit(run, source):
    outcome = run(source, seconds=1.0)
    assert (outcome.ended, outcome.stdout) == ("time", "so far\n")
    assert 0.4 < outcome.seconds < 20.0


def test_sandbox_knows_the_exit_status_of_a_program_without_streams(run):
    outcome = run("import os\nos.close(1), os.close(2)\nos._exit(5)")
    assert (outcome.ended, outcome.status) == ("exited", 5)


def test_sandbox_bounds_output(run):
    outcome = run("while True: print('x' * 1000)", output_kib=64)
    assert outcome.ended == "output"
    assert len(outcome.stdout) == 64 << 10


def test_sandbox_names_the_signal_that_ended_a_program(run):
    outcome = run("import os\nos.abort()")
    assert (outcome.ended, outcome.status) == ("killed", -signal.SIGABRT)


def test_sandbox_bounds_memory(run):
    outcome = run("try:\n    block = bytearray(1 << 30)\nexcept MemoryError:\n    print('refused')", memory_mib=256)
    assert outcome.stdout == "refused\n"


def test_sandbox_bounds_disk(run):
    outcome = run("""
        try:
            with open('huge', 'wb') as file:
                for _ in range(100): file.write(bytes(1 << 20))
        except OSError as error:
            import os
            print(error.errno in (27, 28), os.path.getsize('huge') <= 8 << 20)
    """, disk_mib=8)
    assert outcome.stdout == "True True\n"


def test_sandbox_bounds_processes(run):
    outcome = run("""
        import os, time
        made = 0
        try:
            for _ in range(200):
                if not os.fork():
                    time.sleep(600)
                made += 1
        except BlockingIOError:
            print(made)
    """, processes=12)
    assert outcome.ended == "exited"
    assert 5 < int(outcome.stdout) <= 15
    assert run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", seconds=1.0).ended == "time"


def test_sandbox_ends_descendants_of_a_program(run):
    marker = str(uuid.uuid4())
    outcome = run(f"""
        import os, signal
        for _ in range(3):
            if not os.fork():
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if not os.fork():
                    null = os.open('/dev/null', os.O_RDWR)
                    for stream in (0, 1, 2): os.dup2(null, stream)
                    {sleeper(marker)}
                os._exit(0)
            os.wait()
        print('left them')
    """)
    assert outcome.stdout == "left them\n"
    assert processes_with(marker) == []


def test_sandbox_ends_programs_of_a_killed_caller(run):
    marker = str(uuid.uuid4())
    source = f"import os\nif not os.fork():\n    os.setsid()\n    {sleeper(marker)}\nos.wait()"
    script = (f"from workers.isolation.sandbox import runner\nrunner.sys.executable = {runner.sys.executable!r}\n"
              f"runner._interpreter = lambda: {runner._interpreter()!r}\n"
              f"runner.run_python({source!r}, kind={run.kind!r}, seconds=600.0)")
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (found := processes_with(marker)) and time.monotonic() < deadline:
            assert caller.poll() is None
        watched = os.pidfd_open(found[0])
    finally:
        caller.kill()
        caller.wait()
    try:
        assert select.select([watched], [], [], 20.0)[0]
    finally:
        os.close(watched)


CONNECT = """
    import socket
    try:
        socket.create_connection(('127.0.0.1', {port}), timeout=5)
    except OSError as error:
        print('refused')
    else:
        print('connected')
"""


def test_sandbox_refuses_sockets_unless_network_is_allowed(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        source = CONNECT.format(port=server.getsockname()[1])
        assert run(source).stdout == "refused\n"
        with pytest.raises(BlockingIOError):
            server.accept()
        assert run(source, network="allow").stdout == "connected\n"
        server.accept()[0].close()


def test_sandbox_refuses_reads_outside_of_its_folder(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    for folder in tmp_path.parents:
        if folder.name.startswith("pytest-"):
            folder.chmod(0o755)
    places = [str(secret), "/etc/passwd", "/etc/hostname", f"/proc/{os.getpid()}/environ", "/proc/self/environ",
              str(Path.home()), str(ROOT), "/var", "/sys", "/dev/mem"]
    outcome = run(f"""
        import os
        for place in {places!r}:
            try:
                print(place, os.listdir(place) if os.path.isdir(place) else open(place).read())
            except OSError:
                pass
    """)
    assert outcome.ok, outcome.stderr
    below = (os.path.realpath(runner.sys.executable), *runner._packages())
    names = {folder.name for path in below for folder in Path(path).parents}
    way = {f"{place} {[name]}" for place in (Path.home(), ROOT) for name in names}
    seen = [line for line in outcome.stdout.splitlines() if line not in way]
    assert seen == []  # the way to the interpreter and packages is there, and nothing beside it


def test_sandbox_refuses_writes_outside_of_its_folder(run, tmp_path):
    tmp_path.chmod(0o777)
    outcome = run(f"""
        import os, sys, json
        wrong = []
        for place in ({str(tmp_path)!r}, '/', '/usr/lib', os.path.dirname(json.__file__), '/dev', '/dev/shm'):
            try:
                open(os.path.join(place, 'left'), 'w').close()
                wrong.append(place)
            except OSError:
                pass
        print(wrong)
        open('mine', 'w').close()
        print(sorted(os.listdir('.')))
    """)
    assert outcome.stdout == "[]\n['main.py', 'mine']\n"
    assert list(tmp_path.iterdir()) == []


def test_sandbox_refuses_changes_of_files_that_are_not_opened(run, tmp_path):
    """Landlock knows nothing of these calls; behind filters the program may have the caller's user id."""
    file = tmp_path / "file"
    file.write_text("content")
    before = file.stat()
    open_to_all(tmp_path)
    outcome = run(f"""
        import ctypes, os
        path, libc = {str(file)!r}, ctypes.CDLL(None)
        for act in (lambda: os.truncate(path, 0), lambda: os.chmod(path, 0o777), lambda: os.utime(path, (1, 1)),
                    lambda: os.setxattr(path, 'user.x', b'y'), lambda: os.chown(path, -1, os.getgid()),
                    lambda: os.unlink(path), lambda: os.rename(path, 'here'), lambda: os.link(path, 'here')):
            try:
                act()
                print('changed it')
            except OSError:
                pass
    """)
    assert (outcome.ended, outcome.status, outcome.stdout) == ("exited", 0, "")
    after = file.stat()
    assert file.read_text() == "content"
    assert [getattr(after, name) for name in ("st_mode", "st_mtime_ns", "st_uid", "st_gid", "st_nlink")] == [
        getattr(before, name) for name in ("st_mode", "st_mtime_ns", "st_uid", "st_gid", "st_nlink")]


def test_sandbox_refuses_memory_outside_of_the_address_space(run):
    """Such memory is not counted by `memory_mib`, and some of it outlives the program."""
    numbers = seccomp._MEMORY["memfd_secret"], seccomp._MEMORY["inotify_init1"]
    secret, inotify = (pair[seccomp._INDEX[platform.machine()]] for pair in numbers)
    outcome = run(f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.shmget(4711, 256 << 20, 0o1666), libc.semget(4711, 1, 0o1666), libc.msgget(4711, 0o1666),
              libc.mq_open(b'/queue', os.O_CREAT | os.O_RDWR, 0o600, None), libc.memfd_create(b'', 0),
              libc.syscall({secret}, 0), libc.syscall({inotify}, 0), ctypes.get_errno())
        for write in (lambda: os.write(0, bytes(1 << 20)), lambda: open('/dev/shm/kept', 'wb')):
            try:
                write()
            except OSError as error:
                print(type(error).__name__)
    """, "input", memory_mib=128)
    counts, standard_input, shm = outcome.stdout.splitlines()
    assert counts == "-1 -1 -1 -1 -1 -1 -1 1"
    assert standard_input == "PermissionError"
    assert shm in ("FileNotFoundError", "PermissionError")


def test_sandbox_hides_environment_and_files_of_its_caller(run, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    outcome = run("""
        import os, signal
        def refused(act, *arguments):
            try:
                act(*arguments)
            except OSError:
                return True
            return False
        print('SECRET' in os.environ, all(refused(os.fstat, number) for number in range(3, 4096)))
        for victim in (os.getppid(), 1):
            refused(os.kill, victim, signal.SIGKILL)
        refused(os.kill, -1, signal.SIGKILL)
        print('here')
    """)
    assert outcome.stdout == "False True\nhere\n"


def test_sandbox_refuses_namespaces_mounts_and_ptrace(run):
    outcome = run("""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x40000000, 0x20000):
            print(libc.unshare(flags), ctypes.get_errno() == errno.EPERM)
        print(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None), libc.ptrace(16, 1, 0, 0), libc.setuid(0))
    """)
    assert outcome.stdout == "-1 True\n" * 3 + "-1 -1 -1\n"


def test_sandbox_removes_folders_whatever_their_rights(run, own_tempdir):
    outcome = run("""
        import os
        print(os.getcwd())
        os.mkdir('a')
        open('a/b', 'w').close()
        os.mkdir('a/c', 0)
        os.mkdir('d', 0)
    """)
    assert outcome.ok
    assert outcome.stdout.startswith(str(own_tempdir)) or run.kind == "namespaces"  # which need no folder
    assert list(own_tempdir.iterdir()) == []


def test_isolation_takes_the_best_kind_that_works_and_none_is_an_error(monkeypatch):
    isolation.cache_clear()
    try:
        assert isolation() in KINDS
        isolation.cache_clear()
        monkeypatch.setattr(runner, "_run", lambda *arguments: "no")
        with pytest.raises(EngineError, match=r"namespaces: no; filters: no.*files: allow"):
            isolation()
    finally:
        isolation.cache_clear()


def test_sandbox_fixes_the_hash_seed(run):
    assert len({run("print({'a', 'b', 'c', 'd', 'e', 'f'})").stdout for _ in range(3)}) == 1


def test_sandbox_removes_what_a_killed_caller_left(run, own_tempdir):
    for name in ("abandoned", "in-use", "new"):
        (own_tempdir / f"distflow-sandbox-{name}/a").mkdir(parents=True)
        os.utime(own_tempdir / f"distflow-sandbox-{name}", (1, 1) if name != "new" else None)
    lock = os.open(own_tempdir / "distflow-sandbox-in-use", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    runner._remove_abandoned.cache_clear()
    assert run("pass").ok
    os.close(lock)
    left = {"in-use", "new"} | ({"abandoned"} if run.kind == "namespaces" else set())  # which need no folder
    assert {path.name for path in own_tempdir.iterdir()} == {f"distflow-sandbox-{name}" for name in left}


only_root = pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM.exists() or not (ROOT.stat().st_mode & 1),
                               reason="only root can become somebody else, who must be able to read this tree")


def as_nobody(script: str, **environment: str) -> list[str]:
    done = subprocess.run([SYSTEM, "-c", textwrap.dedent(script)], cwd=ROOT, env=environment, user=65534, group=65534,
                          extra_groups=[], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@only_root
def test_sandbox_filters_hide_processes_of_the_same_user():
    """By the owner of a file, whom the kernel tells when it is ready; by a segment whose number is guessed."""
    source = """
        import ctypes, fcntl, os, struct
        victim, segment = VICTIM
        read, write = os.pipe()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        for act in (lambda: fcntl.fcntl(read, fcntl.F_SETOWN, victim),
                    lambda: fcntl.fcntl(read, 15, struct.pack('ii', 1, victim)),
                    lambda: fcntl.ioctl(read, 0x8901, struct.pack('i', victim))):
            try:
                act()
                print('owned')
            except PermissionError:
                print('refused')
        print(libc.shmat(segment, None, 0) == ctypes.c_void_p(-1).value, libc.shmctl(segment, 0, None))
        print(fcntl.fcntl(read, fcntl.F_GETFL))
    """
    lines = as_nobody(f"""
        import ctypes, os
        from workers.isolation.sandbox.runner import run_python
        libc = ctypes.CDLL(None)
        segment = libc.shmget(0, 4096, 0o1600)
        assert segment >= 0
        try:
            source = {textwrap.dedent(source)!r}.replace("VICTIM", str((os.getpid(), segment)))
            print(run_python(source, kind="filters").stdout)
        finally:
            assert libc.shmctl(segment, 0, None) == 0
    """)
    assert lines[:5] == ["refused"] * 3 + ["True -1", "0"]


@only_root
def test_sandbox_removes_nested_folders_however_deep_and_closed(own_tempdir):
    own_tempdir.chmod(0o777)
    source = ("import os\nos.mkdir('z', 0)\nos.symlink('/', 'root')\nfor _ in range(1100):\n"
              "    os.mkdir('a'); os.chdir('a')\nos.mkdir('c', 0)\nopen('d', 'w').close()")
    try:
        lines = as_nobody(f"""
            from workers.isolation.sandbox.runner import run_python
            print(run_python({source!r}, kind="filters", seconds=60.0).ok)
        """, TMPDIR=str(own_tempdir))
        assert lines == ["True"]
        assert list(own_tempdir.iterdir()) == []
    finally:  # deeper than pytest's own removal goes, which would end each later session
        subprocess.run(["rm", "-rf", *own_tempdir.iterdir()], check=True)


@only_root
@pytest.mark.parametrize("kind", KINDS)
def test_sandbox_works_for_a_caller_without_rights(kind, own_tempdir):
    """The ways of a caller who is not root differ: a user namespace, no user id of one's own."""
    victim = own_tempdir / "victim"
    victim.touch()
    os.chown(victim, 65534, 65534)
    script = textwrap.dedent(f"""
        from workers.isolation.sandbox.runner import run_python
        def show(source, **limits):
            outcome = run_python(source, kind={kind!r}, **limits)
            print(outcome.ended, outcome.status, outcome.stdout.strip())
        show("import os; print(os.geteuid() != 0)")
        show("import time; time.sleep(600)", seconds=0.5)
        show("import os\\nfor _ in range(100):\\n  if not os.fork(): import time; time.sleep(600)")
        show("import socket; socket.socket()")
        show("open('/etc/passwd')")
        show("import os; os.kill(1, 9); print('here')")
        show("import os; os.chmod({str(victim)!r}, 0o777)")
    """)
    done = subprocess.run([SYSTEM, "-c", script], cwd=ROOT, env={}, user=65534, group=65534, extra_groups=[],
                          capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["exited 0 True"], done.stderr
    assert lines[1].startswith("time ")
    assert lines[2:5] == ["exited 1 "] * 3
    assert lines[5:] == ["exited 0 here" if kind == "namespaces" else "exited 1 ", "exited 1 "]
    assert victim.stat().st_mode & 0o777 == 0o644
