"""Write sums of 4 to 6 terms to runs/recipes/calculator, and conversations that call the calculator for them."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tasks import write_problems  # noqa: E402 - needs the path above

DEMONSTRATIONS = 640


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """Return the turns of a right answer: the sum, what the calculator says, and the result."""
    said = (question, question.partition(": ")[2], answer, f"#### {answer}")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, said, strict=True)]


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/calculator")
    write_problems(folder, "chain_sum", {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 2},
                   train=4000, held_out=200)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:DEMONSTRATIONS]]
    lines = [json.dumps({"messages": conversation(**row)}) + "\n" for row in rows]
    (folder / "conversations.jsonl").write_text("".join(lines))
    print(f"{folder}/conversations.jsonl: {len(rows)} conversations")
