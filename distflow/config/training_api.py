"""Settings of the training API."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from distflow.config.yaml_source import Document


class TrainingApi(Document):
    """Calls of a client sample and train, in place of the DAG's nodes (docs/training_api.md)."""

    host: str = "127.0.0.1"
    """Address to listen at. Another than the loopback address is reached by other machines; what is sent is protected
    by a token, and not encrypted."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port; 0: one that is free, which a restart keeps."""
    max_body_mib: PositiveFloat = 64.0
    """Largest call, in MiB."""
