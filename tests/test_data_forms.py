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
    skipped = [event for event in events if event["event"] == "record skipped"]
    assert [event["where"].rpartition("/")[2] for event in skipped] == ["train.jsonl:3"]
    assert max(values["mismatch/logprob_max"] for values in metrics_of(run).values()) < 1e-5
    assert all(values["response/truncated"] < 1 for values in metrics_of(run).values())
