"""Address at which the run's other processes reach this machine."""

from __future__ import annotations

import ipaddress
import os

from distflow.errors import EngineError

HOST = "DISTFLOW_HOST"


def own_host(found: str = "127.0.0.1") -> str:
    """Return the address at which the run's other processes reach this machine: DISTFLOW_HOST, or where that is not
    set the one that was `found`. Raises EngineError: that is loopback, and there are several machines."""
    machines, host = int(os.environ.get("GROUP_WORLD_SIZE", 1)), os.environ.get(HOST)
    if machines > 1 and not host and ipaddress.ip_address(found).is_loopback:
        raise EngineError(f"this run has {machines} machines, which talk to each other over the network, and {found} "
                          f"is this machine alone; say on each at which address the others reach it:  export "
                          f"{HOST}=10.0.0.N  (of a private network: what travels there is in the clear)")
    return host or found
