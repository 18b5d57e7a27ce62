"""DAGs to plan in tests: functions of every kind, and nodes that run them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from distflow.errors import InvalidInput

FUNCTIONS = '''
from distflow import node

@node(type="MODEL_INFERENCE", writes="samples", repeats="copies")
def sample(engine, prompts: Ragged, *, copies: int = 2) -> Ragged: "Repeats each prompt."

@node(type="MODEL_INFERENCE", writes="again", repeats="copies")
def resample(engine, samples: Ragged, *, copies: int = 3) -> Ragged: "Repeats each sample."

@node(type="MODEL_INFERENCE", writes="{role}_scores")
def judge(engine, samples: Ragged) -> Tensor: "A number for each sample."

@node(writes="left")
def left(samples: Ragged) -> Tensor: "One side of a diamond."

@node(writes="right")
def right(samples: Ragged) -> Ragged: "The other side."

@node(writes="joined")
def join(left: Tensor, right: Ragged, questions: list[str] = None) -> Tensor: "The end of a diamond."

@node(writes="stamp")
def stamp(row: Tensor) -> Tensor: "Reads nothing but the rows' ids."

@node(writes="keep", refills="draws")
def sift(samples: Ragged, *, draws: int = 3) -> Tensor: "Drops rows."

@node(type="MODEL_TRAIN")
def learn(engine, targets: Ragged) -> None: "Trains."

@node(type="MODEL_TRAIN")
def learn_joined(engine, targets: Ragged, joined: Tensor = None) -> None: "Trains, better with `joined`."
'''
RUN = {"steps": 1, "roles": {"actor": {"model": {"architecture": "qwen3"}}},
       "data": {"train": "data.jsonl", "batch": 10, "max_prompt_tokens": 30, "max_target_tokens": 20}}
LEARN = {"role": "actor", "type": "MODEL_TRAIN", "function": "learn"}
LEARN_JOINED = {**LEARN, "function": "learn_joined", "dependencies": ["join"]}


def node(function: str, *dependencies: str, role: str = "actor", **more) -> dict:
    """A node whose type is that of its function."""
    kind = "MODEL_INFERENCE" if function in ("sample", "resample", "judge") else "COMPUTE"
    return {"role": role, "type": kind, "function": function, "dependencies": list(dependencies), **more}


DIAMOND = {"sample": node("sample"), "right": node("right", "sample"), "left": node("left", "sample"),
           "join": node("join", "left", "right")}


@contextlib.contextmanager
def refused(*said: str, mistakes: int = 0) -> Iterator[None]:
    """Require that planning is refused with all of this; with `mistakes`, as so many."""
    with pytest.raises(InvalidInput) as caught:
        yield
    assert [part for part in said if part not in str(caught.value)] == [], str(caught.value)
    assert not mistakes or len(caught.value.mistakes) == mistakes, str(caught.value)
