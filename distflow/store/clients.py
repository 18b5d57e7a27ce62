"""Opens a client of a run's store by the store's URL, in any process of the run."""

from __future__ import annotations

from distflow.store.interface import ETCD, Store
from distflow.store.tcp import TCPStoreClient


def open_store(url: str, deadline: float) -> Store:
    """Return a client of etcd (`etcd://HOST:PORT,HOST:PORT/RUN`) or of a TCPStore (`HOST:PORT`). Raises
    StoreUnavailable: there is none."""
    if url.startswith(ETCD):
        from distflow.store.etcd import EtcdStore  # and httpx: most runs need neither

        return EtcdStore(url, deadline)
    host, _, port = url.rpartition(":")
    return TCPStoreClient(host, int(port), deadline)
