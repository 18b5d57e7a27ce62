"""`distflow new` and `schema`: begin an algorithm of your own, and help editors.

    new      a folder with a DAG, a run file, problems, a reward or an environment, and a test
    schema   the JSON schema of DAG, run or cluster files
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from distflow.cli.common import Verb
from distflow.config.shipped import MODELINE, SHIPPED, find_yaml
from distflow.contracts.rewards import shipped_rewards
from distflow.errors import Diagnostic, InvalidInput, did_you_mean, quoted

KINDS = ("dag", "run", "cluster")
_SCORE = re.compile(r"function: score,(?! *with:)")
_TALK = re.compile(r"environment: Calculator\b")
_REWARD = '''"""The reward of {name}: change it. `distflow nodes` lists what else there is."""

import re

from distflow import metric, reward


@reward
def {name}_reward(completion: str, answer: str, *, tried: float = 0.1) -> float:
    """Return 1 for the right number, `tried` for another one, and 0 for none."""
    said, right = (re.findall(r"-?\\d+", text.replace(",", ""))[-1:] for text in (completion, answer))
    metric("{name}/answered", bool(said))
    return 1.0 if said and said == right else tried if said else 0.0
'''
_TEST_HEAD = '''"""What is paid for, and that the algorithm is valid:  pytest {name}"""

import subprocess
import sys
from pathlib import Path

from {name} import {imported}

HERE = Path(__file__).parent


def test_the_algorithm_is_valid():
    command = [sys.executable, "-m", "distflow", "validate", "{name}.yaml", "--run", "run.yaml"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
'''
_TEST_REWARD = '''

def test_the_right_number_earns_most():
    assert {name}_reward("6 * 7 = 42", "#### 42") == 1.0
    assert {name}_reward("6 * 7 = 41", "#### 42") == 0.1
    assert {name}_reward("I cannot say", "#### 42") == 0.0


def test_held_out_problems_are_not_trained_on():
    trained, held_out = (set((HERE / f"{{file}}.jsonl").read_text().splitlines()) for file in ("train", "heldout"))
    assert held_out
    assert not trained & held_out
'''
_TEST_ENVIRONMENT = '''

def test_a_call_is_answered_and_the_right_number_earns_most():
    talk = {kind}("6 * 7 = 42 #### 42")
    assert talk.step("That is calc(6 * 7)") == Turn("42")
    assert talk.step("calc(123456789 - -1)") == Turn("123456790")
    for text in ("1,000 + 1 =", "calc(1,000 + 1)", "calc(1234567890 + 1)", "calc(2 + 3 * 4)", "#### 2024-11-27"):
        assert talk.step(text).done
    assert talk.step("6 * 7 = 42 #### 42") == Turn(done=True, reward=1.0)
    assert talk.step("#### 41") == Turn(done=True, reward=0.1)
    assert talk.step("I cannot say") == Turn(done=True)
'''
_ENVIRONMENT = '''"""The environment of {name}, with which the model talks turn by turn: change it."""

import re

from distflow import Turn, environment


@environment
class {kind}:
    """A calculator: a turn that ends in a call, as `calc(3 + 4)`, is answered with the result. Any other turn is the
    last, and earns 1 for the right number, `tried` for another one, and 0 for none."""

    def __init__(self, answer: str, *, tried: float = 0.1):  # fields of the data, then settings of the DAG
        self.right, self.tried = last_number(answer), tried

    def step(self, text: str) -> Turn:
        if call := re.search(r"\\bcalc\\((-?\\d{{1,9}}) *([-+*]) *(-?\\d{{1,9}})\\)\\s*$", text):
            return Turn(str(calculate(*call.groups())))
        said = last_number(text)
        return Turn(done=True, reward=1.0 if said and said == self.right else self.tried if said else 0.0)


def calculate(left: str, sign: str, right: str) -> int:
    """The tool: put yours here."""
    first, second = int(left), int(right)
    return first + second if sign == "+" else first - second if sign == "-" else first * second


def last_number(text: str) -> str:
    return (re.findall(r"-?\\d+", text.replace(",", "")) or [""])[-1]
'''
_PROBLEMS = {"train": 2000, "heldout": 120}  # lines of the shipped files that are a beginning
_RUN = {"steps": "50", "data": "{train: train.jsonl, batch: 32, max_prompt_tokens: 64, max_target_tokens: 64}",
        "validation": "{data: {heldout: heldout.jsonl}, every: 10, reward: REWARD}", "checkpoint": "{every: 10}"}
"""Settings of the shipped run file that a new algorithm has otherwise."""
_NOT_VALIDATED = """null
# Validation asks for single answers, without the environment, so that it is left out, and no problems are held out.
# Look at  environment/reward  instead, the mean reward of the conversations, and at trajectories/ of the run."""


_PYTEST = """# The settings of a folder above, as of a clone of distflow, do not hold for these tests.
[pytest]
"""


def _add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("algorithm", metavar="DAG",
                        help="a shipped algorithm to begin with: with a reward, as grpo, or an environment: grpo_tools")
    parser.add_argument("name", metavar="NAME",
                        help="folder of the new algorithm, whose name its module has, as my_algo or code/my_algo")


