"""What the algorithm is: roles and nodes. Says nothing about GPUs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from distflow.config.yaml_source import Document

NodeType = Literal["MODEL_INFERENCE", "MODEL_TRAIN", "COMPUTE"]

Head = Literal["lm", "value"]
"""What a model says of each token: `lm`, which token comes next; `value`, one number."""

COMPUTE_ROLES = ("actor", "critic", "reference", "reward")
"""Roles that a COMPUTE node may name without declaring them, since it needs no model."""


class Role(Document):
    """A model and its weights. `copy_of` starts it from another role's model and keeps it frozen unless `trained`.

    `head: value` is for critics and reward models: the vocabulary of the role's model, its own or the one it copies,
    gives way to one number for each token, which starts at zero unless the model's folder has it.
    """

    trained: bool = False
    copy_of: str | None = None
    head: Head = "lm"


class Node(Document):
    """One step of the algorithm. Without `function`, the one that is registered as default for (role, type) runs."""

    role: str
    type: NodeType
    function: str | None = None
    dependencies: list[str] = []
    settings: dict[str, Any] = Field(default={}, alias="with")
    reads: dict[str, str] = {}
    """Parameter of the function → column that it reads instead of the one of its own name."""
    writes: dict[str, str] = {}
    """Column that the function declares → column that it writes instead."""


class Dag(Document):
    """An algorithm. `imports` names modules with node functions, rewards or environments of the user's own."""

    name: str
    roles: dict[str, Role] = {}
    nodes: dict[str, Node] = Field(min_length=1)
    imports: list[str] = []
