"""Settings are read from the shell scripts that start training elsewhere as the shell would read them."""

import pytest

from distflow.cli.shell_script import shell_settings

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail
export MODEL=${MODEL:-"Qwen/Qwen2.5 32B"}  # a comment with a 'quote
gsm=data/gsm8k/train.parquet; math=data/math/train.parquet
files="['$gsm', '$math']"
long=$((1024 * 20)); half=$(( (long + 4) / 2 ))
DATA=(
    data.max_response_length=${long}
    'data.literal=${data.half}'
)
DATA+=(data.half=$half)
python3 -m verl.trainer.main_ppo data.train_files="$files" \
    actor_rollout_ref.model.path="$MODEL" ++trainer.name='it''s one' "${DATA[@]}" trainer.logger='["console"]' \
    trainer.nnodes="${NNODES_THAT_NOBODY_SETS}" trainer.when=$(date +%s) --epochs $((1 + 2)) --flag "$@"
"""


def test_a_script_is_read_as_the_shell_would():
    settings, unknown = shell_settings(SCRIPT)
    assert settings == {
        "data.max_response_length": "20480", "data.half": "10242", "data.literal": "${data.half}",
        "data.train_files": "['data/gsm8k/train.parquet', 'data/math/train.parquet']",
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5 32B", "trainer.name": "its one",
        "trainer.logger": '["console"]', "epochs": "3", "flag": True}
    assert unknown == {"trainer.nnodes": "${NNODES_THAT_NOBODY_SETS}", "trainer.when": "$(date +%s)"}


@pytest.mark.parametrize(("flags", "read"), [
    ("--lora_target_modules q_proj k_proj --seed 1", {"lora_target_modules": ["q_proj", "k_proj"], "seed": "1"}),
    ("--reward-funcs a b > log", {"reward_funcs": ["a", "b"]}), ("--report_to wandb; x", {"report_to": "wandb"}),
    ("--num_processes 8 train.py --seed 1", {"num_processes": "8", "seed": "1"})])
def test_flags_of_several_values_take_all_of_them(flags, read):
    assert shell_settings(f"run {flags}") == (read, {})


@pytest.mark.parametrize(("value", "read"), [
    ("$((1+2*(3+(4-1))))", "13"), ("$(dirname $(dirname $(realpath $0)))/x", None), ('$(grep -oP "(?<=(a))b")', None),
    ("$(( -7 / 2 ))", None), ("$((-7 % 3))", None), ("$((3 - 9))", "-6"), (f"$(({'9' * 49} ** 99))", None)])
def test_what_follows_an_expansion_of_several_parentheses_is_read(value, read):
    settings, unknown = shell_settings(f"train a.b={value} c.d=1")
    assert settings == {"c.d": "1", **({"a.b": read} if read else {})}
    assert unknown == ({} if read else {"a.b": value})


@pytest.mark.parametrize("text", ["a.b='never closed", 'a.b="$(never closed', "a.b=$((1/0))", "a.b=$((x ? 1 : 2))",
                                  "a.b=${unclosed", "a.b=\\"])
def test_what_no_shell_would_read_ends_nothing(text):
    settings, unknown = shell_settings(text)
    assert list({**settings, **unknown}) == ["a.b"]


@pytest.mark.parametrize("value", ["`date`", "${X:=3}", "${X%/*}", "${LIST[0]}", "$((9**9**9))"])
def test_what_is_more_than_a_name_is_told_as_unknown(value):
    settings, unknown = shell_settings(f"a.b={value}")
    assert settings == {}
    assert unknown == {"a.b": value}
