"""torchrun on one machine with its store on loopback, out of reach for others.

torch's store has no password; torchrun lets it listen on every interface of the machine, also with `--standalone`. The
secret of the run's token is in the ranks' environment instead. torchrun's report of a rank that fails is left out,
since the rank has printed why; `LOGLEVEL=WARNING` shows it. All else is torchrun's:

    python workers/loopback.py --nproc-per-node 2 distflow/launch.py --dag grpo.yaml
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import

import torch.distributed.run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from distflow.recovery.store import COMPLETED
from distflow.rpc.run_token import TOKEN
from distflow.store.tcp import store_on
from distflow.telemetry.events import leave
from distflow.telemetry.processes import AGENT
from distflow.telemetry.screen import prepare

NAME = "loopback"
_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """Rendezvous of a single agent; each start of its ranks gets a store of its own."""

    def __init__(self, run_id: str):
        self.run_id, self.closed, self.store = run_id, False, None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = self.store = store_on(_HOST)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, store.port))

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        self.closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    @property
    def completed(self) -> bool:
        return self.store is not None and self.store.check([COMPLETED])

    def shutdown(self) -> bool:
        self.closed = True
        return True


def create(parameters: RendezvousParameters) -> Loopback:
    if parameters.max_nodes != 1:
        raise ValueError(f"{parameters.max_nodes} machines cannot meet on loopback; start torchrun on each, with "
                         "--rdzv-endpoint on a private network")
    return Loopback(parameters.run_id)


def main() -> int:
    """Run torchrun. Return the first failed rank's exit code, or 128 + signal unless all ranks were done."""
    prepare()
    handlers: list[Loopback] = []  # the last one tells an interrupt after the last step from a failure

    def create_handler(parameters: RendezvousParameters) -> Loopback:
        handlers.append(create(parameters))
        return handlers[-1]

    rendezvous_handler_registry.register(NAME, create_handler)
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault(TOKEN, secrets.token_hex(32))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = "LOGLEVEL" in os.environ
    logger.addHandler(logging.NullHandler())
    given = ["--rdzv-backend", NAME, "--rdzv-endpoint", "127.0.0.1", "--nnodes", "1", *sys.argv[1:]]
    try:
        torch.distributed.run.run(torch.distributed.run.parse_args(given))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # it has printed why
            return failure.exitcode
        print(f"rank {rank}: its process {failure.pid} was ended by {signal.Signals(-failure.exitcode).name}, and the "
              "run with it", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 0 if handlers and handlers[-1].completed else 128 + error.sigval
    return 0


if __name__ == "__main__":
    leave(main())
