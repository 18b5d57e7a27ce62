"""Questions that are trained and validated are found, also where they differ a little."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from distflow.config.load import load
from distflow.data.checks import check_data
from distflow.data.dataset import open_records
from distflow.data.duplicates import normalized, overlaps

WORDS = """train leaves city river apple market farmer seven nine twice half price sells buys travels hours bottle paint
garden window ladder castle barrel copper silver""".split()  # noqa: SIM905


def question(seed: int, words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)).capitalize() + "?"


def written(path: Path, questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": each, "answer": "1"}) + "\n" for each in questions))
    return path


def near(text: str) -> str:
    """The same question with one other word."""
    words = text.split()
    return " ".join([*words[:15], "suddenly", *words[16:]])


@pytest.fixture
def files(tmp_path):
    trained = [question(seed) for seed in range(300)]
    held_out = [question(seed) for seed in range(1000, 1050)]
    trained[10], trained[20], trained[30] = held_out[5].upper(), near(held_out[6]), f" {held_out[7]} !"
    held_out[9] = held_out[5]
    return written(tmp_path / "train.jsonl", trained), written(tmp_path / "test.jsonl", held_out)


def test_equal_and_nearly_equal_questions_are_found(files):
    training, held_out = map(open_records, files)
    ((name, other, found),) = overlaps({"a": training}, {"b": held_out}, "question")
    assert (name, other, found.exact, found.near) == ("a", "b", 3, 1)
    assert found.examples == [(10, 5), (30, 7), (10, 9), (20, 6)]
    ((*_, found),) = overlaps({"a": training}, {"b": held_out}, "question", near=False)
    assert (found.exact, found.near) == (3, 0)


def test_other_numbers_in_a_short_question_are_another_question(tmp_path):
    asked = [f"What is {number} plus 17?" for number in range(20, 60)]
    training, held_out = (open_records(written(tmp_path / f"{index}.jsonl", asked[20 * index : 20 * index + 20]))
                          for index in range(2))
    ((*_, found),) = overlaps({"a": training}, {"b": held_out}, "question")
    assert (found.exact, found.near) == (0, 0)


def test_what_every_question_has_tells_no_two_apart(tmp_path):
    asked = [f"State the final answer to the following arithmetic problem: {number % 10} + {number // 4} ="
             for number in range(10, 50)]
    told = [f"State the final answer to the following word problem: {question(number, 40)}" for number in range(20)]
    for trained, held_out, near_ones in ((asked[:20], asked[20:], 0), (told[:10], told[10:], 0),
                                         ([*told[:10], told[15].replace(" price ", " worth ")], told[10:], 1)):
        training, other = (open_records(written(tmp_path / f"{index}.jsonl", each))
                           for index, each in enumerate((trained, held_out)))
        ((*_, found),) = overlaps({"a": training}, {"b": other}, "question")
        assert (found.exact, found.near) == (0, near_ones)


def test_validation_questions_that_are_trained_are_noted(files):
    settings = [f"data.train={files[0]}", f"validation.data={{test: {files[1]}}}"]
    (note,) = [note for note in check_data(load("grpo", None, settings)) if "validated" in note]
    assert f"3 of the 50 questions of {files[1]} are in the training set {files[0]}" in note
    assert "nearly" not in note
    (note,) = [note for note in check_data(load("grpo", None, settings), whole=True) if "validated" in note]
    assert "and 1 others nearly so" in note
    assert f"{files[1]}:7 is {files[0]}:21" in note


@pytest.mark.parametrize(("records", "said"), [
    ([("1 + 1?", "2"), ("1 - 1?", "0"), ("1  + 1?", "3")], "1 questions of"),
    ([("1 + 1?", "2"), ("1 - 1?", "0"), ("1 + 1? ", "2 ")], "1 of the 3 records of"),
    ([("1 + 1?", "2"), ("1 - 1?", "0"), ("1 + 2?", "3")], ""),
    ([("1 + 1?", "2")] * 2 + [(f"1 + {number}?", "3") for number in range(2, 30)], ""),
    ([("1 + 1?", "2")] + [(f"1 + {number}?", str(number)) for number in range(20)], "1 questions of")])
def test_questions_that_come_again_are_noted(tmp_path, records, said):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in records))
    notes = check_data(load("grpo", None, [f"data.train={path}", "data.batch=1"]))
    assert [note for note in notes if "come again" in note or "earlier one" in note] == \
        [note for note in notes if said and note.startswith(said)]
    assert bool(said) == any(f"{path}:" in note for note in notes)


@pytest.mark.parametrize(("answers", "settings", "kind"), [
    (("1 #### 2", "#### 3"), [], "answers_contradict"), (("1 + 1 #### 2", "#### 2"), [], ""),
    (("1,000", "1000."), [], ""), (("Paris", "paris"), [], ""), (("2", "3"), ["data.columns=[passage]"], "")],
    ids=["others", "other_steps", "commas", "capitals", "told_apart"])
def test_other_answers_to_the_same_questions_are_a_doubt_in_a_large_set_too(tmp_path, answers, settings, kind):
    path = tmp_path / "joined.jsonl"
    path.write_text("".join(json.dumps({"question": f"{number} + 1?", "answer": answer, "passage": answer}) + "\n"
                            for number in range(5001) for answer in answers))
    notes = check_data(load("grpo", None, [f"data.train={path}", *settings]))
    doubts = [note for note in notes if getattr(note, "kind", "")]
    assert [(note.kind, note.share) for note in doubts] == [(kind, 1.0)] * bool(kind)


def test_other_answers_to_the_same_questions_may_be_imitated(tmp_path):
    path = tmp_path / "several.jsonl"
    path.write_text("".join(json.dumps({"question": "1 + 1?", "answer": answer}) + "\n" for answer in ("2", "Two")))
    notes = check_data(load("sft", None, [f"data.train={path}", "data.batch=1"]))
    assert not any(getattr(note, "kind", "") for note in notes)


@pytest.mark.parametrize(("one", "other", "same"), [
    ("What is 1 + 1?", "what is 1+1", True), ("What is 1 + 1?", "What is 1 - 1?", False),
    ("Is 1.5 large?", "Is 15 large?", False), ("A well-known man.", "A well known man", True),
    ("Say \u201cno\u201d!", "say no", True), ("2 * 3", "2 / 3", False)])
def test_normalized_keeps_what_changes_a_question(one, other, same):
    assert (normalized(one) == normalized(other)) is same


@pytest.mark.parametrize(("sizes", "weights", "said"), [
    ((2, 400), (1, 1), "(2 of them) comes 50 times in this run, and each of {1} (400) 0.25 times: weights count "
     "prompts. For equally often:  data: {{train: {{{0}: 1, {1}: 200}}}}"),
    ((2, 210_000), (1, 1), "data: {{train: {{{0}: 1, {1}: 99997}}}}"),  # 100,000 in sum are the most
    ((2, 400), (1, 200), ""), ((10, 20), (1, 1), "")])
def test_a_small_set_that_comes_far_more_often_than_another_is_noted(tmp_path, sizes, weights, said):
    files = [written(tmp_path / f"{size}.jsonl", map(str, range(size))) for size in sizes]
    train = ", ".join(f"{file}: {weight}" for file, weight in zip(files, weights))
    notes = check_data(load("grpo", None, [f"data.train={{{train}}}", "data.batch=2", "steps=100"]))
    assert [note for note in notes if "weights count prompts" in note] == \
        [note for note in notes if said and note.endswith(said.format(*files))]
    assert any("weights count" in note for note in notes) == bool(said)
