"""Write the statements of the server's problems, each with its number as `seed`, to runs/recipes/openenv."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from problems import HELD_OUT, PROBLEMS  # noqa: E402 - needs the path above


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = {entry["question"].casefold(): {"question": entry["question"].partition("\n")[0], "answer": entry["answer"],
                                           "seed": str(number)} for number, entry in enumerate(PROBLEMS)}
    each = list(rows.values())
    for name, some in (("heldout", each[:HELD_OUT]), ("train", each[HELD_OUT:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        print(f"{folder / name}.jsonl: {len(some)} problems")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/openenv"))
