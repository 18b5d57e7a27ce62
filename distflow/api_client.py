"""Client of the training API: a training loop of one's own against a running group of ranks.

    client = distflow.training_client("runs/notebook")
    client.forward_backward(rows, "importance_sampling")
    client.optim_step().result()

Each call returns a future at once, and calls are made in their order. One that fails makes all fail that are submitted
before its failure is read from a future, so that no step is taken without the gradient that it was meant for. Names are
those of Thinking Machines' Tinker.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgpack

from distflow.errors import DistflowError

_PACKED = "application/msgpack"
_PAUSE = 0.2  # seconds before a call is sent again
_READ_SECONDS = 60.0  # the server answers, or says that it is at work, within 20 s
_UPDATES = ("optim_step", "load_state")  # each ends a step


class CallRefused(DistflowError):
    """A call that the run refuses, with the reason. Nothing has changed, unless the gradient was not finite: it is gone
    then."""


class StepLost(DistflowError):
    """A worker of the run died, and gradients that were not applied are lost. The run stands at `step`: send again all
    that belongs to this step."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class _StepMoved(Exception):
    """The run stands at another step, or has another worker, than the client believed."""

    def __init__(self, message: str, step: int, attempt: str):
        super().__init__(message)
        self.step, self.attempt = step, attempt


class DataPrompt(NamedTuple):
    tokens: list[int]
    question: str
    answer: str
    columns: dict[str, str]  # further fields of the record (`data.columns`)


