"""Calls of the training API, and the errors that say what is wrong with one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgpack
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from distflow.errors import did_you_mean
from workers.endpoint.messages import RequestRefused

PACKED = "application/msgpack"
MOST_SAMPLES = 65_536  # rows of one call
Tokens = Annotated[list[NonNegativeInt], Field(min_length=1)]


class Request(BaseModel):
    """`id` is the same in a retry; `attempt` and `step` say where the client believes the run to stand; `session` is
    the client's, whose gradients are not mixed with another's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    id: str = Field(min_length=1, max_length=64)
    attempt: str
    step: NonNegativeInt
    session: str = Field(default="", max_length=64)


class TrainingRow(BaseModel):
    """A prompt and what follows it. `weights`, `advantages` and `logprobs` have a number for each response token; of
    the first two, one number holds for all of them."""

    model_config = Request.model_config
    prompt: Tokens
    response: Tokens
    weights: float | list[float] = 1.0
    advantages: float | list[float] | None = None
    logprobs: list[float] | None = None


class ForwardBackward(Request):
    data: list[TrainingRow] = Field(min_length=1)
    loss_fn: str
    loss_fn_config: dict[str, float] = {}


class Forward(Request):
    data: list[TrainingRow] = Field(min_length=1)
    role: str | None = None  # default: the one that is trained


class OptimStep(Request):
    learning_rate: PositiveFloat | None = None  # default: that of the run's schedule


class Sample(Request):
    """Texts are questions by the chat template; tokens are taken as they are. `sampled`: rows that the client has had
    in this step, whose draws are not repeated after a restart."""

    prompts: list[str | Tokens] = Field(min_length=1)
    num_samples: PositiveInt = 1
    sampled: NonNegativeInt = Field(default=0, lt=2**31)
    max_tokens: PositiveInt | None = None
    greedy: bool = False


    @field_validator("num_samples")
    @classmethod
    def _bounded(cls, number: int, others: ValidationInfo) -> int:
        rows = number * len(others.data.get("prompts", ()))
        if rows > MOST_SAMPLES:
            raise ValueError(f"{rows} rows are asked for, and a call may have {MOST_SAMPLES}: make several calls")
        return number


class Prompts(Request):
    """The step's prompts of the run's data."""


class ZeroGrad(Request):
    """Discards the gradient that is not applied, whichever client's it is."""


class SaveState(Request):
    pass


class LoadState(Request):
    checkpoint: NonNegativeInt | None = None  # number of its step; default: the newest


CALLS: dict[str, type[Request]] = {
    "forward_backward": ForwardBackward, "forward": Forward, "optim_step": OptimStep, "zero_grad": ZeroGrad,
    "sample": Sample, "prompts": Prompts, "save_state": SaveState, "load_state": LoadState}
UPDATES = ("optim_step", "load_state")
"""Calls that change the weights: each ends a step of the run."""


class OutOfStep(RequestRefused):
    """A call of a client that believes the run to stand elsewhere than it does, after a restart for example."""

    def __init__(self, message: str, code: str):
        super().__init__(message, code, 409)


def read_call(name: str, body: bytes, kind: str) -> Request:
    """Return the call that a body makes, in JSON or MessagePack. Raises RequestRefused: what is wrong with it."""
    if name not in CALLS:
        raise RequestRefused(f"there is no call `{name[:100]}`. {did_you_mean(name, CALLS, 'Calls')}", "not_found", 404)
    try:
        given = msgpack.unpackb(body) if kind == PACKED else json.loads(body)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RequestRefused(f"the body is no {'MessagePack' if kind == PACKED else 'JSON'}: {error}") from None
    if not isinstance(given, dict):
        raise RequestRefused("the body must be an object")
    try:
        return CALLS[name].model_validate(given)
    except ValidationError as error:
        raise RequestRefused(_first(error, CALLS[name])) from None


def _first(error: ValidationError, kind: type[Request]) -> str:
    first, *more = error.errors(include_url=False)
    place = [*first["loc"]]
    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")
    known: Any = TrainingRow.model_fields if len(place) > 1 and place[0] == "data" else kind.model_fields
    hint = f". {did_you_mean(str(place[-1]), known, 'Known')}" if first["type"] == "extra_forbidden" else ""
    others = f" (and {len(more)} more mistakes)" if more else ""
    return f"`{where}`: {first['msg']}{hint}{others}"
