"""Tasks with one fault each are refused or noted before torch is loaded, and good ones start without a word."""

from __future__ import annotations

from functools import partial

import pytest
from preflight_tasks import ANSWERED, CALLED, CHOICES, PAIRS, SUMS, Task, changed, check_fault, proved


def reward(body: str, name: str = "mine", arguments: str = "completion: str, answer: str") -> str:
    return f"@reward\ndef paid({arguments}):\n    {body}\n"


PROGRAMS = [{"question": f"Write f that adds {a + 2}.", "answer": f"```python\ndef f(x): return x + {a + 2}\n```",
             "tests": f"assert f(1) == {a + 3}"} for a in range(3)]
TRANSLATED = "The house is number {}.", "La maison est au {}."
MINE = partial(Task, SUMS, "mine:paid")


def _formed(pattern: str, records: list = SUMS) -> Task:
    return Task(records, {"math": 1.0, "format": {"weight": 0.1, "pattern": pattern}})


FAULTY: dict[str, tuple[Task, bool, str]] = {
    "answers are all alike": (Task([{**each, "level": "hard"} for each in SUMS], data={"answer": "level"}), False,
                              "has the answer `hard`, whatever its question is"),
    "answers are the questions": (Task([{**each, "answer": each["question"]} for each in SUMS]), False,
                                  "has its question as its answer"),
    "questions end with their answers": (Task([{**each, "question": f"{each['question']}\n{each['answer']}"}
                                               for each in ANSWERED]), False, "ends with its answer"),
    "chosen answers begin with their questions": (
        Task([{**each, **{name: f"{each['question']} {each[name]}" for name in ("chosen", "rejected")}}
              for each in PAIRS], dag="dpo", data={"columns": ["chosen", "rejected"]}), False,
        "has an answer that begins with its question"),
    "answers go on with the next question": (
        Task([{"question": f"How much is {each['question']}", "answer": f"{each['answer']} How much is {later}"}
              for each, later in zip(SUMS, [each["question"] for each in (*SUMS[1:], SUMS[0])])], dag="sft"), False,
        "has an answer that goes on with another record's question"),
    "choices in another case": (Task([{**each, "answer": each["answer"].lower()} for each in CHOICES]), False,
                                "offers the choices A B C, and its answer is `a`"),
    "chosen is rejected": (Task([{**each, "rejected": each["chosen"]} for each in PAIRS], dag="dpo",
                                data={"columns": ["chosen", "rejected"]}), True, "has the same answer as `chosen`"),
    "chosen is the worse answer": (Task([{**each, "score_chosen": 5, "score_rejected": 7.0} for each in PAIRS],
                                        dag="dpo", data={"columns": ["chosen", "rejected"]}), False,
                                   "has a `score_chosen` that is not above its `score_rejected`"),
    "chosen is rated worse": (Task([{**each, "chosen_rating": 5, "rejected_rating": 7.0} for each in PAIRS],
                                   dag="dpo", data={"columns": ["chosen", "rejected"]}), False,
                              "has a `chosen_rating` that is not above its `rejected_rating`"),
    "arguments of a tool are no JSON": (Task([changed(each, arguments="x=1") for each in CALLED]), True,
                                        "arguments are not a JSON object: `x=1`"),
    "tools that no prompt shows": (Task([{**each, "tools": [{"type": "function", "function": {"name": "add"}}]}
                                         for each in SUMS]), False, "has tools in its field `tools`, which no prompt"),
    "a passage that no prompt shows": (Task([{**each, "context": f"{each['answer']} is the sum."} for each in SUMS]),
                                       False, "has a text in its field `context`, which its prompt does not show"),
    **{f"choices that no prompt shows, {kind}": (
        Task([{"question": f"Which is {a} + 3?", name: value, "answer": "B"} for a in range(3)] + [
            {"question": "And 1 + 3?", name: value, "answer": "A"}]), False, f"has a text in its field `{name}`")
       for kind, name, value in (("a list", "choices", ["three", "four"]),
                                 ("a mapping", "options", {"text": ["three", "four"], "label": ["A", "B"]}))},
    "held-out questions are trained on": (Task(SUMS, held_out=SUMS), False, "questions of heldout.jsonl are in the "
                                          "training set"),
    "references that are not understood": (Task([{**each, "answer": rf"\foo{{{each['answer']}}} or ("}
                                                 for each in SUMS], "math"), True, "reward `math` cannot judge"),
    "tests that the solution fails": (Task([{**each, "tests": "assert f(1) == 1"} for each in PROGRAMS], "code",
                                           data={"columns": ["tests"]}), True, "reward `code` does not pay in full"),
    "tests that test nothing": (Task([{**each, "answer": "see the tests", "tests": "assert True"}
                                      for each in PROGRAMS], "code", data={"columns": ["tests"]}), True,
                                "reward `code` pays an empty answer as much as the answer of each of the first 3"),
    "a reward that raises": (MINE(reward("return answer.score")), True, "raised AttributeError: 'str' object has no "
                             "attribute 'score', at"),
    "a reward that cannot read what is no number": (MINE(reward("return float(int(completion) == int(answer))")),
                                                    False, "raised ValueError: invalid literal for int()"),
    "a reward that reads messages": (MINE(reward("return float(completion[0]['content'] == answer)")), True,
                                     'Write  completion  in place of  completion[0]["content"]'),
    "a reward of a form that nobody knows": (MINE(reward(
        "import json; return float(json.loads(completion)['answer'] == answer)")), False,
        "raised TypeError: 'int' object is not"),
    "a pattern of two beginnings": (Task(SUMS, {"format": {"pattern": "So: ^[0-9]+"}}), False,
                                    "reward `format` has a `pattern`, `So: ^[0-9]+`, that matches no right answer"),
    "a pattern that right answers do not have": (_formed("The result: [a-z]+"), False,
                                                 "Instead: reward: {format: {pattern: '.*\\\\boxed\\{.+\\}.*'}}"),
    "a pattern that is escaped twice": (_formed(r".*\\\\boxed\{.*\}"), False,
                                        "matches no right answer to each of the first 3"),
    "a reward that takes seconds": (MINE(reward("import time; time.sleep(1.2); return float(completion == answer)")),
                                    False, "takes over 1 s for a call"),
    "a reward that compares the wrong way round": (MINE(reward("return float(completion in answer)")), False,
                                                   "pays an empty answer no less than the answer of each"),
    "a constant reward": (MINE(reward("return 0.5")), False, "pays 0.5 for all that was tried"),
    "a reward without a return": (MINE(reward("completion == answer")), True, "returned None, not a finite number"),
    "a reward of two without a return": (
        Task(SUMS, {"mine:paid": 1.0, "math": 1.0}, reward("completion == answer")), True, "returned None, not"),
    "a reward of two for samples of another kind": (
        Task(SUMS, {"mine:paid": 1.0, "math": 1.0}, reward("return 1.0 if len(answer) > 9 else None")), False,
        "the sample's other rewards count alone"),
    "a list that is too short": (MINE(reward("return [1.0]", arguments="completions: list[str], answers: list[str]")),
                                 True, "it returned a list of 1 for"),
    "a module that exits": (MINE("raise SystemExit(3)\n" + reward("return 0.0")), True, "SystemExit: 3"),
    "a service that does not answer": (MINE(reward("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')"
                                                   )), False, "raised URLError"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_task_with_a_fault_is_refused_or_noted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_fault(*FAULTY[name], tmp_path, f"faulty_{[*FAULTY].index(name)}")


GOOD = {
    "numbers that are no text": Task([{**each, "answer": int(each["answer"])} for each in SUMS], "math"),
    "choices": Task(CHOICES, "math"),
    "parts of a question": Task([{"question": f"(a) Add {a}. (b) Say the digit.", "answer": str(a % 10)}
                                 for a in range(2, 14)], "math"),
    "passages that are shown": Task([{"context": f"{a} is even.", "question": f"{a} is even. Is it?", "answer": "yes"}
                                     for a in range(12)] + [{"context": " ", "question": "3?", "answer": "no"}]),
    "translations both ways": Task([{"question": turn.format(a), "answer": back.format(a)} for a in range(12)
                                    for turn, back in (TRANSLATED, TRANSLATED[::-1])], dag="sft"),
    "a talk in records": Task([{"question": f"Line {a} of a talk.", "answer": f"Line {a + 1} of a talk."}
                               for a in range(12)], dag="sft"),
    "scored pairs": Task([{**each, "score_chosen": 7, "score_rejected": 5.0} for each in PAIRS], dag="dpo",
                         data={"columns": ["chosen", "rejected"]}),
    "choices that are shown": Task([{"question": f"{a} + 3?\nA) three\nB) four\nC) five\n", "choices": [
        "three", "four", "five"], "answer": "ABC"[a % 3]} for a in range(12)]),
    "a reward of one's own": MINE(reward("return float(completion.strip().endswith(answer))")),
    "a reward of lists": MINE(reward("return [float(c.strip() == a) for c, a in zip(completions, answers)]",
                                     arguments="completions: list[str], answers: list[str]")),
    "a reward of tokens": MINE(reward("return float(completion == answer) - 0.001 * len(response)",
                                      arguments="completion: str, answer: str, response: list[int]")),
    "a reward of a field": Task([{**each, "source": "sums"} for each in SUMS],
                                {"by": "source", "rewards": {"sums": "math", "other": "format"}},
                                data={"columns": ["source"]}),
    "several rewards": Task(SUMS, {"math": 1.0, "format": {"weight": 0.1}, "length": {"weight": 0.1, "cap": 100}}),
    "a pattern of tags": _formed(r"<think>.*?</think>\s*<answer>.*?</answer>"),
    "a pattern of a last line": _formed(r"\A[\s\S]+\n#### (?P<answer>\d+|none)\s*\Z", ANSWERED),
    "a pattern alone": Task(SUMS, {"format": {"pattern": r"So: (\w+\s){3,}.*"}}),
    "programs": Task(PROGRAMS, "code", data={"columns": ["tests"]}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_task_is_proved_without_a_word(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    account = proved(GOOD[name], tmp_path, f"good_{[*GOOD].index(name)}")
    assert account.doubts == []
    assert {"data", "rewards"} <= account.proved.keys()


@pytest.mark.parametrize(("body", "calls"), [("return float(completion == answer)", 6), ("return 0.5", 27)])
def test_a_reward_of_ones_own_is_called_seldom(body, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counted = reward(f"open({str(tmp_path / 'calls')!r}, 'a').write('x'); {body}")
    proved(MINE(counted, held_out=[{"question": "2 * 2?", "answer": "4"}] * 3), tmp_path, f"counted_{calls}")
    assert len((tmp_path / "calls").read_text()) == calls