class SampledSequence(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finished: bool  # False: cut off at the limit

    def row(self, **more: Any) -> dict[str, Any]:
        """Return a row to train on, with `advantages` for example."""
        return {"prompt": self.prompt, "response": self.tokens, "logprobs": self.logprobs, **more}


class ForwardBackwardOutput(NamedTuple):
    logprobs: list[list[float]]  # of each row's response tokens
    metrics: dict[str, float]


class OptimStepOutput(NamedTuple):
    step: int  # that the run stands at now
    metrics: dict[str, float]  # empty where the answer was lost with the worker, after the step was taken
    forward_backward_calls: int


def training_client(run: Any, token: str | None = None, *, seconds: float = 600.0) -> TrainingClient:
    """Return a client of a run that was started with `training_api`.

    Args:
        run: its folder, or what `distflow.run` returns; or the address, as "http://127.0.0.1:8000", and its `token`.
        seconds: how long a call is sent again where the run does not answer, as while a worker starts again.

    Raises:
        CallRefused: the token is not the run's.
        TimeoutError: no run answers.
    """
    return TrainingClient(getattr(run, "folder", run), token, seconds)


class _Pending(Future[Any]):
    """Future of a call, which says of a failure that it was read. `failures`: how many there were with this one."""

    def __init__(self, client: TrainingClient):
        super().__init__()
        self._client, self.failures = client, 0

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if error is not None:
            self._client.failures_read = max(self._client.failures_read, self.failures)
        return error

    def settle(self, made: Future[Any]) -> None:
        if error := made.exception():
            self.set_exception(error)
        elif not self.cancelled():
            self.set_result(made.result())


class TrainingClient:
    """Client of one run; thread-safe. `step`: how many optimizer steps the run has made, as far as is known here."""

    def __init__(self, run: str | Path, token: str | None, seconds: float):
        self._folder = None if token is not None else Path(run)
        self._address, self._token, self._seconds = str(run), token or "", seconds
        self._http = httpx.Client(timeout=httpx.Timeout(_READ_SECONDS, connect=5.0))
        self._sender = ThreadPoolExecutor(1, "training client")
        self._failures = self.failures_read = 0  # what was submitted before a failure was read is not sent after it
        self._session = uuid.uuid4().hex
        self._sampled = 0  # rows sampled in this step
        self._trained = False  # whether the run has a gradient of this client's that is not applied
        self._failed: _Pending | None = None
        info = self._reach("GET", "info", b"", time.monotonic() + seconds)
        self.info: dict[str, Any] = info
        self.step, self._attempt = int(info["step"]), str(info["attempt"])

    def __repr__(self) -> str:
        return f"<training client of {self._address}, step {self.step}>"

    def get_info(self) -> dict[str, Any]:
        """Return the run's step, model, roles, losses and limits, and how many passes are not applied."""
        return self._reach("GET", "info", b"", time.monotonic() + self._seconds)

    def forward_backward(self, data: Iterable[Mapping[str, Any]], loss_fn: str,
                         loss_fn_config: Mapping[str, float] | None = None) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss, summed over tokens, to that which the next `optim_step` applies.

        Args:
            data: rows with `prompt` and `response`, token ids; and for each response token, or one for all of them,
                `weights` (default 1), `advantages` and `logprobs`, those of the policy that sampled.
            loss_fn: a name of `info["loss_fns"]`.
        """
        return self._submit("forward_backward", lambda found: ForwardBackwardOutput(**found), data=_rows(data),
                            loss_fn=loss_fn, loss_fn_config=dict(loss_fn_config or {}))

    def forward(self, data: Iterable[Mapping[str, Any]], role: str | None = None) -> Future[list[list[float]]]:
        """Return the log-probabilities of the rows' response tokens under a role's model, by default the trained."""
        return self._submit("forward", lambda found: found["logprobs"], data=_rows(data), role=role)

    def optim_step(self, learning_rate: float | None = None) -> Future[OptimStepOutput]:
        """Apply the gradient, by default at the learning rate of the run's schedule. Ends a step of the run."""
        return self._submit("optim_step", lambda found: OptimStepOutput(
            found["step"], found.get("metrics", {}), found.get("forward_backward_calls", 0)),
            learning_rate=learning_rate)

    def zero_grad(self) -> Future[int]:
        """Discard the gradient that is not applied, another client's too; return how many passes it was of."""
        return self._submit("zero_grad", lambda found: found["forward_backward_calls"])

    def sample(self, prompts: Sequence[str | Sequence[int] | DataPrompt], num_samples: int = 1,
               max_tokens: int | None = None, greedy: bool = False) -> Future[list[list[SampledSequence]]]:
        """Return `num_samples` responses to each prompt, sampled with the newest weights as the run's `generation`
        says. A text is a question by the model's chat template."""
        asked = [each.tokens if isinstance(each, DataPrompt) else _plain(each) for each in prompts]
        return self._submit("sample", lambda found: [
            [SampledSequence(group["prompt"], **each) for each in group["sequences"]] for group in found],
            prompts=asked, num_samples=num_samples, max_tokens=max_tokens, greedy=greedy)

    def prompts(self) -> list[DataPrompt]:
        """Return the step's prompts of the run's data: the same ones until the step is over."""
        return self._submit("prompts", lambda found: [
            DataPrompt(each.pop("tokens"), each.pop("question"), each.pop("answer"), each) for each in found]).result()

    def save_state(self) -> Future[int]:
        """Write a checkpoint of the step, and return its number. `--resume` goes on from it bit for bit."""
        return self._submit("save_state", lambda found: found["checkpoint"])

    def load_state(self, checkpoint: int | None = None) -> Future[OptimStepOutput]:
        """Load weights and optimizer of a checkpoint of the run, by default the newest. Ends a step of the run."""
        return self._submit("load_state", lambda found: OptimStepOutput(found["step"], {}, 0), checkpoint=checkpoint)

    def close(self) -> None:
        """End the connection, after the calls that are under way."""
        self._sender.shutdown()
        self._http.close()

    def _submit(self, name: str, read: Any, **arguments: Any) -> Future[Any]:
        pending = _Pending(self)
        made = self._sender.submit(self._call, pending, self.failures_read, name, read, arguments)
        made.add_done_callback(pending.settle)
        return pending

    def _call(self, pending: _Pending, failures_read: int, name: str, read: Any, arguments: dict[str, Any]) -> Any:
        """Make a call, in the sender's thread, which alone changes `step`."""
        if not pending.set_running_or_notify_cancel():
            return None
        if failures_read < self._failures and self._failed:
            pending.failures, failure = self._failures, Future.exception(self._failed)
            raise StepLost(str(failure), self.step) if isinstance(failure, StepLost) else \
                CallRefused(f"`{name}` was not sent, since a call before it failed: {failure}")
        self._failures += 1  # until it has succeeded: whatever is raised counts
        self._failed, pending.failures = pending, self._failures
        found = self._answered(name, arguments)
        if name == "forward_backward":
            self._trained = True
        elif name in _UPDATES:
            self._stand_at(int(found["step"]))
        elif name == "zero_grad":
            self._trained = False
        elif name == "sample":
            self._sampled += sum(len(group["sequences"]) for group in found)
        result = read(found)
        self._failures -= 1
        return result

    def _stand_at(self, step: int) -> None:
        if step != self.step:
            self._sampled = 0
        self.step, self._trained = step, False

    def _answered(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the answer to a call. Raises StepLost: the gradient that it belongs to is lost."""
        if self.step >= self.info["steps"]:
            raise CallRefused(f"the run has made its {self.step} steps, and ends. Start it with more:  --set steps=N")
        id, until = uuid.uuid4().hex, time.monotonic() + self._seconds
        while True:
            sent = self._attempt
            body = {"id": id, "session": self._session, "attempt": sent, "step": self.step, **arguments}
            if name == "sample":
                body["sampled"] = self._sampled
            try:
                return self._reach("POST", name, msgpack.packb(body) or b"", until)
            except _StepMoved as error:
                self._attempt = error.attempt
                if error.step == self.step and (not self._trained or name == "zero_grad"):
                    continue  # the new worker has all that this call builds on
                if name in _UPDATES and error.step == self.step + 1 and error.attempt != sent:
                    return {"step": error.step}  # it was done, and its answer was lost with the worker
                self._stand_at(error.step)
                raise StepLost(f"`{name}`: {error}. Send again all that belongs to step {error.step}",
                               error.step) from None

    def _reach(self, method: str, name: str, body: bytes, until: float) -> Any:
        """Send a request until it is answered, to wherever the run is."""
        why = ""
        while time.monotonic() < until:
            try:
                reply = self._http.request(method, f"{self._place()}/v1/{name}", content=body, headers={
                    "Authorization": f"Bearer {self._token}", "Content-Type": _PACKED})
            except (httpx.TransportError, OSError) as error:
                why = str(error)
                time.sleep(_PAUSE)
                continue
            if reply.status_code == httpx.codes.ACCEPTED:
                until = time.monotonic() + self._seconds  # it is at work
            elif reply.status_code == httpx.codes.GATEWAY_TIMEOUT:
                why = "the body came too slowly"
            elif reply.status_code == httpx.codes.OK:
                return msgpack.unpackb(reply.content, strict_map_key=False)
            elif reply.status_code == httpx.codes.CONFLICT:
                found = reply.json()
                raise _StepMoved(found["error"]["message"], int(found["step"]), str(found["attempt"]))
            else:
                raise CallRefused(f"`{name}`: {_reason(reply)}")
        raise TimeoutError(f"no run has answered `{name}` at {self._address} for {self._seconds:g} s ({why}). Was it "
                           "started with  --set training_api=localhost , and is it going on?")

    def _place(self) -> str:
        if self._folder is not None:  # another worker may have another address
            found = json.loads((self._folder / "training_api.json").read_text())
            self._address, self._token = found["url"], found["token"]
        return self._address.rstrip("/")


def _reason(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {reply.status_code}: {reply.text[:200]}"


def _rows(data: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for row in data]


def _plain(value: Any) -> Any:
    """Return numbers as Python's, where they are an array's or a tensor's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
