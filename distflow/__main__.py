"""The `distflow` command, also as `python -m distflow`.

Imports little before it knows that Python's own modules are found: a user's `random.py` may stand before them.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_USED = ("numpy", "pydantic", "rich", "torch", "transformers", "yaml")  # packages that each run imports


def main() -> int:
    """Run the command; exit code 2 if files of the user's hide modules that Python or distflow needs."""
    if hidden := hiding_files(sys.path):
        print(f"{', '.join(hidden)}: Python or a package has a module of this name, which distflow needs and cannot "
              "find, since PYTHONPATH puts your file before it.\nRename the file, or take its folder off PYTHONPATH: "
              "modules of the current folder and next to a DAG are found without it.", file=sys.stderr)
        return 2
    from distflow.cli import main as run_verb

    return run_verb()


def hiding_files(path: list[str]) -> list[str]:
    """Return the files on the search path that hide a module of Python's or of a package that runs import."""
    library = os.path.dirname(os.__file__)
    before = path[:path.index(library)] if library in path else []
    names = {f"{name}.py": name for name in (*sys.stdlib_module_names, *_USED)}
    return [os.path.join(folder, file) for folder in before if os.path.isdir(folder or ".") and folder != _ROOT
            for file in sorted(os.listdir(folder or ".")) if file in names]


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = _ROOT  # `-m` has put the current folder there, before Python's own modules
    sys.exit(main())
