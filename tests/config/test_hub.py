"""Models and data by their names on the Hugging Face hub, of which a stand-in serves a tiny model and a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT
from hub import COMMIT, Hub, serving

from distflow.config.hub import HubName, hub_name

TEXTS = ["2 + 3 = 5 #### 5", "What is 4 - 1?"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    from workers.engines.embedded import build_model, build_tokenizer

    model, data = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("data")
    tokenizer = build_tokenizer(TEXTS)
    build_model(len(tokenizer), 0, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=32).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (data / "train.jsonl").write_text("".join(json.dumps({"question": f"{n} + 1", "answer": f"{n + 1}"}) + "\n"
                                              for n in range(8)))
    with serving(Hub({"tiny/model": model}, {"tiny/sums": data})) as served:
        yield served


def distflow(hub: Hub, folder: Path, run: str, *arguments: str, offline: str = "0") -> subprocess.CompletedProcess:
    """Call the command in a process of its own, as the hub's library reads its variables when it is imported."""
    (folder / "run.yaml").write_text(run)
    return called(hub, folder, *arguments, "--run-file", "run.yaml", offline=offline)


def run_of(model: str = "tiny/model", data: str = "hf://datasets/tiny/sums/train.jsonl") -> str:
    return f"steps: 1\nroles: {{actor: {{model: {model}}}}}\ndata: {{train: '{data}', batch: 4}}\n"


VALIDATE = ("-m", "distflow.cli", "validate", "sft")
RUN = (str(ROOT / "distflow/launch.py"), "--in-process", "--dag", "sft.yaml", "--name", "one")


def test_a_run_downloads_what_it_names_and_keeps_the_commit(hub, tmp_path):
    """Also where a part was there before, and the model gets a new commit meanwhile."""
    code = "from huggingface_hub import hf_hub_download as get; get('tiny/model', 'config.json')"
    assert distflow(hub, tmp_path, "", "-c", code).returncode == 0
    hub.commit = "d00d" + 36 * "0"
    checked = distflow(hub, tmp_path, run_of(), *VALIDATE)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {"tokenizer.json", "train.jsonl"} <= set(hub.asked)
    assert "model.safetensors" not in hub.asked
    ran = distflow(hub, tmp_path, run_of(), *RUN)
    hub.commit = COMMIT
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert hub.asked.count("model.safetensors") == hub.asked.count("train.jsonl") == 1
    kept = (tmp_path / "runs/one/run.yaml").read_text()
    assert f"tiny/model@{COMMIT}" in kept
    assert f"hf://datasets/tiny/sums@d00d{36 * '0'}/train.jsonl" in kept
    asked = len(hub.asked)
    again = distflow(hub, tmp_path, run_of(), *RUN[:-1], "two", offline="1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(hub.asked) == asked


@pytest.mark.parametrize(("run", "said"), [
    (run_of("tiny/modle"), "there is no model folder `tiny/modle`, and the hub has no model `tiny/modle`"),
    (run_of("tiny/model@v2"), "model `tiny/model` has no revision `v2`"),
    (run_of(data="hf://datasets/tiny/sums/trian.jsonl"), "Did you mean `train.jsonl`?"),
    (run_of(data="tiny/sums"), "name a file of it:  data: {train: hf://datasets/tiny/sums/FILE.parquet}"),
    (run_of("tiny/model, lora: {rank: 2, targets: [q_porj]}"), "Did you mean `q_proj`?"),
])
def test_a_name_that_the_hub_does_not_have_is_a_mistake_with_its_line(hub, tmp_path, run, said):
    checked = distflow(hub, tmp_path, run, *VALIDATE)
    assert checked.returncode == 2
    assert said in checked.stdout + checked.stderr
    assert "run.yaml:" in checked.stdout + checked.stderr


def test_without_the_hub_it_says_where_it_has_looked(hub, tmp_path):
    checked = distflow(hub, tmp_path, run_of(), *VALIDATE, offline="1")
    assert f"not in the hub's cache on this machine ({tmp_path / 'cache/hub'}), and HF_HUB_OFFLINE forbids" in \
        checked.stdout + checked.stderr


@pytest.mark.parametrize(("name", "kind", "found"), [
    ("Qwen/Qwen3-0.6B", "models", HubName("Qwen/Qwen3-0.6B", None)),
    ("hf://Qwen/Qwen3-0.6B@main", "models", HubName("Qwen/Qwen3-0.6B", "main")),
    ("hf://datasets/openai/gsm8k@refs/convert/parquet/main/train/0000.parquet", "data",
     HubName("openai/gsm8k", "refs/convert/parquet", "main/train/0000.parquet")),
    ("../models/tiny", "models", None), ("models", "models", None), ("/a/b", "models", None),
    ("openai/gsm8k", "data", None), ("Qwen/Qwen3", "", None),
])
def test_names_on_the_hub_are_told_from_paths(name, kind, found):
    assert hub_name(name, kind) == found
    assert found is None or hub_name(str(found), kind) == found


def called(hub: Hub, folder: Path, *arguments: str, offline: str = "0") -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": offline,
                                "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=240, check=False)
