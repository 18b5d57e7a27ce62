"""A resumed run says which data files are others than it began with, and where it continues in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distflow.config.load import load, load_for_planning
from distflow.data.data_files import DataFiles, changes, data_files, frozen_weights
from distflow.data.dataloader import Dataloader
from distflow.data.dataset import open_training_sets
from distflow.errors import InvalidInput


def written(path: Path, count: int, sign: str = "+") -> Path:
    path.write_text("".join(json.dumps({"question": f"{n} {sign} 1?", "answer": "1"}) + "\n" for n in range(count)))
    return path


def files_of(folder: Path, *settings: str) -> DataFiles:
    spec = load("grpo", None, [f"data.train={folder / 'train.jsonl'}", *settings])
    return data_files(spec, open_training_sets(spec.run.data, spec.data_path))


@pytest.mark.parametrize(("count", "sign", "resized", "how"), [
    (8, "+", None, ""), (8, "-", False, "8 records as before, with other content"),
    (6, "+", True, "6 records, and 8 before")])
def test_a_replaced_file_is_known(tmp_path, count, sign, resized, how):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    written(train, 8), written(test, 8)
    held_out = f"validation.data={{mine: {test}}}"
    before = json.loads(json.dumps(files_of(tmp_path, held_out)))
    written(train, count, sign), written(test, count, sign)
    found = sorted(changes(before, files_of(tmp_path, held_out)))
    assert found == ([] if resized is None else [(str(train), resized, how), ("validation mine", resized, how)])


def test_a_resumed_run_that_names_the_whole_path_means_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "train.jsonl", 8)
    assert files_of(Path()) == files_of(tmp_path)


def test_a_long_file_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr("distflow.data.data_files._WHOLE", 2**10)
    monkeypatch.setattr("distflow.data.data_files._SAMPLE", 2**8)
    before = files_of_size(tmp_path, 200_000)
    assert [*changes(before, files_of_size(tmp_path, 200_000))] == []
    assert [*changes(before, files_of_size(tmp_path, 200_001))] != []


def files_of_size(folder: Path, size: int) -> DataFiles:
    (folder / "train.jsonl").write_text(json.dumps({"question": "x" * size, "answer": "1"}))
    return files_of(folder)


@pytest.mark.parametrize(("now", "position", "said"), [
    ([8, "a"], 12, ""),
    ([8, "b"], 12, "8 records as before, with other content. Training continues at record 5 of pass 2"),
    ([5, "b"], 15, "5 records, and 8 before. Training continues at record 1 of pass 4 over it")])
def test_a_loader_continues_in_a_replaced_file(now, position, said, capsys):
    records = [{}] * 8
    old = Dataloader(records, None, 4, 0, files={"a.jsonl": [8, "a"]})  # pyright: ignore[reportArgumentType]
    old.position = 12
    new = Dataloader([{}] * now[0], None, 4, 0, files={"a.jsonl": now})  # pyright: ignore[reportArgumentType]
    new.load_state_dict(old.state_dict())
    assert new.position == position
    out = capsys.readouterr().out
    assert said in out
    assert bool(out) == bool(said)
    assert not re.search("cannot be compared", out)


def test_frozen_weights_are_those_of_the_files_that_are_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, '
                                          '"num_attention_heads": 4, "vocab_size": 320, "intermediate_size": 64}')
    spec, found = load_for_planning("grpo", None, [f"roles.actor={{model: {tmp_path}, lora: {{rank: 4}}}}"]), []
    for name, content in (("model.safetensors", b"1"), ("training_args.bin", b"2"), ("consolidated.safetensors", b"3"),
                          ("model.safetensors", b"4")):
        (tmp_path / name).write_bytes(content)
        found.append(frozen_weights(spec)["frozen weights of role actor"])
    assert found[0] == found[1] == found[2] != found[3]


def test_other_frozen_weights_are_said_or_refused(tmp_path, capsys):
    """A reference may be another one; adapters have learned to stand on their base alone."""
    files = []
    for seed in (0, 0, 1):
        embedded = [f"seed={seed}", "roles.actor.model={architecture: qwen3}"]
        files.append([frozen_weights(load("grpo", None, [*embedded, *more])) for more in (
            [], ["roles.actor.lora={rank: 4}"], ["roles.actor.freeze=[embed_tokens.*]"])])
    assert files[0] == files[1] != files[2]
    for before, now in zip(files[0], files[2]):
        old, new = (Dataloader([{}], None, 4, 0, files=each) for each in (  # pyright: ignore[reportArgumentType]
            before, now))
        if any("of role actor" in name for name in before):
            with pytest.raises(InvalidInput, match="frozen weights of role actor are not those that"):
                new.load_state_dict(old.state_dict())
        else:
            new.load_state_dict(old.state_dict())
            assert "the model of role reference has other weights than the run began with" in capsys.readouterr().out
