"""The training API over real sockets: retries, restarts, and what is refused."""

import contextlib
import json
import math
import resource
import socket
import threading
from concurrent.futures import wait

import httpx
import numpy as np
import pytest

import distflow
from workers.endpoint.messages import RequestRefused
from workers.training_api import server
from workers.training_api.server import TrainingServer

ROW = {"prompt": [1, 2], "response": [3], "logprobs": [-0.5], "advantages": 1.0}

SAMPLED = {"tokens": [5], "logprobs": [-0.5], "text": "a", "finished": True}


class Scripted:
    """A run of one rank that counts what it is asked for; `held` calls are answered when `release` is set."""

    def __init__(self, folder, step=0):
        self.server = TrainingServer("127.0.0.1:0", folder, step, {"steps": 100})
        self.server.max_body = 10_485
        self.logprobs = [[-0.25]]
        self.step, self.seen, self.drawn, self.release = step, [], [], threading.Event()
        self.release.set()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while (call := self.server.calls.get()) is not None:
            self.seen.append(call.name)
            self.release.wait()
            if call.name == "forward_backward" and call.request.loss_fn == "none":
                call.refuse(RequestRefused("there is no loss `none`"))
            elif call.name == "optim_step":
                self.server.confirm(self.step)
                self.step += 1
                call.answer({"step": self.step, "metrics": {}, "forward_backward_calls": 1})
            elif call.name == "sample":
                self.drawn.append(call.request.sampled)
                call.answer([{"prompt": prompt, "sequences": [SAMPLED] * call.request.num_samples}
                             for prompt in call.request.prompts])
            else:
                call.answer({"logprobs": self.logprobs, "metrics": {"loss:sum": 0.25}})

    def die(self):
        """Answer nothing any more. The next one has another port, which its client finds in the run folder."""
        self.server.calls.put(None)


@pytest.fixture
def run(tmp_path):
    return Scripted(tmp_path)


@pytest.fixture
def client(run, tmp_path):
    made = distflow.training_client(tmp_path, seconds=30)
    yield made
    made.close()


def post(run, name, kind="application/json", **body):
    call = {"id": "a", "attempt": run.server.attempt, "step": run.step, **body}
    return httpx.post(f"{run.server.address}/v1/{name}", content=json.dumps(call), timeout=30, headers={
        "Authorization": f"Bearer {run.server.token}", "Content-Type": kind})


def test_training_server_trains_once_for_a_repeated_call(run):
    answers = [post(run, "forward_backward", data=[ROW], loss_fn="ppo").json() for _ in range(3)]
    assert answers == [{"logprobs": [[-0.25]], "metrics": {"loss:sum": 0.25}}] * 3
    late = {"id": "b", "attempt": run.server.attempt, "step": 0}
    assert [post(run, "optim_step", **late).json()["step"] for _ in range(2)] == [1, 1]
    assert run.seen == ["forward_backward", "optim_step"]
    other = post(run, "forward", data=[ROW], id="b", step=0)
    assert other.status_code == 400
    assert "the id b was of another call" in other.json()["error"]["message"]
    old = post(run, "forward_backward", data=[ROW], loss_fn="ppo", id="c", step=0)
    assert (old.status_code, old.json()["step"]) == (409, 1)
    assert "the run stands at step 1, and the call is of step 0" in old.json()["error"]["message"]


def test_training_server_shares_the_answer_of_a_call_in_progress(run):
    run.release.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(post(run, "forward_backward", data=[ROW], loss_fn="ppo")))
               for _ in range(3)]
    for each in threads:
        each.start()
    run.release.set()
    for each in threads:
        each.join()
    assert [each.status_code for each in found] == [200] * 3
    assert run.seen == ["forward_backward"]


@pytest.mark.parametrize(("name", "body", "words"), [
    ("forward_backwards", {}, "Did you mean `forward_backward`?"),
    ("forward_backward", {"data": [{**ROW, "adventages": 1.0}], "loss_fn": "ppo"}, "Did you mean `advantages`?"),
    ("forward_backward", {"data": [{**ROW, "response": ["a"]}], "loss_fn": "ppo"}, "`data[0].response[0]`"),
    ("forward_backward", {"data": [], "loss_fn": "ppo"}, "`data`: List should have at least 1 item"),
    ("optim_step", {"learning_rate": -1.0}, "`learning_rate`: Input should be greater than 0"),
    ("sample", {"prompts": ["a", "b"], "num_samples": 10**9}, "2000000000 rows are asked for"),
    ("sample", {"prompts": ["x" * 20_000]}, "a body may have 10485 bytes"),
])
def test_training_server_names_what_is_wrong_in_a_call(run, name, body, words):
    assert words in post(run, name, **body).json()["error"]["message"]
    assert not run.seen


