"""vLLM for a machine with a GPU and no network, in parts that are small enough to be sent one at a time.

    python -m benchmarks.vllm_parts pack vllm-….whl OUT --packages WHEELS   # kernels that are not needed stay behind
    python -m benchmarks.vllm_parts join OUT SITE                           # there; then PYTHONPATH=SITE

`pack` writes .tar.xz files of at most `--limit` MB, and says what stayed behind. What is left serves dense models on
Hopper, whose attention is FlashAttention 3: mixtures of experts need `--mixtures`.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import lzma
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

LEFT = ("*/_vllm_fa2_C*.so", "*/vllm-rs", "vllm/third_party/*/include/*", "vllm/third_party/*.so", "*/_qutlass_C*.so",
        "*/_flashmla*.so", "*/static/swagger*", "vllm/benchmarks/*", "*/_moe_C*.so")
"""Files of the wheel that a dense model on Hopper does not load; the last is that of mixtures of experts."""
LIMIT = 55


def stays(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return a .tar.xz of files by name."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=6) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def parts_of(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide names into few parts of at most `limit`, the largest first; one that is larger has a part of its own."""
    parts: list[tuple[int, list[str]]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = next((number for number, (size, _) in enumerate(parts) if size + sizes[name] <= limit), None)
        if place is None:
            parts.append((sizes[name], [name]))
        else:
            size, names = parts[place]
            parts[place] = size + sizes[name], [*names, name]
    return [names for _, names in parts]


def files_of(wheels: Iterable[Path], left: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of wheels that travel; those of the folders `purelib` and `platlib` lie in the root."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                if name.endswith("/") or stays(name, left):
                    continue
                inner = name.split("/", 2)[2] if ".data/purelib/" in name or ".data/platlib/" in name else name
                yield inner, opened.read(name)


def pack(wheel: Path, out: Path, packages: Path | None, limit: int, left: Sequence[str]) -> None:
    """Write the parts: files of a megabyte and more are compressed alone, to know what they take; the others together
    are one."""
    out.mkdir(parents=True, exist_ok=True)
    files = dict(files_of([wheel, *sorted(packages.glob("*.whl") if packages else ())], left))
    small = {name: content for name, content in files.items() if len(content) < 2**20}
    large = {name: lzma.compress(files[name], preset=6) for name in files if name not in small}
    sizes = {name: len(content) for name, content in large.items()} | {"": len(packed(small))}
    for number, names in enumerate(parts_of(sizes, limit * 10**6), 1):
        chosen = (small if "" in names else {}) | {name: files[name] for name in names if name}
        target = out / f"part{number}.tar.xz"
        target.write_bytes(packed(chosen))
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {len(chosen)} files"
              + "".join(f", {name}" for name in names if name), flush=True)
    with zipfile.ZipFile(wheel) as opened:
        behind = [entry for entry in opened.infolist() if stays(entry.filename, left)]
    print(f"stayed behind: {len(behind)} files of {sum(entry.file_size for entry in behind) / 1e6:.0f} MB")


def join(parts: Path, site: Path) -> None:
    """Unpack the parts that are in a folder or in folders below it."""
    for part in sorted(parts.rglob("part*.tar.xz")):
        with tarfile.open(part) as tar:
            tar.extractall(site, filter="data")
        print(f"{part} is in {site}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("wheel", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--packages", type=Path, help="a folder of wheels that the machine lacks")
    packing.add_argument("--limit", type=int, default=LIMIT, help=f"of a part, in MB; default {LIMIT}")
    packing.add_argument("--mixtures", action="store_true", help="with the kernels of mixtures of experts")
    joining = commands.add_parser("join")
    joining.add_argument("parts", type=Path)
    joining.add_argument("site", type=Path)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.wheel, given.out, given.packages, given.limit, LEFT[:-1] if given.mixtures else LEFT)
    else:
        join(given.parts, given.site)


if __name__ == "__main__":
    main()
