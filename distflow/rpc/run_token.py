"""Tokens by which the processes of a run authenticate each other, all made from one secret that is in no store.

The secret is `DISTFLOW_TOKEN`, the same on all machines of a run. What a store has is the run's id, and a checksum by
which machines find out that their secrets differ: it must be too long to be guessed from that. Without the secret, a
token is made from the id alone, and whoever reads the store can make it too.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from distflow.errors import InvalidInput

TOKEN = "DISTFLOW_TOKEN"
_LEAST = 16


def run_token(run: str) -> bytes:
    """Return the token of the run that has this id. Raises InvalidInput: the secret is short enough to be guessed."""
    secret = os.environ.get(TOKEN, "")
    if 0 < len(secret) < _LEAST:
        raise InvalidInput(f"{TOKEN} has {len(secret)} characters, and could be guessed; it needs {_LEAST}. On one "
                           f"machine  export {TOKEN}=$(openssl rand -hex 32)  and the same value on the others")
    return hmac.digest(secret.encode(), f"distflow run {run}".encode(), "sha256")


def token_checksum(run: str) -> str:
    """Return what may be shown of a run's token, to compare it."""
    return hashlib.sha256(run_token(run)).hexdigest()