def test_training_server_writes_null_for_numbers_that_are_not_finite(run, client):
    run.logprobs = [[-0.5, math.nan, -math.inf]]
    answer = json.loads(post(run, "forward", data=[ROW]).text, parse_constant=pytest.fail)
    assert answer["logprobs"] == [[-0.5, None, None]]
    assert client.forward([ROW]).result()[0][2] == -math.inf, "MessagePack has them"


def test_training_server_allocates_no_memory_for_announced_bodies(tmp_path):
    training = TrainingServer("127.0.0.1:0", tmp_path, 0, {})
    head = f"POST /v1/forward HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {training.token}\r\n" \
           f"Content-Length: {1 << 30}\r\nExpect: 100-continue\r\n\r\n"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", training.port)))
            sender.sendall(head.encode())
            assert sender.recv(100).startswith(b"HTTP/1.1 100"), "the body is being read"
            sender.sendall(bytes(1 << 16))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_training_server_needs_a_token_that_only_the_owner_reads(run, tmp_path):
    with pytest.raises(distflow.CallRefused, match=r"the token is not this run's"):
        distflow.training_client(run.server.address, "wrong")
    assert (tmp_path / "training_api.json").stat().st_mode & 0o777 == 0o600
    with socket.create_connection(("127.0.0.1", run.server.port)) as sender:
        sender.sendall(b"GET /v1/info HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert sender.recv(100).startswith(b"HTTP/1.1 401")


def test_training_client_sends_no_step_after_an_unread_failure(run, client):
    client.forward_backward([ROW], "ppo")
    refused = client.forward_backward([ROW], "none")
    wait([refused])  # over, and nothing has asked how it went
    late = client.optim_step()
    with pytest.raises(distflow.CallRefused, match="was not sent, since a call before it failed: .*no loss `none`"):
        late.result()
    client.forward_backward([ROW], "ppo")
    unsendable = client.forward_backward([{**ROW, "advantages": object()}], "ppo")
    assert isinstance(client.optim_step().exception(), distflow.CallRefused)
    assert isinstance(unsendable.exception(), TypeError)
    assert "optim_step" not in run.seen
    assert client.optim_step().result().step == 1, "what went wrong is known, and the step is the caller's"


def test_training_client_sends_numbers_of_arrays(run, client):
    client.forward_backward([{**ROW, "response": np.array([3]), "advantages": [np.float32(1.0)]}], "ppo").result()
    client.sample([[np.int64(1), 2]]).result()
    assert run.seen == ["forward_backward", "sample"]


def test_training_client_hears_of_a_restart_only_where_gradients_are_lost(run, client, tmp_path):
    client.forward_backward([ROW], "ppo").result()
    run.die()
    second = Scripted(tmp_path)
    assert second.server.token == run.server.token
    with pytest.raises(distflow.StepLost, match="the run stands at step 0: gradients") as lost:
        client.optim_step().result()
    assert lost.value.step == client.step == 0
    assert not second.seen, "no step without its gradient"
    second.die()
    third = Scripted(tmp_path)
    client.forward_backward([ROW], "ppo").result()
    assert third.seen == ["forward_backward"], "nothing was lost, and nothing needs to be sent again"


def test_training_client_continues_draws_after_a_restart(run, client, tmp_path):
    client.sample([[1], [2]], 3).result()
    run.die()
    second = Scripted(tmp_path)
    client.sample([[1]]).result()
    client.forward_backward([ROW], "ppo")
    client.optim_step().result()
    client.sample([[1]]).result()
    assert (run.drawn, second.drawn) == ([0], [6, 0])


def test_training_client_notices_a_step_of_another_client(run, client, tmp_path):
    other = distflow.training_client(tmp_path, seconds=30)
    other.forward_backward([ROW], "ppo")
    assert other.optim_step().result().step == 1
    with pytest.raises(distflow.StepLost, match="stands at step 1, and the call is of step 0"):
        client.load_state(0).result()
    assert client.step == 1
    assert "load_state" not in run.seen
    other.close()


def test_training_server_repeats_no_call_whose_answer_is_dropped(run, monkeypatch):
    size = len(post(run, "forward", data=[ROW], id="0").content)
    monkeypatch.setattr(server, "_KEPT_BYTES", 2 * size)
    kept = [post(run, "forward", data=[ROW], id=str(number)).status_code for number in range(4)]
    again = [post(run, "forward", data=[ROW], id=str(number)) for number in range(4)]
    assert kept == [200] * 4
    assert [each.status_code for each in again] == [410, 410, 200, 200]
    assert "its answer is not kept" in again[0].json()["error"]["message"]
    assert run.seen == ["forward"] * 4


def test_training_client_counts_a_step_with_a_lost_answer_once(run, client, tmp_path):
    client.forward_backward([ROW], "ppo").result()
    run.die()
    second = Scripted(tmp_path, step=1)
    assert client.optim_step().result() == (1, {}, 0)
    assert not second.seen
