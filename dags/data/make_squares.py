"""Write the embedded task for models that see: how many squares are in an image?

    python dags/data/make_squares.py     # rewrites dags/data/squares/{train,demonstrations,heldout}.parquet

One row is {"question": str, "answer": "#### <number>", "image": {"bytes": a PNG of 32 × 32 pixels, "path": null}}, the
form in which `datasets` writes images. The files depend on the seed and on nothing else. Train and held-out share no
image.

`demonstrations` are the questions of `train`, answered by a teacher who does not look: the form is right, the number is
drawn. Whoever imitates them is right as often as chance is, and reinforcement learning has to find that looking helps.
"""
import argparse
import io
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image, ImageDraw

COLOURS = ((220, 40, 40), (40, 160, 60), (50, 70, 220))
CELLS = ((0, 0), (16, 0), (0, 16), (16, 16))


def draw(rng: random.Random, count: int) -> bytes:
    """A PNG with `count` squares, each in a cell of its own, of any colour, somewhat larger or smaller."""
    shade = rng.randint(220, 255)
    image = Image.new("RGB", (32, 32), (shade, shade, shade))
    pen = ImageDraw.Draw(image)
    for left, top in rng.sample(CELLS, count):
        side = rng.randint(9, 12)
        x, y = left + rng.randint(1, 15 - side), top + rng.randint(1, 15 - side)
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=rng.choice(COLOURS))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def make(rng: random.Random, rows: int, taken: set[bytes]) -> list[dict]:
    """Rows with images that are not in `taken`, which learns of them."""
    made: list[dict] = []
    while len(made) < rows:
        count = rng.randint(1, len(CELLS))
        png = draw(rng, count)
        if png not in taken:
            taken.add(png)
            made.append({"question": "How many squares?", "answer": f"#### {count}",
                         "image": {"bytes": png, "path": None}})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=600, help="rows to train on")
    parser.add_argument("--heldout", type=int, default=96, help="rows that are not trained on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "squares")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng, taken = random.Random(options.seed), set()
    train, heldout = make(rng, options.train, taken), make(rng, options.heldout, taken)
    blind = [row | {"answer": f"#### {rng.randint(1, len(CELLS))}"} for row in train]
    for name, rows in {"train": train, "demonstrations": blind, "heldout": heldout}.items():
        path = options.out / f"{name}.parquet"
        image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string()), ("image", image)])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
        print(f"{path}: {len(rows)} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
