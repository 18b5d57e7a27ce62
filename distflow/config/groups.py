"""How a run file divides ranks into groups: those that sample, those that train, and those of one role."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt, field_validator

from distflow.config.yaml_source import Document


def _ranks_or_place(value: Any) -> Any:
    if (isinstance(value, str) and value) or (type(value) is int and value > 0):
        return value
    raise ValueError(f"{value!r} is neither a number of ranks, as 1, nor `rollout`, for the ranks that sample, nor a "
                     "role that has ranks of its own, for these")


InferenceRanks = Annotated[PositiveInt | str, BeforeValidator(_ranks_or_place)]


class Groups(Document):
    """Division of the ranks: in mode sync only `inference` counts."""

    rollout: float = 0.5
    """Ranks that only sample, or their share of those that `inference` leaves. The others train. 0 in mode semi_sync:
    all ranks train and sample in turns (partial rollouts; one rank is enough)."""
    inference: dict[str, InferenceRanks] = {}
    """Ranks that compute with frozen models, by role: of their own ({reference: 1}), those of another role ({reward:
    reference}), or in mode async the sampling ranks ({reference: rollout}). For trained roles: `first` in `layouts`."""

    @property
    def inference_ranks(self) -> dict[str, int]:
        """Ranks of their own, by role that is only read."""
        return {role: ranks for role, ranks in self.inference.items() if isinstance(ranks, int)}

    @property
    def on_rollouts(self) -> list[str]:
        """Roles that are only read, and computed by the ranks that sample."""
        return [role for role, ranks in self.inference.items() if ranks == "rollout"]

    @property
    def colocated_with(self) -> dict[str, str]:
        """Roles that are only read, and computed by the ranks that another role has of its own: that role, by role."""
        return {role: other for role, other in self.inference.items() if isinstance(other, str) and other != "rollout"}

    def roles_on_ranks_of(self, role: str) -> list[str]:
        """Return a role that has ranks of its own, and the roles colocated with it."""
        return [role, *(other for other, host in self.colocated_with.items() if host == role)]

    @field_validator("rollout")
    @classmethod
    def _ranks_or_share(cls, value: float) -> float:
        if 0 < value < 1 or (value >= 0 and value == int(value)):
            return value if 0 < value < 1 else int(value)
        raise ValueError(f"{value:g} is neither a number of ranks, as 2, nor a share of them, as 0.5")
