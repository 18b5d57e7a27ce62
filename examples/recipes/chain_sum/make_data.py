"""Write problems as `4 - 1 =`, of two numbers below 100, to runs/recipes/chain_sum."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tasks import write_problems  # noqa: E402 - needs the path above

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/chain_sum")
    write_problems(folder, "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
                   train=4000, held_out=200)
