"""`distflow plan` of runs on this machine and on others, and arguments that verbs do not take."""

from __future__ import annotations

import json
import shlex

import pytest

from distflow.cli import main

PAIR = """
devices: {core: {tflops: {float32: 0.05}, memory_gib: 4, memory_gb_s: 10}}
machines: {here: {device: core, devices: 1}, there: {device: core, devices: 1}}
links: {zone: {gb_s: 1, latency_us: 50}}
"""


def test_what_this_machine_lacks_is_no_mistake_in_a_plan_of_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    planned = ["--cluster", "pair.yaml", "--set", "roles.actor.rollout=vllm", "--set",
               "data.train=/cluster/train.jsonl"]
    assert main(["plan", "grpo", *planned, "--place", "--within", "0.99", "--out", "placed.yaml"]) == 0, \
        capsys.readouterr().err
    assert main(["plan", "grpo", "--run", "placed.yaml"]) == 0, capsys.readouterr().err
    assert "there is no data `/cluster/train.jsonl`: a run on this machine" in capsys.readouterr().out


def test_a_run_of_other_machines_is_planned_without_what_this_one_lacks(tmp_path, capsys):
    """Of the model there is the configuration, of the data nothing; memory is known all the same."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 4096}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, **shape}))
    words = ["grpo", "--ranks", "16", "--set", f"roles.actor.model={model}", "--set", "data.train=/cluster/train.jsonl"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "at its fullest" in said
    assert "it has no weights (*.safetensors): a run on this machine would be refused" in said
    assert "there is no data `/cluster/train.jsonl`: a run on this machine would be refused" in said
    assert main(["validate", *words]) == 2
    assert "2 mistakes." in capsys.readouterr().err
    (model / "config.json").unlink()
    assert main(["plan", *words]) == 2


def test_notes_of_the_run_stand_below_a_plan_for_mixed_hardware(tmp_path, monkeypatch, capsys):
    """Of a setting that changes nothing, and of what this machine lacks; once each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    words = ["grpo", "--cluster", "pair.yaml", "--set", "data.train=/cluster/train.jsonl", "--set",
             "roles.reference.follow={every: 9000, mix: 0.6}"]
    notes = ("role `reference` would follow `actor` every 9000 steps", "there is no data `/cluster/train.jsonl`: a run")

    def noted(*command: str) -> bool:
        assert main(["plan", *command]) == 0
        said = capsys.readouterr().out
        return all(said.count(f"\nnote: {note}") == 1 for note in notes)

    assert noted(*words, "--place", "--out", "placed.yaml")


def test_keys_and_environments_of_other_machines_are_notes_of_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    monkeypatch.setenv("DISTFLOW_SGLANG_PYTHON", "/cluster/bin/python")
    dag = tmp_path / "served.yaml"
    dag.write_text("""
name: served
roles: {actor: {trained: true}}
nodes:
  rollout: {role: actor, type: MODEL_INFERENCE, function: generate}
  reward:  {role: reward, type: COMPUTE, function: score, dependencies: [rollout],
            with: {reward: {judge: {address: "http://localhost:1/v1", model: big, key_variable: JUDGE_KEY}}}}
  teacher: {role: reward, type: COMPUTE, function: served_top_logprobs, dependencies: [rollout],
            with: {address: "http://localhost:1/v1", model: big, key_variable: TEACHER_KEY}}
  update:  {role: actor, type: MODEL_TRAIN, function: distillation_update, dependencies: [teacher]}
""")
    words = [str(dag), "--set", "roles.actor.rollout=sglang"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "environment variable JUDGE_KEY, which is not set: a run on this machine would be refused" in said
    assert "environment variable TEACHER_KEY, which is not set: a run on this machine would be refused" in said
    assert "names `/cluster/bin/python`, which is no executable file: a run on this machine would be refused" in said
    assert main(["validate", *words]) == 2
    assert "3 mistakes." in capsys.readouterr().err


@pytest.mark.parametrize("mode", [[], ["--set", "mode=async", "--set", "groups.rollout=2"]])
def test_what_vllm_takes_is_shown_where_no_memory_is_known(mode, tmp_path, capsys):
    given = ["plan", "grpo", "--ranks", "4", "--set", "roles.actor.rollout=vllm", "--set",
             "roles.actor.generation.memory_share=0.4", *mode]
    assert main(given) == 0
    assert "actor: rollout engine  40%  vllm: generation.memory_share, weights and cache" in capsys.readouterr().out
    (tmp_path / "known.yaml").write_text("memory_gib: 80\n")
    assert main([*given, "--cluster", str(tmp_path / "known.yaml")]) == 0
    said = capsys.readouterr().out
    assert "memory_share 0.4 × 80 GiB" in said
    assert "40%" not in said


def test_a_folder_for_runs_that_cannot_be_written_is_a_note_of_a_plan(capsys):
    assert main(["plan", "grpo", "--set", "output=/proc/runs"]) == 0
    assert "note: the run folder cannot be written, /proc is not writable" in capsys.readouterr().out
    assert main(["validate", "grpo", "--set", "output=/proc/runs"]) == 2
    assert "the run folder cannot be written: /proc is not writable" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "instead"), [
    ("grpo --steps 3", "Instead:  --set steps=3"), ("grpo --steps=3", "Instead:  --set steps=3"),
    ("grpo --roles.actor.learning_rate 1", "Instead:  --set roles.actor.learning_rate=1"),
    ("grpo --set steps 3", "Instead:  --set steps=3"), ("grpo mine.yaml", "Instead:  --run mine.yaml"),
    ("'my dag.yaml' 'run file.yaml'", "Instead:  --run 'run file.yaml'"),
    ("grpo --data.train 'no ne.jsonl'", "Instead:  --set 'data.train=no ne.jsonl'"),
    ("grpo --data '{train: x.jsonl, batch: 3}'", "Instead:  --set 'data={train: x.jsonl, batch: 3}'"),
    ("grpo --set output 'my runs'", "Instead:  --set 'output=my runs'"),
    ("grpo --verbose", "distflow validate --help")])
def test_an_argument_that_a_verb_does_not_take(line, instead, capsys):
    assert main(["validate", *shlex.split(line)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("distflow validate takes no `")
    assert instead in said


def test_what_other_tools_call_a_verb(capsys):
    assert main(["check", "grpo"]) == 2
    assert "distflow has no command `check`. Did you mean `validate`?" in capsys.readouterr().err
