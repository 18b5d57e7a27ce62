"""Agents that own their loop: real commands, which sample through the endpoint; what they were served is trained."""

from __future__ import annotations

import contextlib
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from distflow.config.run import Generation
from distflow.contracts.decorators import Turn
from distflow.data.batch import Ragged
from distflow.errors import RewardsFailed
from distflow.telemetry.metrics import current
from distflow.telemetry.trajectories import Trajectories
from workers.endpoint.dialogue import Dialogue, DialogueLimits
from workers.endpoint.server import ServedRow
from workers.engines.chat import TurnTemplate, sampled_text
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.hf import HFRollout
from workers.engines.rollout import SampledRow
from workers.engines.shared_engine import SharedEngine
from workers.functions.agents import AgentLoop, run_agent
from workers.functions.conversation import Trajectory
from workers.isolation import env_service, user_code

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
           "keep")


@pytest.fixture
def role(tmp_path):
    """What an agent's node needs of a role: a model that samples, and its tokenizer."""
    (tmp_path / "agent.py").write_text(AGENT)
    tokenizer = build_tokenizer(["a question and an answer"])
    model = build_model(len(tokenizer), 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    settings = SimpleNamespace(generation=Generation(max_new_tokens=6))
    rollout = HFRollout(model, settings.generation, tokenizer.pad_token_id, [tokenizer.eos_token_id, *range(5, 60)])
    rollout.version = 4
    yield SimpleNamespace(
        tokenizer=tokenizer, settings=settings, rollout=rollout, step=0, stream=0, sampler=rollout, template_options={},
        end_tokens=rollout.end_tokens.tolist(), routed_experts=lambda *_: ())
    current().collect(lambda mine: [mine])
    env_service.close_all()
    user_code._streaks.clear()


def run(role, folder, fates, **settings):
    """Rows of the trajectories by column; two for each prompt."""
    role.converse = lambda prompts, ids, repeats, limit: contextlib.nullcontext((
        role.sampler.session(3, keep_cache=True), role.sampler.rows(prompts, repeats, ids, limit)))
    role.decode = lambda tokens: [sampled_text(role.tokenizer, row.tolist(), role.end_tokens) for row in tokens.rows]
    questions = ["one", "three", "fifteen", "seven", "eleven"][: len(fates)]
    prompts = Ragged.from_rows([torch.tensor([5, 6, 7])] * len(fates))
    settings = {"agent": f"python {folder}/agent.py {{questions}} {{fate}} {folder}", "group_size": 2, "seconds": 30.0,
                **settings}
    values = run_agent(role, prompts, torch.arange(len(fates)), questions=questions, fate=list(fates), **settings)
    return SimpleNamespace(**dict(zip(COLUMNS, values, strict=True)))


def served(folder) -> list[list]:
    return sorted(json.loads(line) for line in (folder / "served.jsonl").read_text().splitlines())


def test_what_was_served_is_what_is_trained(role, tmp_path):
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


def test_each_turn_has_the_variables_of_the_template(role, tmp_path):
    role.tokenizer.chat_template += "{{ effort }}"
    role.template_options = {"effort": "low"}
    found = run(role, tmp_path, [""])
    observed = found.responses.rows[0][~found.mask.rows[0]]
    assert role.tokenizer.decode(found.prompts.rows[0]).endswith("<|assistant|>low")
    assert role.tokenizer.decode(observed).count("<|assistant|>low") == 2


def test_a_bad_agent_costs_its_own_rows_alone(role, tmp_path, capsys):
    """The others have the tokens that they have without it."""
    found = run(role, tmp_path, ["", "hang", "die", "lie", "silent"], seconds=12.0)
    metrics = current().collect(lambda mine: [mine])
    assert found.keep.tolist() == [True, True] + [False] * 8
    assert not any(mask.any() for mask in found.mask.rows[2:])
    assert (metrics["environment/failed"], metrics["environment/timeouts"]) == (8, 2)
    printed = capsys.readouterr().err
    assert "8 of 10 trajectories failed and are left out; 2 of them, as row 2: took longer than 12 s" in printed
    good = run(role, tmp_path, [""])
    assert found.responses.slice(0, 2).values.tolist() == good.responses.values.tolist()


def test_an_agent_that_always_fails_ends_the_run(role, tmp_path):
    for role.step in range(2):
        run(role, tmp_path, ["lie"])
    role.step = 2
    with pytest.raises(RewardsFailed, match="every trajectory of 3 steps in a row; the last: .*OPENAI_API_KEY"):
        run(role, tmp_path, ["lie"])


def test_an_engine_that_others_share_serves_agents_too(role, tmp_path):
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


def test_few_processes_at_a_time_give_the_same(role, tmp_path):
    assert run(role, tmp_path, ["", ""], processes=1).responses.values.tolist() == \
        run(role, tmp_path, ["", ""]).responses.values.tolist()


def test_limits_end_a_row_by_a_refusal(role, tmp_path):
    """The agent of this test ends for it; its row is left out."""
    found = run(role, tmp_path, [""], max_turns=2)
    assert found.turns.tolist() == [2, 2]
    assert not found.keep.any()
    assert current().collect(lambda mine: [mine])["environment/cut"] == 2


def test_a_turn_that_no_command_waits_for_is_not_trained(role, tmp_path, monkeypatch):
    path, file = tmp_path / "trajectories/rank0.jsonl", Trajectories()
    file.open(path, rows=1)
    monkeypatch.setattr("distflow.telemetry.trajectories._trajectories", file)
    row = SampledRow(3, torch.tensor([5, 6]), 2, 6)
    row.end(torch.tensor([7]), torch.tensor([-1.0]), torch.tensor([4], dtype=torch.int32), True)
    trajectory, session = Trajectory(row, {}, True), role.rollout.session(3, keep_cache=True)
    trajectory.add_turn()
    trajectory.record(Turn("more"), role)
    trajectory.add_observed(torch.tensor([8, 9]))
    session.extend(row, torch.tensor([8, 9]), 6)
    template = TurnTemplate(role.tokenizer, role.end_tokens)
    dialogue = Dialogue("1-3", role.tokenizer, template, DialogueLimits(4, 90, 9, 9))
    loop = AgentLoop(role, session, SimpleNamespace(end=lambda row: None), {3: ServedRow(3, dialogue, print)}, None)
    loop.asks[3] = "under way"
    loop._end(trajectory, Turn(done=True, reward=1.0))
    assert not session.busy
    assert [piece.tokens.tolist() for piece in trajectory.pieces] == [[7]]
    assert len(path.read_text().splitlines()) == 1, "the turn before was written when the next one was asked for"
    assert (trajectory.reward, trajectory.failure) == (1.0, None)


def test_no_rows(role, tmp_path):
    assert [len(value) for value in vars(run(role, tmp_path, [])).values()] == [0] * len(COLUMNS)
