"""Settings of the training API."""

from __future__ import annotations

from pydantic import Field

from distflow.config.yaml_source import Document


class TrainingApi(Document):
    """A client's calls sample and train, instead of the DAG's nodes (docs/training_api.md)."""

    host: str = "127.0.0.1"
    """Address of the server; any but the loopback address admits other machines. A token protects it; nothing is
    encrypted."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port; 0: a free one, which a restart keeps."""
