"""A teacher behind an OpenAI-compatible API, as vLLM's: its most probable tokens at each place of a response."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Ragged
from distflow.errors import InvalidInput, RewardsFailed
from distflow.telemetry import events, heartbeat
from distflow.telemetry.metrics import current
from workers.functions.distillation import concat_teachers
from workers.isolation.model_api import ModelAPI
from workers.isolation.user_code import failure_streak_of

_NONE = -9999.0  # what vLLM writes for -inf
_ROWS = 32  # that are named in an event
Place = tuple[list[int], list[float], str]
"""The most probable tokens at a place, their log-probabilities, and the text of the token that stands there."""


@node(writes=("top_tokens", "top_logprobs", "keep"))
def served_top_logprobs(
    prompts: Ragged, responses: Ragged, completions: list[str], row: Tensor, top_tokens: Ragged | None = None,
    top_logprobs: Ragged | None = None, *, address: Annotated[str, Field(pattern="^https?://")], model: str,
    k: PositiveInt = 16, temperature: Annotated[float, Field(ge=1, le=1)] = 1.0, key_variable: str | None = None,
    seconds: PositiveFloat = 60.0, attempts: PositiveInt = 4, concurrency: PositiveInt = 16, cache: str | None = None,
    max_calls: PositiveInt | None = None, patience: PositiveInt = 3,
) -> tuple[Ragged, Ragged, Tensor]:
    """Return what `top_logprobs` does, of a teacher at `address` (as `http://localhost:8000/v1`), by `prompt_logprobs`
    of `/completions`; and whether each row has it [B] bool.

    A row without an answer leaves the step. `temperature` is 1, that of the server's log-probabilities; the student's
    must be too. `key_variable`, `seconds`, `attempts`, `cache`, `max_calls`: as those of the reward `judge`. Raises
    InvalidInput if the server has another tokenizer; RewardsFailed if a rank has had no answer for `patience` steps.
    """
    api = ModelAPI("teacher", address, key_variable, seconds, attempts, cache, max_calls)
    bodies = [{"model": model, "prompt": [*prompt.tolist(), *response.tolist()], "max_tokens": 1, "temperature": 0.0,
               "prompt_logprobs": k} for prompt, response in zip(prompts.rows, responses.rows)]
    found = asyncio.run(_ask_all(api, bodies, responses.lengths.tolist(), k, concurrency))
    keep = [not isinstance(each, Exception) for each in found]
    rows: list[list[Place]] = [[([0] * k, [-torch.inf] * k, "")] * length if isinstance(each, Exception) else each
                               for each, length in zip(found, responses.lengths.tolist())]
    _require_one_tokenizer([each for each, kept in zip(rows, keep) if kept],
                           [text for text, kept in zip(completions, keep) if kept], address)
    _note_failures(found, row.tolist(), address, patience)
    places = [place for each in rows for place in each]
    tokens = responses.with_values(torch.tensor([each[0] for each in places], dtype=torch.int32).reshape(-1, k))
    logprobs = responses.with_values(torch.tensor([each[1] for each in places], dtype=torch.float32).reshape(-1, k))
    return *concat_teachers(top_tokens, top_logprobs, tokens, logprobs), torch.tensor(keep, dtype=torch.bool)


async def _ask_all(api: ModelAPI, bodies: list[dict[str, Any]], lengths: list[int], k: int,
                   concurrency: int) -> list[list[Place] | Exception]:
    """Return the places of each response, or why there are none."""
    free = asyncio.Semaphore(concurrency)

    async def ask(body: dict[str, Any], length: int) -> list[Place] | Exception:
        try:
            async with free:
                text = await api.ask("completions", body, "completion with prompt_logprobs",
                                     lambda choice: json.dumps(choice["prompt_logprobs"]))
            places = json.loads(text)
            if len(places) != len(body["prompt"]):
                raise ValueError(f"the teacher answers {len(places)} places for {len(body['prompt'])} tokens")
            first = len(places) - length
            return [_place(token, found, k) for token, found in zip(body["prompt"][first:], places[first:])]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return error
        finally:
            heartbeat.current().tick()

    return list(await asyncio.gather(*map(ask, bodies, lengths)))


def _place(token: int, alternatives: dict[str, dict[str, Any]], k: int) -> Place:
    """Read a place as vLLM answers it: the `k` most probable tokens, and the one that stands there if it is none of
    them."""
    by_token = {int(each): float(value["logprob"]) for each, value in alternatives.items()}
    by_token = {each: logprob if logprob > _NONE else -torch.inf for each, logprob in by_token.items()}
    best = sorted(by_token, key=lambda each: (-by_token[each], each))[:k]
    missing = k - len(best)
    return ([*best, *[0] * missing], [*(by_token[each] for each in best), *[-torch.inf] * missing],
            str(alternatives[str(token)].get("decoded_token") or ""))


def _require_one_tokenizer(rows: list[list[Place]], completions: list[str], address: str) -> None:
    """Compare letters and digits of responses as student and server read their tokens. With one tokenizer the server's
    have the student's in their order, and special tokens between them; with another at most a few short ones do."""
    pairs = [(_plain("".join(place[2] for place in places)), _plain(text)) for places, text in zip(rows, completions)]
    pairs = [(theirs, ours) for theirs, ours in pairs if ours]
    odd = [(theirs, ours) for theirs, ours in pairs if not _within(ours, theirs)]
    if len(odd) > len(pairs) / 2:
        theirs, ours = odd[0]
        raise InvalidInput(f"the teacher at {address} has another tokenizer than the student, so that the tokens of "
                           f"one mean nothing to the other: it reads {theirs[:60]!r} where the student wrote "
                           f"{ours[:60]!r}. Serve a model of the student's family")


def _plain(text: str) -> str:
    return re.sub("[^A-Za-z0-9]", "", text)


def _within(part: str, whole: str) -> bool:
    """Return whether the letters of `part` are in `whole`, in their order."""
    rest = iter(whole)
    return all(letter in rest for letter in part)


def _note_failures(found: list[list[Place] | Exception], names: list[int], address: str, patience: int) -> None:
    failed = [(name, each) for name, each in zip(names, found) if isinstance(each, Exception)]
    current().add("distillation/failed", len(failed))
    if failed:
        events.record("teacher_failed", address=address, reason=str(failed[0][1]), count=len(failed),
                      rows=[name for name, _ in failed[:_ROWS]])
    steps = failure_streak_of(address).count(current().step, len(found), len(failed))
    if steps >= patience:
        raise RewardsFailed(f"no row of {steps:.0f} steps in a row has an answer of the teacher at {address}: there is "
                            f"nothing to learn from. The last: {failed[-1][1]}")
