"""Write the embedded task: arithmetic word problems in the shape of GSM8K, small enough to learn on two CPU cores.

    python dags/data/make_arithmetic.py     # rewrites dags/data/arithmetic/*.jsonl

One row is {"question": str, "answer": "<working> #### <number>", "level": 1 | 2 | 3}. The files depend on the seed and
on nothing else. Train and held-out never share a (template, operands) pair, so a problem cannot be remembered under
another name or another fruit.

`demonstrations` are the questions of `train`, answered by a hasty teacher who mostly stops after the first of two
steps. Whoever imitates them well is right on level 1 only: a weak start, from which reinforcement learning has to find
by itself that the longer answers are the right ones.

`preferences` are the first questions of `train`, each with its right answer as `chosen` and as `rejected` one of a
beginner's two mistakes: to stop after the first step, or to be wrong by one in the last.
"""
import argparse
import itertools
import json
import operator
import random
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ada", "Ben", "Cem", "Dia", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jun", "Kai", "Lea")
ITEMS = ("apples", "pears", "plums", "nuts", "shells", "stamps", "coins", "cards", "cups", "beads", "books", "stones")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HASTE = 0.8  # share of the two-step problems that the hasty teacher leaves after one step
LARGEST = 99  # every number of a problem, intermediate ones included, has at most two digits


@dataclass(frozen=True)
class Template:
    """One kind of problem.

    `ranges` maps each operand to its inclusive bounds. `steps` are the operations in order, written as
    "left operation right"; `_` stands for the result of the step before.
    """

    level: int
    text: str
    ranges: dict[str, tuple[int, int]]
    steps: tuple[str, ...]


BIG, MIDDLE, SMALL, FACTOR = (6, 20), (5, 15), (2, 9), (2, 6)
TEMPLATES = (
    Template(1, "{name} has {a} {items} and finds {b} more. How many {items} now?",
             {"a": BIG, "b": SMALL}, ("a + b",)),
    Template(1, "{name} has {a} {items} and gives away {b}. How many are left?",
             {"a": BIG, "b": SMALL}, ("a - b",)),
    Template(1, "{name} has {a} {items} and {other} has {b}. How many together?",
             {"a": BIG, "b": SMALL}, ("a + b",)),
    Template(1, "{name} has {a} {items}, {other} has {b}. How many more has {name}?",
             {"a": BIG, "b": SMALL}, ("a - b",)),
    Template(2, "{name} has {a} {items}, buys {b} and loses {c}. How many are left?",
             {"a": MIDDLE, "b": SMALL, "c": SMALL}, ("a + b", "_ - c")),
    Template(2, "A bus has {a} people. {b} get off and {c} get on. How many now?",
             {"a": MIDDLE, "b": SMALL, "c": SMALL}, ("a - b", "_ + c")),
    Template(2, "{name} bakes {a} cakes, sells {b} and eats {c}. How many are left?",
             {"a": MIDDLE, "b": SMALL, "c": SMALL}, ("a - b", "_ - c")),
    Template(2, "{name} has {a} red, {b} green and {c} blue {items}. How many in all?",
             {"a": MIDDLE, "b": SMALL, "c": SMALL}, ("a + b", "_ + c")),
    Template(3, "{name} fills {a} bags with {b} pens and {c} {items} each. How many things?",
             {"a": FACTOR, "b": FACTOR, "c": FACTOR}, ("b + c", "a * _")),
    Template(3, "{name} has {a} boxes of {b} {items} and {c} more. How many {items}?",
             {"a": FACTOR, "b": FACTOR, "c": SMALL}, ("a * b", "_ + c")),
    Template(3, "{name} buys {a} packs of {b} {items} and uses {c}. How many are left?",
             {"a": FACTOR, "b": FACTOR, "c": SMALL}, ("a * b", "_ - c")),
    Template(3, "{name} reads {a} pages a day for {b} days. The book has {c}. How many are left?",
             {"a": FACTOR, "b": FACTOR, "c": (10, 25)}, ("a * b", "c - _")),
)


