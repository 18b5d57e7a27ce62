"""A run on what datasets really have: several files, chat messages, numbers as answers, an empty question, and texts
that end."""

import json

from harness import events_of, lines_of, metrics_of

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
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "forms", "steps=2", "data.batch=4",
           "data.system_prompt=Reckon.", "data.prompt_suffix= Now.", "data.train={train.jsonl: 3, more.jsonl: 1}",
           "data.columns=[source]", "samples=4", f"roles.actor.generation.stop={json.dumps(STOP)}",
           "validation={data: {same: train.jsonl}}")
    told = lines_of(workspace / "told.jsonl")
    assert {(question, answer) for question, answer, _ in told} == {("1 + 1?", "2"), ("2 + 2?", "4"), ("3 + 3?", "6")}
    assert any(letter in completion for _, _, completion in told for letter in STOP)
    run = workspace / "runs/forms"
    samples = lines_of(run / "samples.jsonl")
    assert [(line["step"], line["source"]) for line in samples].count((1, "more")) == 1
    assert len(samples) == 8
    assert [event["where"].rpartition("/")[2] for event in events_of(run, "record_skipped")] == ["train.jsonl:3"]
    for values in metrics_of(run).values():
        assert values["data/records_skipped"] == 1
        assert values["mismatch/logprob_max"] < 1e-5
        assert values["response/truncated"] < 1


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
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "untruncated", "steps=2",
           "preflight=false",  # whose calls of the reward would be written, too
           "data.long_prompts=drop", f"roles.actor.generation.stop={json.dumps(STOP)}",
           "roles.actor.generation.min_p=0.01", "roles.actor.schedule=linear",
           "roles.actor.min_learning_rate=1e-4")
    metrics = metrics_of(workspace / "runs/untruncated")
    ended = lines_of(workspace / "ended.jsonl")
    assert len(ended) == sum(values["samples"] for values in metrics.values())
    assert 0 < sum(ended) < len(ended)
    assert sum(values["filter/untruncated/kept"] for values in metrics.values()) == sum(ended)
    assert [values["learning_rate"] for values in metrics.values()] == [1e-3, 1e-4]
    for values in metrics.values():
        assert values["filter/kept"] == 1 - values["response/truncated"]
        assert (values["data/records_skipped"], values["data/prompts_cut"]) == (1, 0)
        assert values["grad_norm"] > 0
    events = events_of(workspace / "runs/untruncated")
    skipped = [(event["reason"], event["where"].rpartition(":")[2]) for event in events
               if event["event"] == "record_skipped"]
    assert skipped == [("is too long a prompt", "2")]
