"""What SGLang's server alone can do wrong: it is another process, in another environment, reached by a socket."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from engines.rollouts import LIMIT, TRAITS, build, slow_down, tiny
from engines.test_rollout_contract import changed, greedy_of, lasting, require_greedy, until_done, weights
from harness import metrics_of
from torch.distributed.device_mesh import init_device_mesh

from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines.devices import NAMES
from workers.engines.rollout import SampledRow
from workers.engines.rounding import ROUNDING
from workers.engines.sglang import weights as arrival
from workers.engines.sglang.server import SGLangServer

if not TRAITS["sglang"].installed:
    pytest.skip("no environment with SGLang is named", allow_module_level=True)
SOON = 60.0
"""Seconds within which what must happen has happened; far from what it takes."""


@pytest.fixture(scope="module")
def name():
    return "sglang"


@pytest.fixture
def fresh(mesh):
    """A server that the test may kill."""
    engine = build("sglang", mesh, tiny())
    yield engine
    engine.close()


def group_of(leader: int) -> set[int]:
    """The processes of a server: all that are in its group and not dead."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = status.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.add(int(status.parent.name))
    return found


def memory_of(pid: int) -> int:
    """Its pages in memory: that child has most which holds the model."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def left_by(leader: int, folder: str) -> set[Path]:
    """The files of a server: its folder, and the shared memory that its processes have open."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in group_of(leader)]
    found = {Path(name) for text in maps for name in re.findall(r"/dev/shm/sgl\S+", text)}
    assert found
    return {*found, Path(folder)}


def require_gone(leader: int) -> None:
    deadline = time.monotonic() + SOON
    while group_of(leader):
        assert time.monotonic() < deadline, f"these are left: {group_of(leader)}"
        time.sleep(0.05)


def go_on(session) -> None:
    """Until it fails, or too long."""
    began = time.monotonic()
    while session.busy and time.monotonic() - began < SOON:
        session.step()


def sampling(engine, prompts, limit: int = 190):
    """A session with rows that go on for long."""
    slow_down(engine, 0.05)
    session = engine.session(key=1, temperature=0.0)
    session.ends = {0}
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)), max_new_tokens=limit)
    for row in rows:
        session.add([row])
    assert session.step() == []
    return session, rows


def test_a_flag_that_sglang_does_not_know_is_an_error_with_its_last_words(mesh, monkeypatch):
    monkeypatch.setenv("DISTFLOW_SGLANG_FLAGS", "--no-such-flag 3")
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"ended with status 2(.|\n)*unrecognized arguments: --no-such-flag 3"):
        build("sglang", mesh, tiny())
    assert time.monotonic() - began < SOON


def test_a_sampler_that_the_user_names_draws_without_seeds_and_deterministic_kernels(mesh, monkeypatch):
    prompts, ids, model = Ragged.from_rows([torch.tensor([5, 6, 7])]), torch.arange(8), tiny()
    monkeypatch.setenv("DISTFLOW_SGLANG_FLAGS", "--sampling-backend pytorch")
    engine = build("sglang", mesh, model)
    try:
        first, second = (engine.generate(prompts, 8, ids, key=3) for _ in range(2))
    finally:
        engine.close()
    assert not engine.seeded
    assert first.tokens.values.tolist() != second.tokens.values.tolist()
    rows = [torch.cat([prompts.rows[0], row]) for row in first.tokens.rows]
    with torch.no_grad():
        known = [model(row[None]).logits[0, 2:-1].log_softmax(-1).gather(1, row[3:, None])[:, 0] for row in rows]
    assert float((torch.cat(known) - first.logprobs.values).abs().max()) < ROUNDING[4].most


def test_a_python_without_sglang_is_named_with_what_to_install(mesh, monkeypatch, tmp_path):
    for python in (tmp_path / "python", Path("/bin/false")):
        monkeypatch.setenv("DISTFLOW_SGLANG_PYTHON", str(python))
        with pytest.raises(EngineError, match=f"{python} has no SGLang.*pip install sglang"):
            build("sglang", mesh, tiny())


