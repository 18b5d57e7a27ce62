"""Write lists of three to five words, to be reversed, to runs/recipes/reverse_words."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tasks import write_problems  # noqa: E402 - needs the path above

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/reverse_words")
    write_problems(folder, "word_sequence_reversal", {"min_words": 3, "max_words": 5}, train=4000, held_out=200)
