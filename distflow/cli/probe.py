"""`distflow probe`: measure devices and links, and write them as a cluster file for `distflow plan --place --cluster`.

By itself it starts a rank for each device of this machine. Several machines are probed by torchrun on each:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT -m distflow.cli probe --out machines.yaml
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distflow.cli.common import Verb
from distflow.cli.launcher import attend
from distflow.config.cluster import Cluster, check_cluster
from distflow.config.yaml_source import check, dump, parse
from distflow.errors import InvalidInput
from distflow.launch import stay_on_loopback
from distflow.measurements import ALIKE, cluster_of_probes
from distflow.telemetry.processes import die_with_torchrun, python_environment
from distflow.telemetry.run_folder import unwritable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the description there; default: print it")
    parser.add_argument("--ranks", type=int, metavar="N",
                        help="of this machine; default: one for each GPU, or for each core if there are none")


def main(options: argparse.Namespace) -> int:
    if options.out:
        folder = Path(options.out).absolute().parent
        if why := unwritable(folder) if folder.exists() else f"there is no folder {folder}":
            raise InvalidInput(f"{options.out} cannot be written: {why}")
    if options.ranks is not None and options.ranks < 1:
        raise InvalidInput(f"--ranks {options.ranks} probes nothing; give at least 1")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if options.ranks is not None:
            raise InvalidInput("under torchrun the ranks are those that it has started. Leave --ranks out, and say it "
                               f"to torchrun:  --nproc-per-node {options.ranks}")
        return _measured(options)
    ranks = options.ranks or _devices()
    line = ["--nproc-per-node", str(ranks), "-m", "distflow.cli", "probe"]
    line += ["--out", options.out] if options.out else []
    os.environ |= python_environment()
    return attend(line)


def _devices() -> int:
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def _measured(options: argparse.Namespace) -> int:
    """Measure on this rank, which torchrun has started; rank 0 writes the file."""
    import torch
    import torch.distributed as dist

    from workers.probe import probe

    die_with_torchrun()
    stay_on_loopback()
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if 0 < gpus < here:
        raise InvalidInput(f"{here} ranks were asked for, and this machine has {gpus} GPUs. Add  --ranks {gpus}")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        devices, links = probe(device)
        if dist.get_rank() == 0:
            _write(options.out, _head(devices[-1].machine + 1, len(devices), "NCCL" if gpus else "gloo"),
                   cluster_of_probes(devices, links))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _head(machines: int, ranks: int, by: str) -> str:
    """Return the comment above the description: what was measured, and when."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    many = f"{machines} machine{'s' * (machines > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    return (f"# A measurement, not a data sheet: by  distflow probe  on {now}; {many}, links over {by}.\n"
            f"# Medians, with all ranks at work. Devices that differ by less than {ALIKE:.0%} count as alike.\n"
            "# tflops: products of square matrices. memory_gb_s: a copy, read and written.\n"
            "# Links: large messages between two devices; between machines, of all their devices at once.\n")


def _write(path: str | None, head: str, description: dict[str, Any]) -> None:
    """Write or print the description, once it has been read back without mistakes."""
    text = head + dump(description, default_flow_style=None, width=110)
    source = parse(text, path or "the description")
    cluster, mistakes = check(Cluster, source)
    mistakes += check_cluster(cluster, source) if cluster else []
    if mistakes or cluster is None:
        raise InvalidInput(mistakes)
    if path:
        Path(path).write_text(text, encoding="utf-8")
    print(f"{path}: {cluster.size} devices of {len(cluster.devices)} type{'s' * (len(cluster.devices) > 1)}" if path
          else text, flush=True)


VERBS = {"probe": Verb("measure devices and links of this machine, or of those that torchrun starts it on, as a "
                       "cluster file", add_arguments, main)}
