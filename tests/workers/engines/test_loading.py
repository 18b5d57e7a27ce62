"""A model's files stay where they are: nothing of them is copied but what an engine keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from distflow.config.run import RoleRun
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.fsdp import FSDPEngine
from workers.engines.hf import HFRollout
from workers.engines.loading import _load_folder


@pytest.fixture
def folder(tmp_path):
    """A model of 24 MiB in bfloat16."""
    build_model(512, 0, layers=4, hidden=512, heads=4, kv_heads=2, head_dim=64).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def own_memory() -> int:
    """Bytes of this process that are not pages of a file."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def loaded(folder: str) -> tuple[int, int]:
    _load_folder(Path(folder), "lm")  # imports
    before = own_memory()
    model = _load_folder(Path(folder), "lm")
    for parameter in model.parameters():
        parameter.sum()  # reads all pages
    return own_memory() - before, sum(parameter.nbytes for parameter in model.parameters())


def test_weights_are_pages_of_their_files(folder):
    (more, size), = run_ranks(1, loaded, str(folder))
    assert size > 20 << 20
    assert more < size / 4


def test_engines_convert_what_they_keep(folder, mesh):
    model, settings = _load_folder(folder, "lm"), RoleRun(dtype="float32")
    assert model.dtype == torch.bfloat16
    expected = {name: weight.float() for name, weight in
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).named_parameters()}
    rollout = HFRollout.build(model, build_tokenizer(["one"]), settings, mesh, 0, [2])
    trainer = FSDPEngine(model, settings, mesh, pad_token=0, steps=1, trained=True)
    for found in (dict(rollout.model.named_parameters()),
                  {name: shard.full_tensor() for name, shard in trainer.shards().items()}):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], weight), name
    assert rollout.model.lm_head.weight is rollout.model.model.embed_tokens.weight
