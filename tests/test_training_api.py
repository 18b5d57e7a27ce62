"""A training loop in this process against ranks that serve its calls: learning, equal to one rank, through a death."""

import importlib.util
import os
import signal

import pytest
import torch
from harness import ROOT, environment, events_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import distflow
from distflow.telemetry import timeline

STEPS, MIRRORED, KILLED_IN = 12, 4, 2
SMALL = 3e-5
"""Learning rate of the mirrored steps: Adam makes steps of this size out of gradients that are nothing but rounding."""


def example():
    path = ROOT / "examples/notebook_loop/notebook_loop.py"
    spec = importlib.util.spec_from_file_location("notebook_loop", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Mirrored:
    """Client of a run of two ranks that kills one of its workers once, and sends what was trained to a run of one rank
    too: only steps that were taken, all rows in one call."""

    def __init__(self, run, other, victim):
        self.client, self.other, self.victim = distflow.training_client(run), distflow.training_client(other), victim
        self.rows, self.passes, self.prompts, self.sample = [], [], self.client.prompts, self.client.sample

    @property
    def step(self):
        return self.client.step

    def forward_backward(self, rows, loss_fn):
        half = len(rows) // 2
        self.rows, self.passes = rows, [self.client.forward_backward(part, loss_fn) for part in (
            rows[:half], rows[half:])]

    def optim_step(self):
        if self.step >= MIRRORED:
            return self.client.optim_step()
        if self.step == KILLED_IN and (process := self.victim()):
            self.passes[-1].result()  # the gradient is there, and goes with the worker
            os.kill(process, signal.SIGKILL)
        taken = self.client.optim_step(SMALL)
        done, ours = taken.result(), [each.result() for each in self.passes]
        whole = self.other.forward_backward(self.rows, "importance_sampling").result()
        same = [logprob for part in ours for row in part.logprobs for logprob in row]
        assert same == pytest.approx([logprob for row in whole.logprobs for logprob in row], abs=1e-5)
        losses = [part.metrics["loss:sum"] for part in (*ours, whole)]
        assert losses[0] + losses[1] == pytest.approx(losses[2], abs=1e-5 * len(same))
        theirs, mine = (each.metrics for each in (self.other.optim_step(SMALL).result(), done))
        assert theirs == pytest.approx(mine, rel=1e-5)
        assert self.client.save_state().result() == self.other.save_state().result() == self.step
        return taken


def weights_of(folder, step, place):
    dcp_to_torch_save(folder / f"checkpoints/step-{step:08d}", place)
    return torch.load(place, weights_only=True)["actor"]["model"]


@pytest.mark.run
def test_a_loop_learns_as_one_rank_would_though_a_worker_dies(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    shared = {"training_api": "localhost", "steps": STEPS, "roles.actor.learning_rate": 1e-2, "data.batch": 8}
    two, one = (distflow.run("grpo.yaml", "tiny.yaml", ranks=ranks, name=f"of-{ranks}", set=shared, quiet=True)
                for ranks in (2, 1))
    victims = [1]

    def victim():
        ready = events_of(two.folder)
        rank = victims.pop() if victims else None
        return next((each["pid"] for each in ready if each["event"] == "worker_ready" and each["rank"] == rank), None)

    client = Mirrored(two, one, victim)
    means = example().train(client, STEPS, lambda text, answer: sum(map(str.islower, text)) / max(len(text), 1))
    assert len(means) == STEPS
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.05
    one.stop()
    two.wait(120)
    ours, theirs = (weights_of(run.folder, MIRRORED, workspace / "weights.pt") for run in (two, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=0)
    assert not victims
    assert "state_restored" in set(two.events["event"])
    assert "was stopped after step 4" in "".join(one._output)
    with pytest.raises(distflow.CallRefused, match="has made its 12 steps"):
        client.client.optim_step().result()


@pytest.mark.run
def test_a_reference_follows_what_is_learnt_and_not_what_is_loaded(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    run = distflow.run("grpo.yaml", "tiny.yaml", ranks=1, name="follows", quiet=True, set={
        "training_api": "localhost", "steps": 4, "roles.actor.learning_rate": 1e-2,
        "roles.reference.follow": {"every": 1, "mix": 0.5}})
    client = distflow.training_client(run)
    row = {"prompt": client.prompts()[0].tokens, "response": [5, 6, 7]}
    seen = []
    for step in (1, 2, 3):
        if step < 3:
            client.forward_backward([row], "cross_entropy")
            client.optim_step().result()
            client.save_state().result()
        else:
            client.load_state(1).result()
        seen.append(client.forward([row], role="reference").result())
    client.forward_backward([row], "cross_entropy")
    client.optim_step().result()
    run.wait(120)
    assert seen[0] != seen[1]
    assert seen[2] == seen[0], "the reference of the checkpoint"
    spans = [span for span in timeline.read(run.folder).spans if span.name == "follow"]
    assert [(span.track, span.step, span.facts["role"]) for span in spans] == [
        (timeline.WEIGHTS, step, "reference") for step in (1, 2, 4)]
