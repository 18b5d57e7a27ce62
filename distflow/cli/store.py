"""`distflow store`: serve the store at which the machines of an elastic run meet."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time

from distflow.cli.common import Verb
from distflow.errors import InvalidInput
from distflow.rpc.run_token import TOKEN, token_checksum

_POLL, _LINGER, _ANSWER = 0.5, 10.0, 30.0
"""Seconds between two polls, for which the store stays after the end, for all to see, and within which it answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="the address at which the machines reach it, of a private "
                        "network; default: this machine alone")
    parser.add_argument("--port", type=int, default=29400, help="0: the system chooses")
    parser.add_argument("--show-token", action="store_true", help="print the run's token, which a file or a job's log "
                        "then keeps; on a terminal a token that is made here is always shown")


def main(options: argparse.Namespace) -> int:
    exported = _exported(options.show_token)
    from distflow.recovery.membership import MACHINES
    from distflow.store.tcp import TCPStoreClient, store_on
    from workers.elastic import ELASTIC_RUN

    if not 0 <= options.port < 1 << 16:
        raise InvalidInput(f"--port {options.port}: ports are numbered up to {(1 << 16) - 1}; 29400 is the usual one")
    try:
        store = TCPStoreClient.hosting(store_on(options.host, options.port), _ANSWER)
    except OSError as error:
        raise InvalidInput(f"no store can be served at {options.host}:{options.port}: {error.strerror}. Another one "
                           "may be there, or it is no address of this machine. Choose another  --port  or  --host") \
            from None
    store.put("token", token_checksum(ELASTIC_RUN))
    print(f"on each machine:\n  export {TOKEN}={exported}\n  torchrun --standalone --nproc-per-node … "
          f"distflow/launch.py --dag … --store {options.host}:{store.port} --machines …", flush=True)
    membership = store.below(MACHINES)
    while True:
        number = membership.add("round", 0)
        if "end" in (began := json.loads(membership.get(f"{number}/began") or "{}")):
            print(f"the run has ended{': ' if began['end'] else ''}{began['end']}", flush=True)
            time.sleep(_LINGER)
            return 0
        time.sleep(_POLL)


def _exported(show: bool) -> str:
    """Return what is printed of the run's token, which is made if there is none. Raises InvalidInput: the one that
    was made would not be seen."""
    made = not os.environ.get(TOKEN)
    if made and not show and not sys.stdout.isatty():
        raise InvalidInput(f"which token has the run? Write before it, here and on each machine:  export "
                           f"{TOKEN}=$(openssl rand -hex 32)   with the same value everywhere; or have one made and "
                           "printed, here into a file or a pipe:  distflow store --show-token")
    os.environ[TOKEN] = os.environ.get(TOKEN) or secrets.token_hex(32)
    return os.environ[TOKEN] if show or made else "…   (as here)"


VERBS = {"store": Verb("serve the store of a run whose machines start by themselves, and may come and go",
                       add_arguments, main)}