def work_out(template: Template, operands: dict[str, int]) -> str | None:
    """Return "<working> #### <number>", or None when a number on the way leaves 1..LARGEST."""
    known = dict(operands)
    lines = []
    for step in template.steps:
        left, sign, right = step.split()
        result = OPERATIONS[sign](known[left], known[right])
        if not 1 <= result <= LARGEST:
            return None
        lines.append(f"{known[left]} {sign} {known[right]} = {result}")
        known["_"] = result
    return f"{', '.join(lines)} #### {known['_']}"


def problems(template: Template) -> list[tuple[dict[str, int], str]]:
    """List every (operands, answer) that the template allows."""
    choices = itertools.product(*(range(low, high + 1) for low, high in template.ranges.values()))
    every = (dict(zip(template.ranges, values, strict=True)) for values in choices)
    return [(operands, answer) for operands in every if (answer := work_out(template, operands))]


def tell(rng: random.Random, template: Template, operands: dict[str, int], answer: str) -> dict:
    """Dress a problem in names and items and return it as a row."""
    name, other = rng.sample(NAMES, 2)
    question = template.text.format(name=name, other=other, items=rng.choice(ITEMS), **operands)
    return {"question": question, "answer": answer, "level": template.level}


def make(train_rows: int, heldout_per_template: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return (train, held-out) rows in random order.

    Every template holds out up to `heldout_per_template` of its problems, but never more than a fifth of them: a small
    template has to keep enough to be learned from. Train draws templates evenly and asks no question twice.
    """
    rng = random.Random(seed)
    heldout, pools = [], []
    for template in TEMPLATES:
        pool = problems(template)
        rng.shuffle(pool)
        held = min(heldout_per_template, len(pool) // 5)
        heldout += [tell(rng, template, *problem) for problem in pool[:held]]
        pools.append((template, pool[held:]))
    train: dict[str, dict] = {}
    while len(train) < train_rows:
        template, pool = rng.choice(pools)
        row = tell(rng, template, *rng.choice(pool))
        train.setdefault(row["question"], row)
    rng.shuffle(heldout)
    return list(train.values()), heldout


def demonstrate(rng: random.Random, row: dict) -> dict:
    """Return the row as the hasty teacher answers it."""
    first, comma, _ = row["answer"].partition(", ")
    if not comma or rng.random() >= HASTE:
        return row
    return row | {"answer": f"{first} #### {first.split(' = ')[1]}"}


def miscalculate(rng: random.Random, answer: str) -> str:
    """Return the answer with a last step that is wrong by one."""
    working, _, final = answer.partition(" #### ")
    wrong = str(int(final) + (1 if final == "1" else rng.choice((-1, 1))))
    return f"{working.removesuffix(final)}{wrong} #### {wrong}"


def compare(rng: random.Random, row: dict) -> dict:
    """Return the row with the right answer as `chosen` and a wrong one as `rejected`."""
    hasty, right = demonstrate(rng, row)["answer"], row["answer"]
    same = hasty.rpartition(" ")[2] == right.rpartition(" ")[2]  # by chance the first step may give the final number
    return row | {"chosen": right, "rejected": miscalculate(rng, right) if same else hasty}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=6000, help="rows to train on")
    parser.add_argument("--heldout", type=int, default=20, help="most problems that one template holds out")
    parser.add_argument("--preferences", type=int, default=2000, help="pairs of a right and a wrong answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "arithmetic")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, heldout = make(options.train, options.heldout, options.seed)
    rng = random.Random(options.seed)
    demonstrations = [demonstrate(rng, row) for row in train]
    preferences = [compare(rng, row) for row in train[: options.preferences]]
    sets = {"train": train, "demonstrations": demonstrations, "heldout": heldout, "preferences": preferences}
    for name, rows in sets.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
