"""torchrun on one machine, whose store nobody else can reach.

torch's store has no password, and holds the run's token; torchrun lets it listen on every interface of the machine,
also with `--standalone`. Here the ranks meet at a store on loopback instead. All else is torchrun's:

    python workers/loopback.py --nproc-per-node 2 distflow/launch.py --dag grpo.yaml
"""

from __future__ import annotations

import sys

import torch.distributed.run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from distflow.robust.board import store_on

NAME = "loopback"
_HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """One agent, which is there as soon as it asks; each start of its ranks gets a store of its own."""

    use_agent_store = True

    def __init__(self, run_id: str):
        self.run_id, self.closed, self.store = run_id, False, None

    def next_rendezvous(self) -> RendezvousInfo:
        self.store = store_on(_HOST)
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(_HOST, self.store.port))

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

    def shutdown(self) -> bool:
        self.closed = True
        return True


def create(parameters: RendezvousParameters) -> Loopback:
    """Raises:
        ValueError: torchrun was asked for several machines.
    """
    if parameters.max_nodes != 1:
        raise ValueError(f"{parameters.max_nodes} machines cannot meet on loopback; start torchrun on each, with "
                         "--rdzv-endpoint on a private network")
    return Loopback(parameters.run_id)


def main() -> None:
    rendezvous_handler_registry.register(NAME, create)
    torch.distributed.run.main(["--rdzv-backend", NAME, "--rdzv-endpoint", "127.0.0.1", "--nnodes", "1", *sys.argv[1:]])


if __name__ == "__main__":
    main()
