"""Which conversations a killed worker had begun, and which of them went on at their turn."""

import json

from benchmarks.turn_recovery import Course, Kill

STEPS = [{"step": step, "seconds": 1.0, "loss": 0.5, "response/fingerprint": step * 7} for step in (1, 2)]


def write(path, lines):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def resumed(at, rank, rows):
    return {"time": at, "step": 1, "rank": rank, "event": "conversations_resumed", "rows": [*rows],
            "turns": [*rows.values()]}


def test_a_conversation_that_went_back_was_not_resumed(tmp_path, capsys):
    course = Course(tmp_path, "async", "Counted", 0)
    write(course.folder / "metrics.jsonl", STEPS)
    write(course.folder / "events.jsonl", [resumed(4.0, 2, {1: 1, 3: 1}), resumed(6.0, 2, {1: 2, 2: 3, 3: 0}),
                                           resumed(9.0, 2, {3: 2, 4: 1})])
    course.kills = [Kill("rank 1", 5.0, {1: 2, 2: 3, 3: 1, 5: 1}), Kill("an environment of rank 1", 8.0)]
    assert course.judge(STEPS) == (4, 2, [])
    assert "NOT resumed at their turn: 3 (0 of 1), 5 (none of 1)" in capsys.readouterr().out
    write(course.folder / "metrics.jsonl", [STEPS[0] | {"loss": 0.6}, STEPS[1] | {"response/fingerprint": 3}])
    assert course.judge(STEPS)[2] == ["async, Counted: step 1 has another loss",
                                      "async, Counted: step 2 has other tokens"]