def test_an_unknown_version_is_named_with_those_that_were_tested(mesh, monkeypatch):
    monkeypatch.setattr(SGLangServer, "_version", lambda server: "7.1")
    monkeypatch.setenv("DISTFLOW_SGLANG_FLAGS", "--no-such-flag")
    with pytest.warns(UserWarning, match=r"SGLang 7\.1; distflow was tested with 0\.5\."), pytest.raises(EngineError):
        build("sglang", mesh, tiny())


@pytest.mark.parametrize(("path", "method"), [("/server_info", "GET"), ("/generate", "POST"),
                                              ("/update_weights_from_tensor", "POST"), ("/pause_generation", "POST"),
                                              ("/abort_request", "POST"), ("/release_memory_occupation", "POST")])
@pytest.mark.parametrize("key", [None, "Bearer wrong"])
def test_nobody_else_may_use_the_server(engine, path, method, key):
    connection = http.client.HTTPConnection("127.0.0.1", engine.server.port, timeout=SOON)
    headers = {"Content-Type": "application/json", **({"Authorization": key} if key else {})}
    connection.request(method, path, b"{}" if method == "POST" else None, headers)
    assert connection.getresponse().status == 401
    connection.close()


def test_the_key_is_on_no_command_line_and_the_server_listens_on_the_loopback_alone(engine):
    pids = group_of(engine.server.process.pid)
    assert len(pids) > 1
    for pid in pids:
        assert engine.server.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    port = f"{engine.server.port:04X}"
    listening = re.findall(rf"^ *\d+: ([0-9A-F]+):{port} \S+ 0A", Path("/proc/net/tcp").read_text(), re.MULTILINE)
    assert listening == ["0100007F"]


@pytest.mark.parametrize("victim", ["leader", "child"])
def test_a_server_that_dies_while_it_samples_is_an_error_and_no_hang(fresh, prompts, victim):
    leader = fresh.server.process.pid
    session, _ = sampling(fresh, prompts)
    children = sorted(group_of(leader) - {leader}, key=memory_of)
    os.kill(leader if victim == "leader" else children[-1], signal.SIGKILL)
    with pytest.raises(EngineError, match="SGLang"):
        go_on(session)
    with pytest.raises(EngineError, match="ended with signal"):
        fresh.check_health()
    fresh.close()
    require_gone(leader)


