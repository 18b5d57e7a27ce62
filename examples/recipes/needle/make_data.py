"""Write three or four statements about people, and a question about one of them, to runs/recipes/needle."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_tasks import write_problems  # noqa: E402 - needs the path above

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recipes/needle")
    settings = {"min_num_statements": 3, "max_num_statements": 4}
    write_problems(folder, "needle_haystack", settings, train=4000, held_out=200)
