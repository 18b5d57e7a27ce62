"""Agents that own their loop: real commands, which sample through the endpoint; what they were served is trained."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from reported import reported

from distflow.data.batch import Ragged
from distflow.errors import RewardsFailed
from workers.engines.shared_engine import SharedEngine
from workers.functions.agents import run_agent

AGENT = '''
import json, os, sys, time, urllib.error, urllib.request

question, fate, folder = sys.argv[1:]
token = "wrong" if fate == "lie" else os.environ["OPENAI_API_KEY"]
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
messages, served = [{"role": "user", "content": question}], None
for turn in range(3):
    body = {"model": "any", "messages": messages, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as reply:
            served = json.load(reply)
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
    if fate == "hang" and turn:
        time.sleep(3600)
    if fate == "die" and turn:
        sys.exit("the tool is gone")
    messages.append(served["choices"][0]["message"])
    messages.append({"role": "tool", "content": f"{question} {turn}", "tool_call_id": "x"})
with open(f"{folder}/served.jsonl", "a") as file:
    tokens = [served["prompt_token_ids"], served["choices"][0]["token_ids"]]
    file.write(json.dumps([question, sum(tokens, [])]) + "\\n")
print("much is said")
print("nothing" if fate == "silent" else json.dumps({"reward": len(question)}))
'''
COLUMNS = ("prompts", "responses", "mask", "logprobs", "versions", "completions", "rewards", "turns", "finished",
           "completions.cut_thoughts", "keep")


@pytest.fixture(autouse=True)
def _agent(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)


def run(role, folder, fates, **settings):
    """Rows of the trajectories by column; two for each prompt."""
    questions = ["one", "three", "fifteen", "seven", "eleven"][: len(fates)]
    prompts = Ragged.from_rows([torch.tensor([5, 6, 7])] * len(fates))
    settings = {"agent": f"python {folder}/agent.py {{questions}} {{fate}} {folder}", "group_size": 2, "seconds": 30.0,
                **settings}
    values = run_agent(role, prompts, torch.arange(len(fates)), questions=questions, fate=list(fates), **settings)
    return SimpleNamespace(**dict(zip(COLUMNS, values, strict=True)))


def served(folder) -> list[list]:
    return sorted(json.loads(line) for line in (folder / "served.jsonl").read_text().splitlines())


def test_run_agent_trains_the_tokens_that_were_served(role, tmp_path):
    found = run(role, tmp_path, ["", ""])
    whole = sorted([("one", "three")[index // 2], [*prompt.tolist(), *response.tolist()]]
                   for index, (prompt, response) in enumerate(zip(found.prompts.rows, found.responses.rows)))
    assert whole == served(tmp_path)
    assert found.turns.tolist() == [3] * 4
    assert found.rewards.tolist() == [3.0, 3.0, 5.0, 5.0]
    assert found.keep.all()
    assert set(found.versions.values.tolist()) == {4}
    assert found.logprobs.values[found.mask.values].lt(0).all()
    assert found.logprobs.values[~found.mask.values].eq(0).all()
    prompt, observed = found.prompts.rows[2].tolist(), found.responses.rows[2][~found.mask.rows[2]].tolist()
    assert role.tokenizer.decode(prompt) == "<|user|>three<|assistant|>"
    assert "".join(role.tokenizer.decode(observed).split("<eos>")) == \
        "<|user|>three 0<|assistant|><|user|>three 1<|assistant|>"


def test_run_agent_ends_the_run_when_all_rows_fail(role, tmp_path):
    for role.step in range(2):
        run(role, tmp_path, ["lie"])
    role.step = 2
    with pytest.raises(RewardsFailed, match="every trajectory of 3 steps in a row; the last: .*OPENAI_API_KEY"):
        run(role, tmp_path, ["lie"])


def test_run_agent_samples_from_a_shared_engine(role, tmp_path):
    alone = run(role, tmp_path, ["", ""])
    shared, over = SharedEngine(role.rollout), threading.Event()
    role.sampler = shared
    driver = threading.Thread(target=shared.drive, args=(over.is_set,))
    driver.start()
    try:
        together = run(role, tmp_path, ["", "die"])
    finally:
        over.set()
        driver.join()
    assert together.keep.tolist() == [True, True, False, False]
    assert together.responses.slice(0, 2).values.tolist() == alone.responses.slice(0, 2).values.tolist()


def test_run_agent_gives_the_same_with_few_processes(role, tmp_path):
    assert run(role, tmp_path, ["", ""], processes=1).responses.values.tolist() == \
        run(role, tmp_path, ["", ""]).responses.values.tolist()


def test_run_agent_limits_turns(role, tmp_path):
    """The agent of this test ends for it; its row is left out."""
    found = run(role, tmp_path, [""], max_turns=2)
    assert found.turns.tolist() == [2, 2]
    assert not found.keep.any()
    assert reported()["environment/cut"] == 2


def test_run_agent_takes_no_rows(role, tmp_path):
    assert [len(value) for value in vars(run(role, tmp_path, [])).values()] == [0] * len(COLUMNS)
