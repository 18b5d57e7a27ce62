"""Write words of three to five letters, to be spelled backward, to runs/recipes/spell_backward."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tasks import write_problems  # noqa: E402 - needs the path above

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/spell_backward")
    write_problems(folder, "spell_backward", {"min_word_len": 3, "max_word_len": 5},
                   train=4000, held_out=200)
