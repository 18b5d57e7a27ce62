"""The table of engines: what it names exists, and the list that users see is the one that is enforced."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest

from distflow.cli import main
from distflow.config.extras import pip_line
from distflow.config.models import ROLLOUTS, TRAINERS, TRANSPORTS, missing_transport
from distflow.config.run import Generation


@pytest.mark.parametrize("engine", [*TRAINERS.values(), *ROLLOUTS.values(), *TRANSPORTS.values()],
                         ids=lambda engine: engine.home)
def test_the_home_of_each_engine_is_there(engine):
    module, _, name = engine.home.partition(":")
    source = Path(importlib.util.find_spec(module).origin)
    assert re.search(rf"^class {name}[(:]", source.read_text(), re.MULTILINE)  # its library may not be installed


def test_everything_that_is_refused_is_listed(capsys):
    assert main(["engines"]) == 0
    said = capsys.readouterr().out
    for key, table in (("engine", TRAINERS), ("rollout", ROLLOUTS), ("transport", TRANSPORTS)):
        for name, engine in table.items():
            part = said.partition(f"{key}: {name}\n")[2].partition("\n\n")[0]
            assert all(reason in part for reason in engine.cannot.values())
            assert all(package in part for package in engine.packages)


def test_a_transport_without_its_package_is_refused_with_the_line_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr("distflow.config.models.version", Mock(side_effect=PackageNotFoundError))
    assert main(["validate", "grpo", "--set", "transport=ucx"]) == 2
    said = capsys.readouterr().err
    assert "`transport: ucx` needs ucxx-cu12, which is not installed" in said
    assert pip_line("ucx") in said


@pytest.mark.parametrize("package", ["ucxx-cu12", "ucxx-cu13", "ucxx-cu11", "ucxx"])
def test_each_distribution_of_ucx_counts(monkeypatch, package):
    monkeypatch.setattr("distflow.config.models.version", lambda name: {package: "0.52.0"}[name])
    monkeypatch.setattr("distflow.config.models.PackageNotFoundError", KeyError)
    assert missing_transport("ucx") == ""


def test_stop_strings_are_for_engines_that_find_them(capsys, monkeypatch):
    monkeypatch.setenv(ROLLOUTS["sglang"].elsewhere, sys.executable)  # as if it were installed
    stop = ["validate", "grpo", "--set", "roles.actor.generation.stop=</answer>", "--set"]
    assert main([*stop, "roles.actor.rollout=sglang"]) == 2
    assert "wants `rollout: sglang` and `generation.stop`, which it cannot do: its server is given tokens" \
        in capsys.readouterr().err
    assert main([*stop, "roles.actor.rollout=hf"]) == 0


def test_min_p_is_for_engines_whose_log_probabilities_are_those_before_it(capsys, monkeypatch):
    monkeypatch.setenv(ROLLOUTS["sglang"].elsewhere, sys.executable)  # as if it were installed
    least = ["validate", "grpo", "--set", "roles.actor.generation.min_p=0.1", "--set"]
    assert main([*least, "roles.actor.rollout=sglang"]) == 2
    assert "wants `rollout: sglang` and `min_p`, which it cannot do" in capsys.readouterr().err
    assert main([*least, "roles.actor.rollout=hf"]) == 0


@pytest.mark.parametrize("role", ["actor", "teacher"])
def test_distillation_from_other_tokens_is_for_the_engine_that_has_it(capsys, role):
    assert main(["validate", "gkd", "--set", f"roles.{role}.engine=megatron"]) == 2
    assert f"role `{role}` wants `engine: megatron` and runs `top_logprobs` or `distillation_update`, which it cannot" \
        in " ".join(capsys.readouterr().err.split())


def test_fp8_is_for_the_engine_that_has_it(capsys, monkeypatch):
    fp8 = ["validate", "grpo", "--set", "roles.actor.generation.quantization=fp8"]
    assert main(fp8) == 2
    assert "wants `rollout: hf` and `generation.quantization`, which it cannot do: it computes in the dtype of its" \
        in capsys.readouterr().err
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "0.32.0")
    assert main([*fp8, "--set", "roles.actor.rollout=vllm"]) == 0


@pytest.mark.parametrize(("asked", "given"), [("none", None), ("fp8", "fp8_per_tensor")])
def test_vllm_is_asked_for_what_is_set(asked, given):
    from workers.engines.vllm.start import on_gpu

    settings = on_gpu(Generation(quantization=asked, memory_share=0.4))
    assert (settings.get("quantization"), settings["gpu_memory_utilization"]) == (given, 0.4)