def _own_a_server(line):
    """In a process of its own: it is killed while it waits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    engine = build("sglang", init_device_mesh("cpu", (1,) * len(NAMES), mesh_dim_names=NAMES), tiny())
    line.send((engine.server.process.pid, engine.server.folder.name))
    line.recv()


def test_nothing_outlives_its_owner():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own_a_server, args=(theirs,), daemon=True)
    owner.start()
    assert ours.poll(10 * SOON)
    leader, folder = ours.recv()
    assert len(group_of(leader)) > 1
    files = left_by(leader, folder)
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    require_gone(leader)
    assert not [path for path in files if path.exists()]


def test_nothing_is_left_of_a_closed_engine(fresh):
    leader = fresh.server.process.pid
    files = left_by(leader, fresh.server.folder.name)
    assert len(group_of(leader)) > 1
    assert all(path.exists() for path in files)
    fresh.close()
    require_gone(leader)
    assert not [path for path in files if path.exists()]
    for use in (fresh.check_health, fresh.pause, fresh.sleep):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_rows_may_be_aborted_while_the_engine_is_paused(engine, model, prompts):
    prompts = lasting(model, prompts)
    rows = engine.rows(prompts, 1, torch.arange(len(prompts)))
    session = engine.session(key=1, temperature=0.0)
    for row in rows:
        session.add([row])
    slow_down(engine, 0.1)
    session.step()
    engine.pause()
    assert session.abort(rows[:1]) == rows[:1]
    assert len(rows[0].tokens) < LIMIT
    assert session.step() == []
    slow_down(engine, 0.0)
    engine.resume()
    until_done(session, rows[1:])
    for row in rows:
        assert row.tokens.tolist() == greedy_of(model, row.sequence)[: len(row.tokens)]


def test_new_weights_may_come_while_the_engine_is_paused(engine, model, prompts):
    session, rows = sampling(engine, prompts, limit=60)
    engine.pause()
    slow_down(engine, 0.0)
    engine.load(weights(changed(model)), version=5)
    assert session.step() == []
    engine.resume()
    until_done(session, rows)
    for row in rows:
        versions = row.versions.tolist()
        assert set(versions) == {0, 5}
        assert len(versions) == 60


def test_weights_come_in_several_buckets(engine, model, prompts, monkeypatch):
    monkeypatch.setattr(arrival, "BUCKET", 20_000)
    sizes = []
    seal = arrival.serialize_handles
    monkeypatch.setattr(arrival, "serialize_handles", lambda named: sizes.append(len(named)) or seal(named))
    engine.load(weights(changed(model)), version=1)
    assert len(sizes) > 3
    assert max(sizes) > 1
    require_greedy(engine, model, prompts)


def test_a_prompt_that_is_too_long_is_an_error(engine):
    session = engine.session(key=1)
    session.add([SampledRow(0, torch.full((300,), 7), 300, 5)])
    with pytest.raises(EngineError, match=r"(?i)long|length|context"):
        go_on(session)


def test_images_are_refused(engine):
    row = SampledRow(0, torch.tensor([5, 6]), 2, 5, images=Ragged.from_rows([torch.zeros(3)]))
    with pytest.raises(EngineError, match="rollout: hf"):
        engine.session(key=1).add([row])


def _sample_together(texts):
    """On each of two ranks that have one server."""
    prompts = Ragged.from_rows([torch.tensor(text) for text in texts])
    engine = build("sglang", init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES), tiny())
    try:
        model, results = tiny(), []
        for version in range(2):
            for temperature in (0.0, 0.8):
                samples = engine.generate(prompts, 2, torch.arange(2 * len(prompts)), 3, temperature)
                results.append([samples.tokens.values.tolist(), samples.logprobs.values.tolist()])
            size = engine.load(weights(changed(model)), version + 1)
            assert size == sum(each.nbytes for _, each in weights(model))
        session = engine.session(key=1)
        session.add(engine.rows(prompts, 1, torch.arange(len(prompts)), max_new_tokens=150))
        session.step()
        results.append([row.tokens.tolist() for row in session.abort()])
        engine.check_health()
        return engine.share.leads, results
    finally:
        engine.close()


def test_two_ranks_that_split_the_model_get_the_same(prompts, monkeypatch):
    monkeypatch.setattr(ranks, "_LIMIT", 10 * SOON)
    texts = [prompt.tolist() for prompt in prompts.rows]
    (leads, told), (follows, heard) = ranks.run_ranks(2, _sample_together, texts)
    assert leads
    assert not follows
    assert told == heard
    model = tiny()
    first = [greedy_of(model, prompt) for prompt in prompts.rows]
    changed(model)
    second = [greedy_of(model, prompt) for prompt in prompts.rows]
    assert first != second
    for greedy, (tokens, _) in zip((first, second), told[::2]):
        assert tokens == [token for row in greedy for _ in range(2) for token in row]


def test_a_run_by_torchrun_samples_what_it_trains(launch, workspace):
    """Two ranks with a server each, which know nothing of torchrun's group."""
    launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "run", "--set", "steps=2", "--set",
           "checkpoint.every=0", "--set", "roles.actor.rollout=sglang")
    for line in metrics_of(workspace / "runs/run").values():
        assert line["grad_norm"] > 0
        assert line["mismatch/logprob_max"] < ROUNDING[4].token
