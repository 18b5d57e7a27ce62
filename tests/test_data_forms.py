"""A run on what datasets really have: several files, chat messages, numbers as answers, an empty question, and texts
that end."""

from __future__ import annotations

import json

from harness import metrics_of

STOP = ["e", "a", "n"]
REWARD = """
from distflow import reward

@reward
def told(completion, answer, question):
    with open("told.jsonl", "a") as file:
        import json
        file.write(json.dumps([question, answer, completion]) + "\\n")
    return 1.0 / (1 + len(completion))
"""


def test_a_run_on_messages_and_numbers(launch, workspace):
    system = {"role": "system", "content": "Add."}
    records = [{"question": [system, {"role": "user", "content": "1 + 1?"}], "answer": 2},
               {"question": "2 + 2?", "answer": 4.0}, {"question": " ", "answer": 6}]
    (workspace / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (workspace / "more.jsonl").write_text(json.dumps({"question": "3 + 3?", "answer": 6}))
    (workspace / "brevity.py").write_text(REWARD)
    grpo = (workspace / "grpo.yaml").read_text().replace("reward: brevity", "reward: told")
    (workspace / "grpo.yaml").write_text(grpo)
    done = launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "forms", "--set", "steps=2",
                  "--set", "data.batch=4", "--set", "data.system_prompt=Reckon.", "--set", "data.prompt_suffix= Now.",
                  "--set", "data.train={train.jsonl: 3, more.jsonl: 1}", "--set", "data.columns=[source]",
                  "--set", "samples=4", "--set", f"roles.actor.generation.stop={json.dumps(STOP)}",
                  "--set", "validation={data: {same: train.jsonl}}")
    assert "note: 1 of the 3 records of train.jsonl that were read have an empty field" in done.stdout
    told = [json.loads(line) for line in (workspace / "told.jsonl").read_text().splitlines()]
    assert {(question, answer) for question, answer, _ in told} == {("1 + 1?", "2"), ("2 + 2?", "4"), ("3 + 3?", "6")}
    assert any(letter in completion for _, _, completion in told for letter in STOP)
    run = workspace / "runs/forms"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["source"]) for line in samples].count((1, "more")) == 1
    assert len(samples) == 8
    assert [values["data/records_skipped"] for values in metrics_of(run).values()] == [1, 1]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    skipped = [event for event in events if event["event"] == "record_skipped"]
    assert [event["where"].rpartition("/")[2] for event in skipped] == ["train.jsonl:3"]
    assert max(values["mismatch/logprob_max"] for values in metrics_of(run).values()) < 1e-5
    assert all(values["response/truncated"] < 1 for values in metrics_of(run).values())


ENDED = """
import json
from distflow import reward

@reward
def ended(completion: str, finished: bool = True) -> float:
    with open("ended.jsonl", "a") as file:
        file.write(json.dumps(finished) + "\\n")
    return finished / (1 + len(completion))
"""
UNTRUNCATED = """  untruncated: {role: actor, type: COMPUTE, function: drop_truncated, dependencies: [advantage]}
  update:    {role: actor,     type: MODEL_TRAIN,     function: policy_update,   dependencies: [untruncated, reference],
              with: {clip: 0.2, kl: 0.001, entropy: 0.01}}
"""


def test_long_prompts_and_answers_that_were_cut_off_are_not_trained_on(launch, workspace):
    records = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(3)]
    records.insert(1, {"question": "1 + " * 30 + "1?", "answer": 31})
    (workspace / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (workspace / "brevity.py").write_text(ENDED)
    grpo = (workspace / "grpo.yaml").read_text().replace("reward: brevity", "reward: ended")
    (workspace / "grpo.yaml").write_text(grpo.partition("  update:")[0] + UNTRUNCATED + "imports: [brevity]\n")
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "untruncated", "--set", "steps=2",
           "--set", "preflight=false",  # whose calls of the reward would be written, too
           "--set", "data.long_prompts=drop", "--set", f"roles.actor.generation.stop={json.dumps(STOP)}",
           "--set", "roles.actor.generation.min_p=0.01", "--set", "roles.actor.schedule=linear",
           "--set", "roles.actor.min_learning_rate=1e-4")
    metrics = metrics_of(workspace / "runs/untruncated")
    ended = [json.loads(line) for line in (workspace / "ended.jsonl").read_text().splitlines()]
    assert len(ended) == sum(values["samples"] for values in metrics.values())
    assert 0 < sum(ended) < len(ended)
    assert sum(values["filter/untruncated/kept"] for values in metrics.values()) == sum(ended)
    assert [values["learning_rate"] for values in metrics.values()] == [1e-3, 1e-4]
    for values in metrics.values():
        assert values["filter/kept"] == 1 - values["response/truncated"]
        assert (values["data/records_skipped"], values["data/prompts_cut"]) == (1, 0)
        assert values["grad_norm"] > 0
    events = [json.loads(line) for line in (workspace / "runs/untruncated/events.jsonl").read_text().splitlines()]
    skipped = [(event["reason"], event["where"].rpartition(":")[2]) for event in events
               if event["event"] == "record_skipped"]
    assert skipped == [("is too long a prompt", "2")]
