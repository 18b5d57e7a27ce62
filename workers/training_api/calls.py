"""Answers the calls of a training client on all ranks alike.

Rank 0 checks a call and refuses what is wrong with it before any other rank has heard of it. Then all ranks get the
same call, each computes its share of the rows, and rank 0 answers. A rank that fails ends the attempt, as in any run.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distflow.config.robust import Phase
from distflow.data.assignment import assign
from distflow.data.batch import Batch, Ragged, decode_text
from distflow.data.exchange import gather_values, pack, peer_errors, unpack
from distflow.data.problems import asked_messages
from distflow.errors import CheckpointError, EngineError, InvalidInput, did_you_mean
from distflow.plan import Layout
from distflow.recovery.checkpoint_files import checkpoint_of, complete_checkpoints, step_of
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import current
from workers.endpoint.messages import RequestRefused
from workers.engines.chat import prompt_tokens
from workers.train_context import TrainContext
from workers.training_api.losses import LOSSES, TokenLoss, check_loss, needs_policy
from workers.training_api.requests import (
    UPDATES,
    Forward,
    ForwardBackward,
    LoadState,
    OptimStep,
    Prompts,
    Sample,
    TrainingRow,
    ZeroGrad,
)

if TYPE_CHECKING:
    from workers.training_api.server import TrainingCall

_TICK = 1.0  # seconds between two looks at whether the run is to stop, while there is no call
_PHASES: dict[str, Phase] = {"forward_backward": "training", "optim_step": "training", "sample": "generating",
                             "forward": "inference"}
_WAITING = "waiting for a call of the training client"


class TrainingCalls:
    """Answers calls on one rank. Collective but for what rank 0 does before a call is passed on."""

    def __init__(self, ctx: TrainContext):
        self.ctx, self.name = ctx, ctx.prompted
        self.role = ctx.roles[ctx.prompted]
        self.passes = self.sampled = 0  # calls of forward_backward, and rows sampled, in this step
        self.session = ""  # of the client whose passes these are; on rank 0
        self.update: tuple[TrainingCall, Any] | None = None  # call that has ended the step, with its result; on rank 0
        self.server = None
        for layout in (ctx.plan.layout_of(role, False) for role in ctx.roles):
            if len(layout.active_ranks) != ctx.plan.ranks:
                raise InvalidInput("the training API computes on all ranks, and `layouts` of the run file leaves some "
                                   f"out: {layout}. Take it out")
        if ctx.rank == 0:
            settings = ctx.spec.run.training_api
            assert settings is not None
            from workers.training_api.server import TrainingServer  # loads an HTTP server: only such a run pays for it

            self.server = TrainingServer(settings, ctx.context.path, ctx.first_step, self._facts())
            print(f"training API: {self.server.address}  (its token is in {ctx.context.path / 'training_api.json'})",
                  flush=True)

    def _facts(self) -> dict[str, Any]:
        generation, model = self.role.settings.generation, self.ctx.spec.model_of(self.name)
        return {"role": self.name, "roles": [*self.ctx.roles], "model": model.path if model else None,
                "vocab_size": len(self.role.tokenizer), "steps": self.ctx.spec.run.steps, "loss_fns": LOSSES,
                "max_tokens": generation.max_new_tokens, "temperature": generation.temperature}

    def until_update(self, step: int) -> bool:
        """Answer calls until one changes the weights. Return False, on all ranks alike, if the run is stopping."""
        self.passes = self.sampled = 0
        for role in self.ctx.roles.values():
            role.draw = step
        self.ctx.status.set(_WAITING)
        while True:
            call, name, arguments, stops = self._next()
            if stops:
                self.ctx.stopping = True
                return False
            if name and self._answered(call, name, arguments):
                self.ctx.loader.position += self.ctx.loader.batch
                return True

    def confirm(self, step: int) -> None:
        """Answer the call that has ended a step, once what the step leaves is written."""
        if self.server and self.update:
            self.server.confirm(step)
            call, result = self.update
            call.answer({**result, "step": step + 1})
            self.update = None

    def _next(self) -> tuple[TrainingCall | None, str, Any, bool]:
        """Return the next call, its name and arguments, and whether the run is to stop; no call after a while."""
        call, message = self._taken() if self.server else (None, b"")
        stop = heartbeat.current().page.stop == heartbeat.ASKED
        head = torch.tensor([len(message), int(stop)])
        with peer_errors():
            dist.all_reduce(head)
            size, stops = head.tolist()
            if size:
                body = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else \
                    torch.empty(size, dtype=torch.uint8)
                dist.broadcast(body, 0)
                message = body.numpy().tobytes()
        heartbeat.current().tick()
        if stops and call:
            call.refuse(RequestRefused("the run is being stopped", "stopping", 503))
        name, arguments = unpack(message) if size else ("", None)
        return call, name, arguments, bool(stops)

    def _taken(self) -> tuple[TrainingCall | None, bytes]:
        """Return a call that can be answered, and its message to the other ranks."""
        assert self.server
        with contextlib.suppress(queue.Empty):
            call = self.server.calls.get(timeout=_TICK)
            try:
                self.server.check_standing(call.request)
                arguments = self._checked(call)
            except RequestRefused as error:
                call.refuse(error)
            else:
                if arguments is not None:
                    return call, pack([call.name, arguments])
        return None, b""

    def _answered(self, call: TrainingCall | None, name: str, arguments: Any) -> bool:
        """Answer a call; return whether it has ended the step."""
        self.ctx.status.set(f"answering `{name}`", _PHASES.get(name, "saving"))
        try:
            result = getattr(self, f"_{name}")(arguments)
        except (_Rejected, CheckpointError) as error:
            self.ctx.status.set(_WAITING)
            if call:
                call.refuse(RequestRefused(str(error), "failed", 422))
            return False
        finally:
            if self.server:
                self.server.passes = self.passes
        if name in UPDATES:
            self.ctx.learnt = name == "optim_step"
            self.update = (call, result) if call else None
            return True
        self.ctx.status.set(_WAITING)
        if call:
            call.answer(result)
        return False

    # What rank 0 checks. Each returns the arguments that all ranks get; None: rank 0 has answered by itself.

    def _checked(self, call: TrainingCall) -> Any:
        builds_on = isinstance(call.request, ForwardBackward | OptimStep)
        if self.passes and builds_on and call.request.session != self.session:
            raise RequestRefused(f"the gradient of {self.passes} calls of forward_backward of another client is not "
                                 "applied: discard it with  zero_grad , and send your own again")
        match request := call.request:
            case ForwardBackward():
                return self._checked_pass(request)
            case Forward():
                if request.role is not None and request.role not in self.ctx.roles:
                    raise RequestRefused(f"there is no role `{request.role}` with a model. "
                                         f"{did_you_mean(request.role, self.ctx.roles, 'Roles')}")
                self._check_head(request.role or self.name)
                self._check_rows(request.data)
                return [request.role or self.name, *_columns(request.data)]
            case OptimStep():
                if not self.passes:
                    raise RequestRefused("there is no gradient: call forward_backward before optim_step")
                return [request.learning_rate]
            case Sample():
                return self._checked_sample(request)
            case ZeroGrad():
                return []
            case Prompts():
                call.answer(self._prompts())
                return None
        if self.passes:
            raise RequestRefused(f"the gradient of {self.passes} calls of forward_backward is not applied, and no "
                                 f"checkpoint has it: call optim_step or zero_grad before {call.name}")
        return self._checkpoint_of(request) if isinstance(request, LoadState) else []

    def _checked_pass(self, request: ForwardBackward) -> Any:
        check_loss(request.loss_fn, request.loss_fn_config)
        self._check_rows(request.data, needs_policy(request.loss_fn) and request.loss_fn)
        if self.passes and not self.role.engine.accumulates:
            raise RequestRefused("this engine sums gradients over ranks in each pass, and cannot add another: send all "
                                 "rows of a step in one forward_backward")
        if not self.passes:
            self.session = request.session
        for index, row in enumerate(request.data):
            if row.advantages is not None and not needs_policy(request.loss_fn):
                raise RequestRefused(f"`data[{index}].advantages` has no effect in the loss `{request.loss_fn}`: give "
                                     "`weights`, or take another loss")
        return [request.loss_fn, request.loss_fn_config, *_columns(request.data),
                [_per_token(row.weights, row) for row in request.data],
                [_per_token(0.0 if row.advantages is None else row.advantages, row) for row in request.data],
                [row.logprobs or [0.0] * len(row.response) for row in request.data]]

    def _check_head(self, role: str) -> None:
        if self.ctx.roles[role].head != "lm":
            able = [name for name, each in self.ctx.roles.items() if each.head == "lm"]
            raise RequestRefused(f"role `{role}` has a {self.ctx.roles[role].head} head, and gives no "
                                 f"log-probabilities. Roles that do: {', '.join(able)}")

    def _check_rows(self, rows: Sequence[TrainingRow], policy_loss: str | bool = False) -> None:
        for index, row in enumerate(rows):
            self._check_tokens(f"data[{index}].prompt", row.prompt)
            self._check_tokens(f"data[{index}].response", row.response, len(row.prompt))
            for name in ("weights", "advantages", "logprobs"):
                values = getattr(row, name)
                if policy_loss and values is None:
                    raise RequestRefused(f"`data[{index}].{name}` is missing, and the loss `{policy_loss}` needs it")
                if isinstance(values, list) and len(values) != len(row.response):
                    raise RequestRefused(f"`data[{index}].{name}` has {len(values)} numbers, and the response "
                                         f"{len(row.response)} tokens: give one for each token")

    def _check_tokens(self, where: str, tokens: list[int], before: int = 0) -> None:
        size, longest = len(self.role.tokenizer), self._positions
        if (highest := max(tokens)) >= size:
            raise RequestRefused(f"`{where}` has the token {highest}, and the vocabulary {size}")
        if longest and before + len(tokens) > longest:
            raise RequestRefused(f"`{where}` ends at token {before + len(tokens)}, and the model was made for "
                                 f"{longest}")

    @property
    def _positions(self) -> int | None:
        return getattr(self.role.config.get_text_config(), "max_position_embeddings", None)

    def _checked_sample(self, request: Sample) -> Any:
        if self.role.rollout is None:
            raise RequestRefused(f"role `{self.name}` has no engine that samples, since no node of the DAG "
                                 f"`{self.ctx.spec.dag.name}` does. Start the run with a DAG that samples, as grpo")
        if self.passes and not self.role.engine.accumulates:
            raise RequestRefused("a gradient is not applied, and this engine loses it where it samples: call "
                                 "optim_step or zero_grad before sample")
        limit = self.role.settings.generation.max_new_tokens
        if (request.max_tokens or 0) > limit:
            raise RequestRefused(f"`max_tokens` is {request.max_tokens}, and the run's generation.max_new_tokens is "
                                 f"{limit}")
        prompts = [self._encoded(each) if isinstance(each, str) else each for each in request.prompts]
        for index, prompt in enumerate(prompts):
            self._check_tokens(f"prompts[{index}]", prompt)
            self._check_tokens(f"prompts[{index}] with max_tokens", prompt[:1], len(prompt) - 1 +
                               (request.max_tokens or limit))
        return [prompts, request.num_samples, request.max_tokens, request.greedy, max(self.sampled, request.sampled)]

    def _encoded(self, question: str) -> list[int]:
        data = self.ctx.spec.run.data
        tokens = prompt_tokens(self.role.tokenizer, asked_messages(question, data), None, **data.chat_template_kwargs)
        if len(tokens) > data.max_prompt_tokens:
            raise RequestRefused(f"a prompt has {len(tokens)} tokens, and data.max_prompt_tokens is "
                                 f"{data.max_prompt_tokens}: {question[:60]!r}…")
        return tokens

    def _prompts(self) -> list[dict[str, Any]]:
        """Return the prompts of the run's data that a DAG's run would take in this step."""
        source = self.ctx.loader
        batch = source.at(torch.arange(source.position, source.position + source.batch))
        texts = {name: decode_text(column) for name, column in batch.columns.items()
                 if isinstance(column, Ragged) and isinstance(column.values, torch.Tensor)
                 and column.values.dtype == torch.uint8}
        return [{"tokens": tokens.tolist(), "question": question, "answer": answer,
                 **{name: values[index] for name, values in texts.items() if name not in ("questions", "answers")}}
                for index, (tokens, question, answer) in enumerate(zip(
                    batch["prompts"].rows, texts["questions"], texts["answers"]))]

    def _checkpoint_of(self, request: LoadState) -> int:
        there = [step_of(each) for each in complete_checkpoints(self.ctx.state.folder)]
        if request.checkpoint is None and there:
            return there[-1]
        if request.checkpoint not in there:
            raise RequestRefused(f"there is no checkpoint of step {request.checkpoint}. Complete ones: "
                                 f"{', '.join(map(str, there)) or 'none'}; `checkpoint.keep` says how many stay")
        return request.checkpoint

    # What all ranks do.

    def _forward_backward(self, arguments: Any) -> Any:
        name, settings, prompts, responses, weights, advantages, logprobs = arguments
        layout, mine = self._share(self.name, [len(a) + len(b) for a, b in zip(prompts, responses)])
        tokens = _ragged([responses[row] for row in mine])
        weight = _ragged([weights[row] for row in mine], torch.float32)
        batch = Batch(torch.tensor(mine, dtype=torch.int64), {
            "prompts": _ragged([prompts[row] for row in mine]), "responses": tokens, "weights": weight,
            "mask": tokens.with_values(weight.values != 0),
            "advantages": _ragged([advantages[row] for row in mine], torch.float32),
            "old": _ragged([logprobs[row] for row in mine], torch.float32)})
        loss, engine = TokenLoss(name, settings), self.role.engine
        with current().attributed(muted=layout.width > 1 and not engine.reports):
            current().add("samples", len(mine))
            current().add("tokens", len(tokens.values))
            engine.accumulate(batch, loss, 1.0 if name == "cross_entropy" else self._temperature)
        self.passes += 1
        parts = gather_values([dict(zip(mine, loss.rows_of(tokens))), loss.total if engine.reports else 0.0])
        return {"logprobs": _in_order(parts, len(prompts)), "metrics": {"loss:sum": sum(part[1] for part in parts)}}

    def _forward(self, arguments: Any) -> Any:
        name, prompts, responses = arguments
        _, mine = self._share(name, [len(a) + len(b) for a, b in zip(prompts, responses)])
        found = self.ctx.roles[name].logprobs(_ragged([prompts[row] for row in mine]),
                                              _ragged([responses[row] for row in mine]), temperature=self._temperature)
        parts = gather_values([{row: values.tolist() for row, values in zip(mine, found.rows)}])
        return {"logprobs": _in_order(parts, len(prompts))}

    def _optim_step(self, arguments: Any) -> Any:
        self.ctx.state.before_update()
        passes, self.passes = self.passes, 0
        try:
            result = self.role.engine.step(self.role.step, *arguments)
        except EngineError as error:  # the same on all ranks
            raise _Rejected(str(error)) from error
        for name, value in result.items():
            current().maximum(name, value)
        return {"metrics": result, "forward_backward_calls": passes}

    def _zero_grad(self, _: Any) -> Any:
        passes, self.passes = self.passes, 0
        self.role.engine.zero_grad()
        return {"forward_backward_calls": passes}

    def _sample(self, arguments: Any) -> Any:
        prompts, repeats, max_tokens, greedy, first = arguments
        _, mine = self._share(self.name, [len(prompt) for prompt in prompts], samples=True)
        self.sampled = first + len(prompts) * repeats
        ids = torch.tensor([first + prompt * repeats + each for prompt in mine for each in range(repeats)],
                           dtype=torch.int64)
        samples = self.role.generate(_ragged([prompts[row] for row in mine]), ids, repeats, max_tokens,
                                     temperature=0.0 if greedy else None)
        rows = [{"tokens": tokens.tolist(), "logprobs": logprobs.tolist(), "text": text, "finished": finished}
                for tokens, logprobs, text, finished in zip(samples.tokens.rows, samples.logprobs.rows,
                                                            self.role.decode(samples.tokens),
                                                            samples.finished.tolist())]
        edges = pairwise(accumulate([repeats] * len(mine), initial=0))
        parts = gather_values([{row: rows[start:stop] for row, (start, stop) in zip(mine, edges)}])
        return [{"prompt": prompt, "sequences": sequences}
                for prompt, sequences in zip(prompts, _in_order(parts, len(prompts)))]

    def _save_state(self, _: Any) -> Any:
        done, state = self.role.step, self.ctx.state
        state.finish()
        if not any(gather_values(self._has_checkpoint(done))):
            state.save(done)
            state.finish()
            if not any(gather_values(self._has_checkpoint(done))):
                raise _Rejected(f"the checkpoint of step {done} could not be written; events.jsonl of the run says why")
        return {"checkpoint": done}

    def _has_checkpoint(self, step: int) -> bool:
        return step in map(step_of, complete_checkpoints(self.ctx.state.folder)) if self.ctx.rank == 0 else False

    def _load_state(self, checkpoint: int) -> Any:
        state = self.ctx.state
        state.finish()
        path = checkpoint_of(state.folder, checkpoint)
        if damage := state.checkpoints.damage_in(path):
            raise _Rejected(f"{path} is not loaded: {damage}. It is damaged, or was removed since (`checkpoint.keep`)")
        state.before_update()
        state.load(path)
        events.record("state_loaded", of_step=checkpoint)
        return {"checkpoint": checkpoint}

    @property
    def _temperature(self) -> float:
        return self.role.settings.generation.temperature

    def _share(self, role: str, sizes: list[int], samples: bool = False) -> tuple[Layout, list[int]]:
        """Return how a role's rows are divided, and this rank's rows, for tokens of each."""
        layout = self.ctx.plan.layout_of(role, samples)
        share = layout.share(self.ctx.rank)
        owners = assign(torch.tensor(sizes, dtype=torch.int64), layout.dp)
        return layout, (owners == (-1 if share is None else share)).nonzero().squeeze(1).tolist()


class _Rejected(Exception):
    """A call that changed nothing on any rank."""


def _columns(rows: Sequence[TrainingRow]) -> list[list[list[int]]]:
    return [[row.prompt for row in rows], [row.response for row in rows]]


def _per_token(value: float | list[float], row: TrainingRow) -> list[float]:
    return value if isinstance(value, list) else [value] * len(row.response)


def _ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=dtype) for row in rows], dtype)


def _in_order(parts: Sequence[Sequence[Any]], rows: int) -> list[Any]:
    """Return what the ranks have of each row, by row."""
    found = {row: value for part in parts for row, value in part[0].items()}
    return [found[row] for row in range(rows)]