def new(options: argparse.Namespace) -> int:
    folder = Path(options.name)
    name = folder.name
    if not _is_usable(name):
        meant = folder.with_name(_usable_name(name)) if name else folder / _usable_name(name)
        raise InvalidInput(f"`{name or options.name}` cannot name an algorithm, which is a Python module too. Use "
                           f"small letters, digits and _:  distflow new {options.algorithm} {quoted(meant)}")
    if _is_taken(name):
        raise InvalidInput(f"there is another Python module `{name}`, which this algorithm's would hide. Use another "
                           f"name:  distflow new {options.algorithm} {quoted(folder.with_name(_usable_name(name)))}")
    files = _files(options.algorithm, name)
    try:
        if folder.exists():
            raise InvalidInput(f"{folder} exists. Choose another name, or delete it.")
        folder.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be made: {error.strerror}. Choose another folder, as this one:  "
                           f"distflow new {options.algorithm} {name}") from None
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    print("\n".join([f"made {folder}/ with {', '.join(files)}. Next:", "", f"  cd {quoted(folder)}", "  pytest",
                     f"  distflow run {name}.yaml --run run.yaml", "",
                     *_what_to_change(files, name),
                     "Every 10 steps are saved: end the run at any time, and go on with it:",
                     f"  distflow resume runs/{name}-1"]))
    return 0


def _what_to_change(files: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return two lines for the user: which files of the project to change."""
    if "heldout.jsonl" in files:
        return (f"The reward, by which it is validated too, is in {name}.py; the problems are in train.jsonl and",
                "heldout.jsonl.")
    return (f"The environment, with its tool and what it pays, is in {name}.py; the problems are in train.jsonl.",
            "How conversations go is in trajectories/ of the run, what they earn is `environment/reward`.")


def _is_usable(name: str) -> bool:
    return bool(re.fullmatch(r"[a-z][a-z0-9_]*", name)) and not keyword.iskeyword(name) and \
        name not in shipped_rewards()


def _is_taken(name: str) -> bool:
    """Return whether Python finds a module of this name elsewhere than in the current folder."""
    if name in sys.stdlib_module_names:
        return True
    found = importlib.util.find_spec(name)
    files = [*(found.submodule_search_locations or ()), found.origin] if found else []
    return any(Path(file).parent.resolve() != Path.cwd() for file in files[:1] if file)


def _usable_name(name: str) -> str:
    """Return a name for an algorithm that is like one that cannot be its name."""
    meant = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "my_algo"
    return meant if _is_usable(meant) and not _is_taken(meant) else f"my_{meant}"


def _files(algorithm: str, name: str) -> dict[str, str]:
    """Return the files of a new algorithm. Raises InvalidInput: it is not shipped, or has no place for a reward."""
    dag = find_yaml(algorithm, "", "DAG").read_text(encoding="utf-8")
    if not (talks := _TALK.search(dag)) and not _SCORE.search(dag):
        begin = sorted(file.stem for file in SHIPPED.glob("*.yaml")
                       if _SCORE.search(text := file.read_text(encoding="utf-8")) or _TALK.search(text))
        raise InvalidInput(Diagnostic(f"{algorithm} scores no answers, so that it has no place for a reward", None,
                                      did_you_mean(algorithm, begin, "These have one, or an environment")))
    kind = "".join(part.capitalize() for part in name.split("_")) + "Environment"
    dag = _SCORE.sub(f"function: score, with: {{reward: {name}_reward}},", _without_modeline(dag))
    dag = _TALK.sub(f"environment: {kind}", dag)
    dag = re.sub(r"^name: .*$", f"name: {name}\nimports: [{name}]", dag, flags=re.MULTILINE)
    run = _without_modeline((SHIPPED / "runs/embedded.yaml").read_text(encoding="utf-8"))
    run = re.sub(r"^#.*\n", "# A tiny model for two CPU cores; its problems are beside this file.\n", run, count=1)
    for key, value in _RUN.items() if not talks else {**_RUN, "validation": _NOT_VALIDATED}.items():
        run = re.sub(rf"^{key}: .*$", f"{key}: {value}".replace("REWARD", f"{name}_reward"), run, flags=re.MULTILINE)
    code, more, imported = (_ENVIRONMENT, _TEST_ENVIRONMENT, f"{kind}, Turn") if talks else \
        (_REWARD, _TEST_REWARD, f"{name}_reward")
    return {f"{name}.yaml": dag + _modeline("dag"), "run.yaml": run + _modeline("run"),
            f"{name}.py": code.format(name=name, kind=kind),
            f"test_{name}.py": (_TEST_HEAD + more).format(name=name, kind=kind, imported=imported),
            **{f"{file}.jsonl": _problems(file, count) for file, count in _PROBLEMS.items()
               if file == "train" or not talks},
            "pytest.ini": _PYTEST}


def _problems(kind: str, count: int) -> str:
    text = (SHIPPED / f"data/arithmetic/{kind}.jsonl").read_text(encoding="utf-8")
    return "".join(text.splitlines(keepends=True)[:count])


def _without_modeline(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(MODELINE))


def _modeline(kind: str) -> str:
    return f"{MODELINE}{SHIPPED / 'schema' / f'{kind}.json'}\n"


def _add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="of file")


def schema(options: argparse.Namespace) -> int:
    from distflow.cli.json_schema import schema as schema_of

    print(json.dumps(schema_of(options.kind), indent=1, ensure_ascii=False))
    return 0


VERBS = {
    "new": Verb("make a folder with an algorithm of your own: DAG, run file, problems, reward or environment, test",
                _add_new_arguments, new),
    "schema": Verb("print the JSON schema of DAG, run or cluster files, for editors", _add_schema_arguments, schema),
}
