import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import rows
from benchmarks.contender import ROOT, Contender
from benchmarks.databuffer_vs_peers import Round, goals, measure
from benchmarks.rows import PADDED, RAGGED, Case
from distflow.data.row_copies import COPIES

FAKE = '''
from benchmarks.contender import serve
from benchmarks.rows import Case

class Fake:
    """Says that all rows have arrived, but for what `mistake` does to them."""
    def prepare(self, case):
        self.case = Case(**case)
    def make(self):
        print("noise, which is no answer")
    def round(self, repeat):
        return 0.5
    def check(self, repeat, contents):
        ids = list(range(self.case.first_id(repeat), self.case.first_id(repeat + 1)))
        MISTAKE
        return {"ids": [ids[:3], ids[3:]], "wrong": []}

serve(Fake())
'''


@pytest.fixture
def fake(tmp_path, forked):
    """A contender that makes a mistake."""
    made = []

    def make(mistake: str) -> Contender:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("MISTAKE", mistake))
        made.append(Contender("fake", [sys.executable, script]))
        return made[-1]

    yield make
    for contender in made:
        contender.close()


def arrived(case: Case, repeat: int, pad: bool) -> tuple[torch.Tensor, rows.Columns]:
    ids = case.ids(repeat, 1)
    return ids, rows.make(case, 1, pad) | {"rewards": rows.rewards(case, repeat, ids)}


@pytest.mark.run
def test_without_peers_it_runs_and_says_what_came_out():
    command = [sys.executable, "-m", "benchmarks.databuffer_vs_peers", "--quick", "--sizes", "0.5",
               "--tokens", "16", "64", "--layouts", "4-2", "4-4", "4-4@2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{COPIES}\n")
    for name in ("4→2 padded", "4→2 ragged", "4→4 ragged", "4→4 on 2 machines ragged", "left out: every size"):
        assert name in done.stdout
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == {"claim", "value", "unit", "low", "high", "goal", "met"}
    assert last["value"] > 0


@pytest.mark.parametrize(("mistake", "expected"), [
    ("ids.pop()", r"lost \[15\], never sent \[\]"),
    ("ids[0] = ids[1]", r"lost \[8\]"),
    ("ids = [number - self.case.rows for number in ids]", r"never sent \[0, 1, 2, 3, 4\]"),
    ("ids.append(ids[0])", "9 rows arrived of 8"),
])
def test_wrong_rows_end_the_benchmark(fake, mistake, expected):
    case = Case(0, 2, 2, prompt=4, response=4)
    contender = fake(mistake)
    contender.ask("prepare", case=dataclasses.asdict(case))
    contender.measure_baseline()
    with pytest.raises(SystemExit, match=expected):
        measure(contender, case, 3, 0)


@pytest.mark.parametrize("form", [PADDED, RAGGED])
@pytest.mark.parametrize("pad", [True, False])
def test_contents_are_known_by_id_and_repeat(form, pad):
    case = Case(0.01, 2, 2, form=form, prompt=5, response=9)
    ids, columns = arrived(case, 3, pad)
    assert rows.wrong(case, 3, ids, columns) == ""
    assert "rewards" in rows.wrong(case, 2, ids, columns)
    assert "rewards" in rows.wrong(case, 3, ids.flip(0), columns)
    for name in rows.PER_TOKEN:
        values = columns[name] if pad else columns[name][0]
        changed = values.clone()
        changed.view(-1)[-1] = ~changed.view(-1)[-1] if changed.dtype == torch.bool else changed.view(-1)[-1] + 1
        found = rows.wrong(case, 3, ids, columns | {name: changed if pad else (changed, columns[name][1])})
        assert name in found


def test_goals_are_those_of_the_layout_that_shows_least():
    def pair(ours: float, verl: float) -> dict[str, Round]:
        return {"databuffer": Round(ours, 10), "verl": Round(verl, 10)}

    results = {Case(160, 4, 2): [pair(1, 30)], Case(160, 2, 4): [pair(1, 19)], Case(40, 4, 2): [pair(1, 2)],
               Case(160, 4, 2, form=RAGGED): [pair(1, 50)]}
    found = list(goals(results))
    assert found[0].claim == "redistribution at 160 MiB 2→4 padded, databuffer over verl"
    assert (found[0].measured.median, found[0].goal, found[0].met) == (19, 20, False)
    ragged = next(goal for goal in found if "ragged, databuffer over" in goal.claim)
    assert (ragged.goal, ragged.met) == (40, True)
    assert all(goal.met for goal in found if not goal.at_least)
