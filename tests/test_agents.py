"""A whole run whose rollouts are agents with a client of OpenAI, good and hostile ones."""

import json

import pytest
from harness import events_of, metrics_of

AGENT = '''
import hashlib, json, os, sys, time
from openai import OpenAI

question, fate = sys.argv[1], sum(sys.argv[1].encode()) % 6
client = OpenAI(api_key="wrong" if fate == 1 else os.environ["OPENAI_API_KEY"])
messages, more = [{"role": "user", "content": question}], {"logprobs": True, "extra_body": {"return_token_ids": True}}
first = client.chat.completions.create(model="m", messages=messages, **more)
sampled = first.choices[0].token_ids
assert len(first.choices[0].logprobs.content) == len(sampled)
if fate == 2:
    sys.exit(1)
if fate == 3:
    try:
        os.close(os.open("hung", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        sys.exit(1)
    time.sleep(3600)
messages += [first.choices[0].message, {"role": "user", "content": "And again?"}]
chunks = [*client.chat.completions.create(model="m", messages=messages, stream=True, **more)]
second = chunks[0].choices[0]
whole, sampled = [*chunks[0].prompt_token_ids, *second.token_ids], [*sampled, *second.token_ids]
with open("served", "a") as file:
    file.write(hashlib.sha256(json.dumps([whole, sampled]).encode()).hexdigest() + "\\n")
print(json.dumps({"reward": 1 / (1 + len(second.delta.content or ""))}))
'''
TRAINED = '''
import hashlib, json
import torch
from distflow import Ragged, node

@node(writes="noted")
def note(prompts: Ragged, responses: Ragged, response_mask: Ragged) -> torch.Tensor:
    with open("trained", "a") as file:
        for prompt, response, mask in zip(prompts.rows, responses.rows, response_mask.rows):
            tokens = [[*prompt.tolist(), *response.tolist()], response[mask].tolist()]
            file.write(hashlib.sha256(json.dumps(tokens).encode()).hexdigest() + "\\n")
    return torch.zeros(len(responses))
'''
DAG = """
name: agents
roles:
  actor: {trained: true}
nodes:
  rollout:   {role: actor, type: MODEL_INFERENCE, function: run_agent,
              with: {agent: "python agent.py {questions}", group_size: 2, processes: 4, seconds: 40}}
  note:      {role: actor, type: COMPUTE, function: note, dependencies: [rollout]}
  advantage: {role: actor, type: COMPUTE, function: group_advantage, dependencies: [note],
              reads: {rewards: environment_rewards}}
  update:    {role: actor, type: MODEL_TRAIN, function: policy_update, dependencies: [advantage]}
imports: [trained_tokens]
"""


def test_agents_are_trained_on_the_tokens_that_they_were_served(launch, workspace):
    pytest.importorskip("openai")
    for name, text in (("agent.py", AGENT), ("trained_tokens.py", TRAINED), ("agents.yaml", DAG)):
        (workspace / name).write_text(text)
    questions = [json.loads(line)["question"] for line in (workspace / "train.jsonl").read_text().splitlines()]
    assert {sum(question.encode()) % 6 for question in questions} == {0, 1, 2, 3, 4, 5}
    launch(1, "--dag", "agents.yaml", "--run-file", "tiny.yaml", "--name", "agents", "steps=2",
           "data.batch=5", "data.max_prompt_tokens=64")
    folder = workspace / "runs/agents"
    served, trained = ((workspace / name).read_text().splitlines() for name in ("served", "trained"))
    assert sorted(served) == sorted(trained)
    metrics = metrics_of(folder)
    assert [step for step, line in metrics.items() if line["grad_norm"] > 0] == [1, 2]
    assert max(line["mismatch/logprob_max"] for line in metrics.values()) < 1e-4
    failed = sum(line["environment/failed"] for line in metrics.values())
    assert failed == 2 * 5 * 2 - len(served) > 0
    events = events_of(folder)
    reasons = [event["reason"] for event in events if event["event"] == "environment_failed"]
    for reason in ("took longer than 40 s", "its command ended with code 1", "the environment variable OPENAI_API_KEY"):
        assert any(reason in each for each in reasons), reasons
