"""The examples: short, without mistakes, and right. That OPO learns is shown in tests/dags/test_learning.py."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from harness import ROOT, events_of, metrics_of
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from distflow.config.load import load
from distflow.data.batch import Ragged
from planners import plan
from workers.isolation.rewards.texts import format as form_of_text

NEEDS = {"blackjack": "gymnasium"}
"""Example → the package whose environment it names."""
EXAMPLES = sorted((ROOT / "examples").glob("*/*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_one_file_and_few_lines_of_python(path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "a key")
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    assert plan(load(str(path)), 2).ranks == 2
    most = 60 if path.stem == "calculator_agent" else 29  # a whole program, and not a function of one
    assert sum(len(module.read_text().splitlines()) for module in path.parent.glob("*.py")) <= most


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}/{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def run(workspace, launch):
    """`run("NAME", "KEY=VALUE", …)` runs an example in the workspace, where the Python files of all of them lie."""
    for path in (ROOT / "examples").glob("*/*.py"):
        shutil.copy(path, workspace)

    def run(name, *given):
        launch(1, "--dag", str(ROOT / f"examples/{name}/{name}.yaml"), "--run-file", "tiny.yaml", "--name", name,
               *given)
        return metrics_of(workspace / "runs" / name)

    return run


def test_the_form_that_is_paid_is_that_of_the_answers():
    settings = load(str(ROOT / "examples/near_miss/near_miss.yaml")).dag.nodes["reward"].settings["reward"]["format"]
    problems = (ROOT / "dags/data/arithmetic/heldout.jsonl").read_text().splitlines()
    answer = json.loads(problems[0])["answer"]
    assert [form_of_text(text, pattern=settings["pattern"]) for text in (answer, answer.replace("#", ""))] == [1, 0]


def test_the_loss_is_ppos_at_first_and_fades():
    loss = module("soft_clip").soft_clip
    logprobs = torch.tensor([0.0, 0.2, 1.5], requires_grad=True)
    loss(logprobs, torch.zeros(3), torch.ones(3)).sum().backward()
    at_once, later, far = (-logprobs.grad).tolist()
    assert at_once == 1.0
    assert far < 1e-6 < later < 1.0


def test_the_reward_and_the_loss_run(run):
    metrics = run("near_miss", "steps=2", "nodes.update.with={loss: 'soft_clip:soft_clip', epochs: 2}",
                  "nodes.reward.with={reward: {'near_miss:near_miss': 1.0, brevity: 1.0}}", "imports=[brevity]")
    for line in metrics.values():
        assert {"reward/near_miss", "near_miss/answered", "reward/brevity"} <= set(line)
        assert 0 <= line["near_miss/answered"] <= 1
        assert line["soft_clip/moved"] > 0
        assert line["grad_norm"] > 0


def test_the_hook_and_the_detector_run(run, workspace):
    """A random model always says 8 tokens here, so the detector is asked for no growth at all."""
    run("restart_log", "steps=3", "imports=[restart_log, long_answers]", "checkpoint.every=0",
        "robust.detectors.long_answers.factor=1", "faults=[{kind: raise, step: 2, phase: training}]")
    failed, ready = (workspace / "restarts.log").read_text().splitlines()
    assert failed.startswith("rank 0 failed in step 2: ")
    assert ready == "rank 0 trains again"
    events = events_of(workspace / "runs/restart_log")
    assert {event["what"] for event in events if event["event"] == "long_answers"} == \
        {"answers have grown from 8 to 8 tokens"}


def test_a_game_is_learnt(run):
    """A random model rarely says an action at all; it soon does, and then no turn is lost."""
    pytest.importorskip("gymnasium")
    deals = ROOT / "examples/blackjack/deals.jsonl"
    rollout = "nodes.rollout.with."
    metrics = run("blackjack", "steps=12", "checkpoint.every=0", "roles.actor.learning_rate=3e-3",
                  f"data={{train: {deals}, columns: [seed], batch: 8, max_prompt_tokens: 200}}",
                  f"{rollout}environment_settings={{id: Blackjack-v1, actions: ['0', '1'], wrong_action: -1.0}}",
                  f"{rollout}group_size=16", f"{rollout}max_turns=3", f"{rollout}max_tokens=160",
                  f"{rollout}max_new_tokens=1")
    rewards = [metrics[step]["environment/reward"] for step in sorted(metrics)]
    assert rewards[0] < -2.8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    assert all(line["environment/failed"] == 0 for line in metrics.values())


def test_the_optimal_baseline_weighs_rewards_by_length():
    opo = module("opo")
    responses = Ragged.from_rows([torch.zeros(length) for length in (1, 3, 2, 0)])
    advantages = opo.optimal_baseline(torch.tensor([1.0, 0.0, 1.0, 2.0]), torch.tensor([7, 7, 2, 2]), responses)
    assert advantages.tolist() == [0.75, -0.25, 0.0, 1.0]


ENCODERS = {"roberta": {"pad_token_id": 1, "max_position_embeddings": 66},
            "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}}


def encoder(kind: str, folder: Path) -> Path:
    """Write a tiny classifier of a kind, with a tokenizer of letters that pairs texts."""
    words = {"<s>": 0, "<pad>": ENCODERS[kind].get("pad_token_id", 3), "</s>": 2, "<unk>": 4}
    letters = Tokenizer(models.WordLevel({**words, **{chr(32 + each): 5 + each for each in range(95)}}, "<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", model_max_length=64).save_pretrained(folder)
    config = CONFIG_MAPPING[kind](vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                  intermediate_size=64, num_labels=1, initializer_range=0.3, **ENCODERS[kind])
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_scores_padded_pairs_as_each_alone(kind, tmp_path):
    folder = encoder(kind, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    questions = ["2 + 3?", "What is the sum of one and one?", "Who?", "x" * 90]
    answers = ["5", "It is 2, as one and one are two.", "", "short"]
    found = module("encoder_reward").encoder_reward(answers, questions, model=str(folder), rows=3)
    alone = [plain(**tokenizer([question], [answer], truncation=True, return_tensors="pt")).logits.item()
             for question, answer in zip(questions, answers)]
    assert found == pytest.approx(alone, abs=1e-5)
    assert len({round(each, 3) for each in found}) == 4


@pytest.mark.run
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    """Its cells run here, one after the other, as a kernel would run them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples/from_python.ipynb").read_text())
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert list(names["run"].metrics.index) == [0, 1, 2, 3, 4, 5]
    assert len(names["run"].samples) == 20
    assert (names["again"].folder / "report.html").is_file()
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "outputs would grow old"
