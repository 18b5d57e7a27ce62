"""One pull of weights over a link with a delay, as between two regions: over several connections and over one.

Two machines are network namespaces, joined by a link that delays each packet (`machines.py`); its packets pass through
a process of Python, which is the limit of its rate. All else is real: the kernel's TCP, the publisher and the puller.
A connection has at most as much under way as the kernel gives it memory for (`net.ipv4.tcp_wmem`), so that a delay
bounds its rate; several have several times as much. The other side is the same program with `TcpPuller.streams = 1`.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machines import NoMachines, address, far_machines  # noqa: E402 - needs the path above
from benchmarks.ratio import Spread, add_size, conclude, interleaved, options, parsed, ratios  # noqa: E402
from benchmarks.weights_relay import MIB, PORT, Trainer, ask, started, timed_pull  # noqa: E402
from distflow.store.tcp import TCPStoreClient  # noqa: E402
from distflow.weights.puller import Puller  # noqa: E402
from distflow.weights.transport.tcp import TcpPuller  # noqa: E402

GOAL = 2.0


class Rollout:
    def __init__(self, token: bytes, host: str):
        self.streams = TcpPuller.streams
        self.puller = Puller(TCPStoreClient(address(0), PORT, 60.0), token, "rollout", host=host, transport="tcp",
                             deadline=30.0)

    def pull(self, version: int, streams: int) -> float:
        """Return seconds until it is here. `streams`: 0 for as many as it likes."""
        TcpPuller.streams = streams or self.streams
        return timed_pull(self.puller, version)


class Pair:
    """A trainer and a rollout, each on its machine."""

    def __init__(self, names: list[str], mib: int):
        token = secrets.token_bytes(32)
        self.trainer = started(names[0], Trainer, token, mib)
        self.rollout = started(names[1], Rollout, token, address(1))

    def pull(self, streams: int) -> float:
        version, = ask([self.trainer], "publish")
        return ask([self.rollout], "pull", version, streams)[0]


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--delay", type=float, default=10.0, help="milliseconds of each packet; default: 10")
    add_size(parser, "mib", 512, 160, "of weights")
    given = parsed(parser, arguments)
    try:
        with far_machines(given.delay / 1000) as names:
            pair = Pair(names, given.mib)
            pair.pull(0)  # memory, and connections
            rounds = interleaved({"several": lambda _: pair.pull(0), "one": lambda _: pair.pull(1)}, given.repeats)
    except NoMachines as error:
        print(f"skipped: {error}")
        return
    print(f"{given.mib} MiB over a link with {2 * given.delay:g} ms there and back (load {os.getloadavg()[0]:.1f})")
    for side, connections in (("several", TcpPuller.streams), ("one", 1)):
        rate = Spread.of([given.mib * MIB / seconds[side] / 1e6 for seconds in rounds])
        print(f"  connections: {connections}: {rate} MB/s")
    conclude("a pull over a link with a delay, over several connections, against one",
             ratios(rounds, "one", "several", float), GOAL)


if __name__ == "__main__":
    main()
