"""DAG files: the roles and nodes of an algorithm, without anything physical."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from distflow.config.yaml_source import Document

NodeType = Literal["MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE"]

Head = Literal["lm", "value"]  # output of a model for each token: `lm`, logits of the next token; `value`, one number

COMPUTE_ROLES = ("actor", "critic", "reference", "reward")
"""Roles that a COMPUTE node may name undeclared, since it needs no model."""


class Follow(Document):
    """A frozen copy's moves towards its trained original: every so many steps its weights become `mix` times the
    original's plus (1 - `mix`) times its own."""

    every: PositiveInt
    """Steps between two moves."""
    mix: float = Field(default=1.0, gt=0, le=1)
    """Share of the original's weights; 1 copies them."""


class Role(Document):
    """Model and its weights. `copy_of` starts it from another role's model; it stays as it is unless it is `trained`,
    or is to `follow` the trained role that it copies.

    `head: value` is for critics and reward models: the output layer of the role's model, its own or the one it copies,
    is replaced by one of a single number for each token, which starts at zero unless the model's folder has it.
    """

    trained: bool = False
    copy_of: str | None = None
    follow: Follow | None = None
    head: Head = "lm"


class Node(Document):
    """Step of the algorithm. Without `function`, the default that is registered for (role, type) runs."""

    role: str
    type: NodeType
    function: str | None = None
    dependencies: list[str] = []
    settings: dict[str, Any] = Field(default={}, alias="with")
    reads: dict[str, str] = {}  # parameter of the function → column read instead of the one of the same name
    writes: dict[str, str] = {}  # column that the function declares → column written instead


class Dag(Document):
    """Algorithm. `imports` names modules with node functions, rewards, losses or environments of the user's own."""

    name: str
    roles: dict[str, Role] = {}
    nodes: dict[str, Node] = Field(min_length=1)
    imports: list[str] = []
