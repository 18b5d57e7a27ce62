"""Two ranks with an engine each, of which one follows: real processes, a real store, weights that are pulled."""

from __future__ import annotations

import contextlib
import datetime
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engines.rollouts import build, tiny
from ranks import run_ranks
from stores import client, hosted
from torch.distributed.device_mesh import init_device_mesh

from distflow.data.batch import Ragged
from distflow.errors import RankMissing
from distflow.weights.publisher import Publisher
from distflow.weights.puller import Puller
from workers.engines.devices import NAMES
from workers.engines.sampling import TokenLimits
from workers.engines.shared_engine import SharedEngine
from workers.engines.tp_leader import TPFollowerEngine, TPLeader
from workers.engines.weight_updates import WeightUpdates
from workers.overlap import ColocatedSampling
from workers.weight_sync import load_if_newer

TOKEN = b"t" * 32
PROMPTS = [7, 2, 30]


def weights(version: int) -> dict:
    return {name: parameter.data * (1 + version / 10) for name, parameter in tiny().named_parameters()}


def engine_here():
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1, 1, 1), mesh_dim_names=NAMES)
    return build("hf", mesh, tiny())


def updates_here(port: int) -> WeightUpdates:
    store = client(port)
    return WeightUpdates(Puller(store, TOKEN, f"rollout {dist.get_rank()}"), 0)


def told(row) -> tuple:
    return row.id, row.tokens.tolist(), row.versions.tolist(), row.finished


class Seen:
    """An engine whose ended rows are written down."""

    def __init__(self, engine):
        self.engine, self.rows = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def session(self, *given):
        session = self.engine.session(*given)
        for name in ("step", "abort"):
            setattr(session, name, functools.partial(self._note, getattr(session, name)))
        return session

    def _note(self, act, *given):
        rows = act(*given)
        self.rows += map(told, rows)
        return rows


class Led(TPLeader):
    """One whose sessions can be looked at."""

    def __init__(self, engine):
        super().__init__(engine)
        self.led = []

    def session(self, *given):
        self.led.append(super().session(*given))
        return self.led[-1]


def talk(leader: TPLeader) -> None:
    """All that can be asked of a session: rows that end, go on, are broken off and begin again."""
    prompts = Ragged.from_rows([torch.arange(9, 9 + length) for length in PROMPTS])
    leader.generate(prompts, 2, torch.arange(6), key=5)
    narrow = leader.generate(prompts, 2, torch.arange(6), key=5, limits=TokenLimits(1, 1.0, 0.0))
    assert all(torch.equal(*narrow.tokens.rows[begin : begin + 2]) for begin in (0, 2, 4))
    greedy, kept = leader.session(3, 0.0), leader.session(4, 1.0, True)
    rows = leader.rows(prompts, 2, torch.arange(10, 16), max_new_tokens=6)
    for begin in range(0, 6, 2):
        (greedy if begin else kept).add(rows[begin : begin + 2])
    while kept.busy:
        kept.step()
    kept.extend(rows[0], torch.arange(20, 25), 4)
    kept.forget(rows[1])
    kept.step()
    again = greedy.abort(rows[2:4])
    greedy.add(again)
    for session in (greedy, kept):
        while session.busy:
            session.step()
    kept.forget(rows[0])
    kept.forget(leader.rows(prompts, 2, torch.arange(20, 26), max_new_tokens=6)[0])  # one that was never added


def lead_or_follow(trainer: int) -> tuple[list, int, int]:
    """On each rank: what its engine sampled, rows that it still knows, and the version it has in the end."""
    engine, updates = Seen(engine_here()), updates_here(trainer)
    if dist.get_rank() > 0:
        follower = TPFollowerEngine(engine, updates)
        follower.run()
        left = sum(len(session.rows) for session in follower.sessions)
    else:
        leader = Led(engine)
        talk(leader)
        stream = SharedEngine(leader, functools.partial(load_if_newer, updates))
        store = client(trainer)
        publisher = Publisher(store, TOKEN, rank=0, ranks=1)
        for version in (1, 2):
            publisher.publish(version, weights(version))
            while leader.version < version:
                stream.renew(stream)
            talk(leader)
        leader.release_followers()
        publisher.close()
        left = sum(len(session.numbers) for session in leader.led)
    updates.close()
    return engine.rows, left, engine.version


def test_tp_followers_repeat_their_leader():
    store = hosted()
    (first, known, version), (second, left, same) = run_ranks(2, lead_or_follow, store.port)
    assert first == second
    assert len(first) == 3 * (6 + 6 + 6 + 1 + 2)
    assert {version for _, _, versions, _ in first for version in versions} == {0, 1, 2}
    assert version == same == 2
    assert known == left == 0, "a row that nobody asks for any more is kept"


def left_alone() -> list[str]:
    """The first rank does something else; what the other one says of it."""
    share, _ = dist.new_subgroups(2, backend="gloo", timeout=datetime.timedelta(seconds=1))
    notes = []
    if dist.get_rank() == 1:
        swap = SimpleNamespace(sampling=lambda: contextlib.nullcontext(None))
        with pytest.raises(RankMissing) as error:
            ColocatedSampling({"actor": swap}, None, share, enough=0, limit=60.0).run(0, lambda: False)
        notes = error.value.__notes__
    dist.barrier()
    return notes


def test_tp_follower_names_the_leader_that_left():
    _, notes = run_ranks(2, left_alone)
    assert any(note.startswith("rank 0 takes prompts for this one") for note in notes)


class Ahead:
    """The weights that a rank has pulled."""

    def __init__(self, key: str):
        self.key, self.version, self.dropped = key, int(key.partition(".")[0] or 0), False

    def pulled_weights(self):
        return self if self.key and not self.dropped else None

    def drop(self):
        self.dropped = True

    def load_into(self, engine):
        engine.load(self.tensors(), self.version)

    def mark_loaded(self):
        self.key = ""

    def tensors(self):
        return iter(())


def disagree(leads: str, follows: str) -> tuple[int, bool]:
    """One look for weights, by two ranks that have pulled different ones."""
    engine, ahead = engine_here(), Ahead((leads, follows)[dist.get_rank()])
    if dist.get_rank() > 0:
        TPFollowerEngine(engine, ahead).run()
    else:
        leader = TPLeader(engine)
        leader.last_broadcast = 0.0  # so that a look without weights is broadcast too
        load_if_newer(ahead, SharedEngine(leader))
        leader.release_followers()
    return engine.version, ahead.dropped


@pytest.mark.parametrize(("leads", "follows", "loaded", "dropped"), [
    ("3.a", "3.a", 3, False), ("3.a", "4.a", 0, True), ("4.a", "3.a", 0, True), ("3.a", "3.b", 0, True),
    ("3.a", "", 0, False), ("", "3.a", 0, False)])
def test_tp_leader_loads_weights_that_all_ranks_have(leads, follows, loaded, dropped):
    """Ranks with unlike ones give them up, and pull the newest: a trainer may have published a number again."""
    found = run_ranks(2, disagree, leads, follows)
    assert [version for version, _ in found] == [loaded, loaded]
    assert [gone for _, gone in found] == [dropped, dropped]
