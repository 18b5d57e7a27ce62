"""Detectors of learning: on series whose fault is known, on noise, and in a run that one of them ends."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from harness import ROOT

from distflow.contracts.detectors import learning_detectors
from distflow.recovery.checkpoint_files import complete_checkpoints, step_of
from distflow.telemetry.learning import LearningFault, faults_of, main_fault
from distflow.telemetry.learning_facts import DOUBTS
from distflow.telemetry.learning_series import RULES, Doubt
from distflow.telemetry.learning_table import READINGS

HEALTHY = {"reward/mean": 0.5, "reward/std": 0.45, "reward/zero_std_groups": 0.4, "reward/length_correlation": 0.1,
           "reward/unanswered": 0.02, "policy/entropy": 0.3, "policy/kl_reference": 0.02, "policy/clip_ratio": 0.01,
           "response/length": 40.0, "response/truncated": 0.02, "response/repetition": 0.02, "grad_norm": 0.5,
           "learning_rate": 1e-6, "advantages/reward_correlation": 0.95, "advantages/std": 0.8,
           "reward/inconsistent": 0.0, "advantages/mean": 0.01,
           "mismatch/logprob_mean": 0.002, "mismatch/logprob_late": 0.002, "samples": 64.0, "reward/failed": 0.0,
           "prompt/repeated": 0.0, "prompt/has_answer": 0.0, "value/explained": 0.3, "environment/turns": 2.5,
           "environment/error_answers": 0.05, "environment/same_answers": 0.2, "response/has_answer": 0.5,
           "reward/answer_correlation": 0.9, "prompt/same_answer": 0.1}


def steps_of(count: int, seed: int = 0, first: int = 0, **changed: float | None) -> list[dict[str, float]]:
    """Steps with noise of a tenth; from step `first` on the metrics that are `changed`, `__` for `/`, are exact, or
    missing."""
    draw = random.Random(seed)
    lines = [{name: value * draw.uniform(0.9, 1.1) for name, value in HEALTHY.items()} | {"step": step} |
             ({"policy/kl_reference": 1e-4} if step == 1 else {}) |
             ({name.replace("__", "/"): value for name, value in changed.items()} if step >= first else {})
             for step in range(1, count + 1)]
    return [{name: value for name, value in line.items() if value is not None} for line in lines]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fault(seed):
    assert faults_of(steps_of(100, seed, first=1000)) == []


@pytest.mark.parametrize(("detector", "changed"), [
    ("answers_not_found", {"reward__unanswered": 0.97}),
    ("reward_noise", {"reward__inconsistent": 0.6}),
    ("no_signal", {"reward__zero_std_groups": 0.95}),
    ("reward_failures", {"reward__failed": 20.0}),
    ("length_hacking", {"reward__length_correlation": 0.8, "response__length": 60.0,
                        "reward__answer_correlation": 0.4}),
    ("entropy_collapse", {"policy__entropy": 0.02}),
    ("entropy_explosion", {"policy__entropy": 2.0}),
    ("truncation", {"response__truncated": 0.6}),
    ("repetition", {"response__repetition": 0.4}),
    ("kl_runs_off", {"policy__kl_reference": 2.0}),
    ("ratio_clipped", {"policy__clip_ratio": 0.5}),
    ("mismatch", {"mismatch__logprob_mean": 0.2, "mismatch__logprob_late": 0.4}),
    ("policy_stuck", {"grad_norm": 0.0}),
    ("policy_stuck", {"gradient__moved": 0.05}),
    ("policy_stuck", {"learning_rate": 1e-10}),
    ("advantage_sign", {"advantages__reward_correlation": -0.9}),
    ("advantage_scale", {"advantages__std": 20.0}),
    ("value_head", {"value__explained": -2.0}),
    ("reference_moves", {"policy__kl_reference": 0.0}),
    ("duplicated_prompts", {"prompt__repeated": 0.6}),
    ("leaking_prompts", {"prompt__has_answer": 0.9}),
    ("gradient_of_one_layer", {"gradient__share_of_layer__7": 0.97}),
    ("unsampled_trained", {"mismatch__unsampled": 0.2}),
    ("advantage_baseline", {"advantages__of_prompts": 0.4}),
    ("tool_errors", {"environment__error_answers": 0.6}),
    ("tools_avoided", {"environment__turns": 1.0}),
    ("data_lost", {"data__prompts_cut": 60.0}),
    ("one_answer", {"prompt__same_answer": 0.9}),
    ("reward_against_answers", {"reward__answer_correlation": -0.9}),
    ("reward_against_answers", {"reward__answer_correlation": 0.0}),
    ("pairs_contradict", {"preference__worse_has_answer": 0.5}),
    ("pairs_contradict", {"preference__accuracy": 0.1, "preference__margin": -0.3}),
    ("same_observations", {"environment__same_answers": 1.0}),
    ("overlong", {"reward__overlong": 1.0}),
    ("empty_answers", {"response__length": 1.0}),
    ("conversations_cut", {"environment__cut": 60.0}),
    ("teacher_tail", {"distillation__teacher_tail": 0.9}),
    ("importance_lost", {"importance__rejected": 0.9}),
    ("length_hacking", {"reward__length_correlation": -0.9, "response__length": 20.0,
                        "reward__answer_correlation": 0.4}),
    ("learning_rate", {"learning_rate": 1e-5}),
    ("answers_not_found", {"reward__unanswerable": 0.4}),
    ("advantage_scale", {"advantages__std": 0.001}),
    ("reference_moves", {"preference__margin": 0.0}),
    ("teacher_differs", {"distillation__misplaced": 0.4}),
    ("gradients_kept", {"gradient__kept": 1.0}),
])
def test_each_fault_is_named_soon_and_since_its_first_step(detector, changed):
    found = {fault.detector: fault for fault in faults_of(steps_of(40, first=21, **changed))}
    assert detector in found
    assert 21 <= found[detector].step <= 31
    assert found[detector].evidence.since == pytest.approx(21, abs=3)
    assert found[detector].evidence.cause
    assert found[detector].evidence.remedy


SYNC = {"nodes.advantage.function": "group_advantage", "roles.actor.trained": "true"}
ASYNC = SYNC | {"nodes.again.function": "logprobs", "nodes.again.role": "actor"}
FILTERED = SYNC | {"nodes.fine.function": "overlong_penalty", "nodes.filter.function": "informative_groups",
                   "nodes.filter.dependencies": '["fine"]'}
PAIRS = SYNC | {"nodes.pairs.function": "labelled_pairs"}
FRESH = SYNC | {"roles.actor.model.architecture": "qwen3"}


@pytest.mark.parametrize(("changed", "settings", "detector", "cause"), [
    ({"prompt__marked": 1.0, "prompt__unmarked": 1.0}, SYNC, "data_lost", "changed places"),
    ({"reward__zero_std_groups": 1.0}, FRESH, "unusual_setting", "untrained"),
    ({}, FRESH | {"roles.actor.lora.rank": "16"}, "unusual_setting", "untrained"),
    ({}, SYNC | {"roles.teacher.model.architecture": "qwen3", "roles.teacher.trained": "false"}, "unusual_setting",
     "untrained"),
    ({}, {"roles.reward.trained": "true", "roles.reward.model.architecture": "qwen3", "roles.reward.freeze": '["m.*"]',
          "nodes.update.function": "preference_update"}, "unusual_setting", "untrained"),
    ({"policy__entropy": 1.4, "response__has_answer": 0.02, "reward__zero_std_groups": 0.75}, SYNC, "unusual_setting",
     "not loaded"),
    ({"validation__heldout": 0.0, "environment__turns": None}, SYNC | {"validation.reward": "my:boxed"},
     "held_out_falls", "another form"),
    ({"environment__told": 1.0}, SYNC, "leaking_prompts", "gives away"),
    ({"reward__place_correlation": -0.6}, SYNC, "reward_against_answers", "position"),
    ({"earned__right": 1.0, "earned__wrong_max": 1.0, "earned__wrong": 0.3}, SYNC, "reward_against_answers",
     "wrong answers"),
    ({"preference__better": 3.0}, PAIRS, "reference_differs", "not the model"),
    ({"reward__overlong": 0.3}, FILTERED, "unusual_setting", "length penalty"),
    ({"value__mean": 0.05, "value__loss": 0.05}, SYNC, "value_head", "another target"),
    ({"importance__with_ratio": -0.02}, SYNC, "importance_lost", "inverted"),
    ({"staleness__mean": 3.0, "policy__ratio": 1.0, "mismatch__unsampled": 0.0}, ASYNC | {"staleness": "4"},
     "importance_lost", "recomputes"),
])
def test_a_fact_that_no_healthy_run_has_had_is_told_without_a_symptom(changed, settings, detector, cause):
    found = {fault.detector: fault for fault in faults_of(steps_of(20, **changed), settings)}
    assert cause in found[detector].evidence.cause
    assert found[detector].step <= 16
    kept: dict[str, Any] = {
        "prompt__marked": 0.0, "environment__told": 0.2, "earned__right": 1.0, "earned__wrong_max": 0.3,
        "importance__with_ratio": 0.02, "value__mean": 0.4, "value__loss": 0.1, "validation__heldout": 0.3}
    assert faults_of(steps_of(20, **kept), SYNC | {"validation.reward": "my:boxed"}) == []


@pytest.mark.parametrize(("changed", "settings"), [
    ({}, FRESH),
    ({}, SYNC | {"roles.teacher.model.architecture": "null", "roles.second.model.architecture": "llama"}),
    ({"policy__entropy": 1.4, "response__has_answer": 0.03, "reward__zero_std_groups": 0.5}, SYNC),
    ({"prompt__marked": 1.0, "prompt__unmarked": 0.0}, SYNC),
    ({"environment__told": 0.95, "environment__reward": 0.9}, SYNC),
    ({"earned__right": 1.0, "earned__wrong_max": 1.0, "earned__wrong": 0.05}, SYNC),
    ({"value__mean": 0.05, "value__loss": 0.15}, SYNC),
    ({"value__mean": 0.05, "value__loss": 0.02, "response__length": 1500.0}, SYNC | {"nodes.gae.with.lam": "0.95"}),
    ({"reward__overlong": 0.0}, FILTERED),
], ids=["random_weights_that_earn", "a_second_teacher_of_random_weights", "a_base_model_that_is_seldom_right",
        "solved_examples_in_prompts", "one_call_solves_the_problem", "equal_answers_in_other_words",
        "a_critic_that_has_just_begun", "returns_of_long_answers", "a_fine_that_nobody_pays"])
def test_facts_are_silent_in_healthy_runs_that_look_alike(changed, settings):
    assert faults_of(steps_of(20, **changed), settings) == []


@pytest.mark.parametrize("kind", DOUBTS)
def test_what_preflight_has_doubted_is_a_fact(kind):
    doubt, (alerts, does) = Doubt("train.jsonl:1: it is odd. Mend it.", kind, 1.0, "Mend it."), DOUBTS[kind]
    found = faults_of(steps_of(20), SYNC, doubts=[doubt])
    assert [fault.detector for fault in found] == [alerts] * bool(alerts)
    for fault in found:
        assert fault.sentence == "Before the start: train.jsonl:1: it is odd, since step 1"
        assert (fault.evidence.cause, fault.evidence.remedy) == (does, "Mend it.")
    shown = next(fault for fault in faults_of(steps_of(20, response__truncated=0.9), SYNC, doubts=[doubt])
                 if fault.detector == "truncation")
    assert shown.evidence.probable == f"before the start: train.jsonl:1: it is odd: {does}"
    seldom = Doubt(doubt, kind, 0.3, "Mend it.")
    assert faults_of(steps_of(20), SYNC, doubts=[seldom, Doubt("a note")]) == []


@pytest.mark.parametrize(("changed", "settings", "says"), [
    ({"reward__answer_correlation": 0.0}, SYNC | {"nodes.vote.function": "mine:majority"}, "`vote` (mine:majority)"),
    ({"reward__answer_correlation": 0.0}, SYNC | {"nodes.reward.function": "model_score"}, "random weights"),
    ({"policy__kl_reference": 0.2}, SYNC | {"roles.reference.copy_of": "null"}, "not the model that is trained"),
    ({}, PAIRS | {"nodes.update.with.nll": "100"}, "outweighs what is preferred"),
    ({"policy__kl_reference": 1e-9}, SYNC | {"roles.actor.learning_rate": "5e-7", "roles.actor.lora.rank": "16"},
     "`roles.actor.learning_rate` is 5e-7"),
])
def test_what_a_run_has_of_its_own_is_named(changed, settings, says):
    fault, *_ = faults_of(steps_of(20, **changed), settings)
    assert says in fault.message
    assert faults_of(steps_of(20), settings | {"nodes.update.with.nll": "1"}) == []


@pytest.mark.parametrize(("changed", "settings", "cause"), [
    ({"preference__length_correlation": 1.0}, PAIRS, "longer"),
    ({"samples": 2.0}, SYNC, "so few samples"),
    ({"earned__right": 1.0, "earned__wrong": 0.0, "earned__wrong_max": 0.03, "earned__wrong_min": 0.0}, SYNC,
     "small difference"),
    ({"earned__right_min": 1.5, "earned__right_max": 2.0, "earned__wrong_max": 1.0}, SYNC, "beside the result"),
    ({}, SYNC | {"roles.actor.freeze": '["model.*"]'}, "frozen"),
])
def test_a_symptom_is_explained_by_facts_before_what_its_rule_supposes(changed, settings, cause):
    assert faults_of(steps_of(20, **changed), settings) == []
    fault, *_ = faults_of(steps_of(20, **changed, response__truncated=0.9), settings)
    assert cause in fault.evidence.probable


def test_a_gradient_that_leaps_once_is_named_at_its_step():
    steps = steps_of(40, first=1000)
    steps[24]["grad_norm"] = 30.0
    fault, = faults_of(steps)
    assert (fault.detector, fault.step) == ("loss_spike", 25)


def trained(values: Iterable[float], name: str = "loss") -> list[dict[str, float]]:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def noise(count: int, middle: float, deviation: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(middle, deviation) for _ in range(count)]


@pytest.mark.parametrize(("name", "usual", "spike"), [
    ("loss", noise(30, 0.0, 0.01), 0.5),
    ("loss", noise(30, 0.0, 0.01), -0.5),
    ("grad_norm", noise(30, 1.0, 0.1), 15.0),
    ("value/loss", noise(30, 2.0, 0.1), 9.0),
    ("loss", [], math.nan),
    ("grad_norm", noise(3, 1.0, 0.1), math.inf),
])
def test_a_spike_is_reported_and_what_follows_is_not(name, usual, spike):
    steps = trained([*usual, spike, *usual], name)
    fault, = faults_of(steps)
    assert (fault.detector, fault.step, fault.evidence.metric) == ("loss_spike", len(usual) + 1, name)


@pytest.mark.parametrize("values", [
    [*noise(10, 1.0, 0.1), 50.0],
    [2.0 * 0.98**step for step in range(300)],
    [0.0] * 100 + [1.0] + [0.0] * 100,
    [1e-9 * value for value in noise(50, 0.0, 1.0)] + [1e-6],
], ids=["too early to say", "falling", "one that trained among many that did not", "rounding"])
def test_what_is_no_spike(values):
    assert [each for each in faults_of(trained(values)) if each.detector == "loss_spike"] == []


@pytest.mark.parametrize(("rises", "falls", "said"), [
    ("reward/form", "reward/math", ("`form`", "`math`")), ("reward/mean", "response/has_answer", ("right answers",))])
def test_a_reward_that_rises_while_another_or_right_answers_fall_is_hacked(rises, falls, said):
    steps = [line | {rises: 0.3 + 0.02 * step, falls: 0.6 - 0.012 * step}
             for step, line in enumerate(steps_of(40, first=1000))]
    fault = next(fault for fault in faults_of(steps) if fault.detector == "reward_hacking")
    assert all(each in fault.evidence.what for each in said)


def test_held_out_answers_that_become_worse_while_training_earns_more():
    steps = steps_of(40, first=1000)
    for step, value in ((10, 0.6), (20, 0.3), (30, 0.25)):
        steps[step - 1]["validation/heldout"] = value
    fault, = faults_of(steps)
    assert (fault.detector, fault.evidence.since) == ("held_out_falls", 11), "since the best one"


@pytest.mark.parametrize(("goal", "values", "cause"), [
    ("preference/margin", (0.0, 0.1), "`chosen` and `rejected` are swapped"),
    ("loss", (3.0, -0.05), "the answers that are learnt are wrong"),
])
def test_held_out_falls_reads_the_goal_of_runs_without_rewards(goal, values, cause):
    start, slope = values
    steps = [{"step": step, goal: start + slope * step} for step in range(1, 31)]
    for step, value in ((10, 0.6), (20, 0.3), (30, 0.25)):
        steps[step - 1]["validation/heldout"] = value
    fault, = faults_of(steps)
    assert (fault.detector, fault.step) == ("held_out_falls", 30)
    assert cause in fault.evidence.cause
    worse = [line | {goal: start - slope * line["step"]} for line in steps]
    assert "held_out_falls" not in {each.detector for each in faults_of(worse)}, "training gets worse, too"


def test_held_out_answers_are_compared_with_those_before_the_first_step():
    steps = [{"step": 0, "validation/heldout": 0.5}, *steps_of(20, first=1000)]
    for step, value in ((6, 0.2), (12, 0.1)):
        steps[step]["validation/heldout"] = value
    fault, = faults_of(steps)
    assert (fault.detector, fault.step, fault.evidence.figures["best"]) == ("held_out_falls", 12, 0.5)
    assert faults_of(steps[1:]) == []


@pytest.mark.parametrize(("goal", "sign", "function"), [
    ("loss", 1, "supervised_update"), ("distillation/divergence", 1, "distillation_update"),
    ("preference/margin", -1, "preference_update"),
])
def test_training_that_gets_worse_at_its_own_goal(goal, sign, function):
    values = [sign * value for value in (*noise(20, 1.0, 0.05), *noise(12, 2.0, 0.05, seed=1))]
    fault, = (fault for fault in faults_of(trained(values, goal), {"nodes.update.function": function})
              if fault.detector != "loss_spike")
    assert fault.detector == "reward_fell"
    assert fault.evidence.since == pytest.approx(21, abs=2)
    assert faults_of(trained(values[::-1], goal), {"nodes.update.function": function}) == []


def test_what_healthy_runs_of_other_algorithms_show_is_no_fault():
    for goal in ("distillation/divergence", "distillation/reverse_kl"):
        steps = trained([*noise(55, 0.256, 0.01), *noise(45, 0.317, 0.01, seed=1)], goal)
        assert faults_of(steps, {"nodes.update.function": "distillation_update"}) == []
    unbeaten = steps_of(40, first=8, advantages__min=0.0)  # no greedy answer of ReMax has earned anything
    assert "advantage_sign" not in {fault.detector for fault in faults_of(
        unbeaten, {"nodes.advantage.function": "baseline_advantage"})}


SETTINGS = {"roles.actor.trained": "true", "roles.actor.weight_decay": "10", "roles.reference.copy_of": "actor",
            "nodes.rollout.with.group_size": "8", "nodes.update.function": "policy_update"}


@pytest.mark.parametrize(("detector", "changed", "step"), [
    ("reference_differs", {"policy/kl_reference": 0.4}, 1),
    ("duplicated_samples", {"response/alike": 0.875}, 3),
    ("end_untrained", {"response/end_untrained": 1.0, "environment/turns": None}, 4),
])
def test_faults_of_the_start_that_settings_explain(detector, changed, step):
    for wrong, expected in ((True, [(detector, step)]), (False, [])):
        steps = [{name: value for name, value in (line | (changed if wrong else {})).items()
                  if value is not None} for line in steps_of(30, first=1000)]
        found = faults_of(steps, SETTINGS if wrong else {})
        assert [(fault.detector, fault.step) for fault in found if fault.detector == detector] == expected


@pytest.mark.parametrize(("settings", "detector", "remedy"), [
    ({"roles.actor.warmup_steps": "4000"}, "policy_stuck", "roles.actor.warmup_steps=20"),
    ({"roles.actor.max_grad_norm": "1e-12", "roles.actor.learning_rate": "1e-6"}, "policy_stuck",
     "roles.actor.max_grad_norm=1.0"),
    ({"roles.actor.learning_rate": "1e-6"}, "policy_stuck", "roles.actor.freeze=[]"),
    ({"roles.actor.learning_rate": "1e-6", "roles.actor.warmup_steps": "8", "steps": "9000"}, "policy_stuck",
     "roles.actor.freeze=[]"),
    ({"roles.reference.follow.every": "1", "roles.reference.follow.mix": "1.0"}, "reference_moves", "follow=null"),
])
def test_a_policy_at_its_reference_is_told_by_what_keeps_it_there(settings, detector, remedy):
    settings = {"roles.actor.learning_rate": "1e-4", **SETTINGS, "roles.actor.weight_decay": "0", **settings}
    found = {fault.detector: fault for fault in faults_of(steps_of(20, policy__kl_reference=0.0), settings)}
    fault = found[detector]
    assert fault.step == (16 if detector == "policy_stuck" else 8)
    assert remedy in fault.evidence.remedy


RATE = {**SETTINGS, "roles.actor.weight_decay": "0", "roles.actor.learning_rate": "1e-6", "steps": "2000"}


def test_policy_stuck_is_silent_in_a_warmup_and_at_the_end_of_a_schedule():
    warming = [line | {"learning_rate": 1e-6 * line["step"] / 500, "policy/kl_reference": 2e-8}
               for line in steps_of(60, first=1000)]
    assert faults_of(warming, {**RATE, "roles.actor.warmup_steps": "500"}) == []
    ending = [line | {"learning_rate": 5e-9} for line in steps_of(40, first=1000)]
    assert faults_of(ending, {**RATE, "roles.actor.schedule": "cosine"}) == []
    for changed in ({"roles.actor.schedule": "constant"}, {"roles.actor.schedule": "linear",
                                                           "roles.actor.learning_rate": "1e-9"}):
        assert [fault.detector for fault in faults_of(ending, {**RATE, **changed})] == ["policy_stuck"]


def test_policy_stuck_is_silent_where_an_environment_pays_all_samples_alike():
    silent = {"environment/reward": 0.0, "environment/zero_std_groups": 1.0, "policy/kl_reference": 0.0,
              "grad_norm": 0.0}
    steps = [{name: value for name, value in line.items() if not name.startswith("reward/")} | silent
             for line in steps_of(20, first=1000)]
    assert {fault.detector for fault in faults_of(steps, RATE)} == {"no_signal"}
    steps = [line | {"environment/zero_std_groups": 0.2} for line in steps]
    assert "policy_stuck" in {fault.detector for fault in faults_of(steps, RATE)}


@pytest.mark.parametrize("seed", range(12))
def test_detectors_bear_numbers_that_have_no_mean(seed):
    draw = random.Random(seed)
    names = [*HEALTHY, "loss", "value/loss", "value/learning_rate", "environment/reward", "environment/zero_std_groups",
             "reward/form", "reward/math", "reward/max", "reward/min", "response/alike", "response/fingerprint",
             "epoch", "validation/heldout", "gradient/share_of_layer/7", "mismatch/unsampled",
             "advantages/of_prompts", "response/end_untrained", "environment/failed", "prompt/repeated",
             "gradient/remembered", "reward/correlation/form", "preference/better", "preference/margin", "reward/kl",
             *(reading.metric.replace("*", "it") for reading in READINGS)]
    names = [*dict.fromkeys(names)]
    extreme = [math.inf, -math.inf, math.nan, 1e300, -1e300, 0.0, 1.0]
    steps = [{name: draw.choice(extreme) for name in names} | {"step": step} for step in range(1, 40)]
    assert "loss_spike" in {fault.detector for fault in faults_of(steps, RATE)}
    for name in names:
        changed = [line | {name: draw.choice(extreme)} for line in steps_of(40, seed, first=1000)]
        faults_of(changed, RATE)


def test_a_kl_term_that_outweighs_advantages_is_told_with_its_weight():
    near: dict[str, Any] = {"policy__kl_reference": 0.002, "reward__mean": 0.4}
    for weight, told in (("100", ["unusual_setting"]), ("0.01", [])):
        faults = faults_of(steps_of(20, **near), {**SETTINGS, "roles.actor.weight_decay": "0",
                                                  "nodes.update.with.kl": weight})
        assert [fault.detector for fault in faults] == told


def test_conversations_that_end_sooner_since_they_are_right_are_no_length_hacking():
    shorter = steps_of(40, first=21, reward__length_correlation=-0.9, response__length=20.0)
    for told, turns in ((True, 2.0), (False, 1.0)):
        found = faults_of([line | {"environment/turns": turns if line["response/length"] == 20.0 else 2.0}
                           for line in shorter])
        assert told == ("length_hacking" in {fault.detector for fault in found})


def test_right_answers_that_take_more_tokens_are_no_length_hacking():
    longer = steps_of(40, first=21, reward__length_correlation=0.8, response__length=60.0)
    assert "length_hacking" in {fault.detector for fault in faults_of(
        [line | {"reward/answer_correlation": 0.5} for line in longer])}
    assert "length_hacking" not in {fault.detector for fault in faults_of(
        [line | {"reward/answer_correlation": 1.0} for line in longer])}


@pytest.mark.parametrize(("rates", "schedule", "told"), [
    ([1e-6] * 8 + [0.0] * 12, "linear", "its schedule ends too early"),
    ([1e-6 * (200 - step) / 200 for step in range(20)], "linear", ""),
    ([1e-6] * 20, "constant", ""),
])
def test_a_schedule_that_ends_before_the_run_is_told(rates, schedule, told):
    steps = [line | {"learning_rate": rate} for line, rate in zip(steps_of(20, first=1000), rates)]
    causes = [fault.evidence.probable for fault in faults_of(steps, QUIET | {"roles.actor.schedule": schedule})
              if fault.detector == "policy_stuck"]
    assert [cause.startswith(told) for cause in causes] == [True] * bool(told)


def test_held_out_answers_far_below_those_of_training_are_told_at_the_start():
    steps = [{name: value for name, value in line.items() if "environment" not in name}
             for line in steps_of(12, first=1000)]
    steps[0] |= {"validation/heldout": 0.02, "validation_high/heldout": 0.07}
    fault = main_fault(faults_of(steps))
    assert fault is not None
    assert (fault.detector, fault.step) == ("held_out_falls", 5)
    assert "the held-out answers are wrong" in fault.evidence.probable
    steps[0] |= {"validation_high/heldout": 0.3}
    assert faults_of(steps) == []


@pytest.mark.parametrize(("changed", "detector", "cause"), [
    ({"preference/accuracy": 1.0}, "no_signal", "too easy"),
    ({"preference/accuracy": 0.0, "response/alike": 0.5}, "pairs_contradict", "equal answers"),
])
def test_pairs_that_teach_nothing_are_told_from_the_start(changed, detector, cause):
    steps = [{"step": step, "preference/accuracy": 0.7, "response/alike": 0.0} | changed for step in range(1, 12)]
    fault = main_fault(faults_of(steps, {"nodes.pairs.function": "labelled_pairs"}))
    assert fault is not None
    assert fault.detector == detector
    assert cause in fault.evidence.cause


def test_what_changed_with_a_fault_comes_before_what_its_rule_supposes():
    steps = steps_of(40, first=21, prompt__length=90.0, response__truncated=0.9)
    steps = [{"prompt/length": 20.0} | line for line in steps]
    fault, = faults_of(steps)
    assert fault.evidence.probable.startswith("`prompt/length` leapt from 20 to 90 at step 21")


@pytest.mark.parametrize(("at_start", "told"), [(1e-7, True), (0.04, False)])
def test_a_sampler_that_is_left_behind_is_told_from_one_that_computes_otherwise(at_start, told):
    """It agrees with the trainer until something is trained, however slowly they part; kernels differ at once."""
    steps = [line | {"mismatch/logprob_mean": at_start + 0.002 * (line["step"] - 1) ** (1 if told else 2)}
             for line in steps_of(24, first=1000)]
    fault = next(fault for fault in faults_of(steps) if fault.detector == "mismatch")
    assert ("never gets what is trained" in fault.evidence.probable) == told


@pytest.mark.parametrize(("perplexity", "told"), [(1.0238, ["mismatch"]), (1.004, [])])
def test_log_probabilities_among_fewer_tokens_are_told_by_their_sign(perplexity, told):
    """Rounding of a GPU differs as much, to both sides."""
    found = faults_of(steps_of(12, mismatch__logprob_mean=0.0235, mismatch__logprob_max=0.3,
                               mismatch__perplexity_ratio=perplexity))
    assert [fault.detector for fault in found] == told
    assert all("`top_p`" in fault.evidence.probable for fault in found)


@pytest.mark.parametrize(("mode", "told"), [("sync", ["mismatch"]), ("async", [])])
def test_old_samples_in_mode_sync_are_told_with_the_role_that_sampled(mode, told):
    steps = [line | {"staleness/max": line["step"] - 1.0} for line in steps_of(12, first=1000)]
    found = faults_of(steps, SYNC | {"mode": mode, "nodes.rollout.function": "generate",
                                     "nodes.rollout.role": "reference"})
    assert [fault.detector for fault in found] == told
    assert all("`nodes.rollout.role` is reference" in fault.evidence.probable for fault in found)


def test_old_samples_are_told_by_steps_that_compare_no_log_probabilities():
    steps = [{name: value for name, value in line.items() if not name.startswith("mismatch/")} | {"staleness/max": 1.0}
             for line in steps_of(12, first=1000)]
    settings = {"mode": "sync", "nodes.rollout.function": "generate", "nodes.rollout.role": "reference"}
    assert [fault.detector for fault in faults_of(steps, SYNC | settings)] == ["mismatch"]


def test_another_sampler_after_a_resume_has_its_own_rounding():
    steps = [line | {"mismatch/logprob_mean": 2e-5 if line["step"] < 60 else 0.004}
             for line in steps_of(90, first=1000)]
    assert not [*faults_of(steps)]


@pytest.mark.parametrize(("far", "told"), [(0.03, ["reference_differs"]), (0.0004, [])])
def test_a_copied_reference_is_the_policy_until_something_is_trained(far, told):
    steps = [line | {"policy/kl_reference": far + 1e-3 * (line["step"] - 1)} for line in steps_of(12, first=1000)]
    assert [fault.detector for fault in faults_of(steps, SYNC | {"roles.reference.copy_of": "actor"})] == told


@pytest.mark.parametrize(("loss", "told"), [(0.7322, ["reference_differs"]), (math.log(2), [])])
def test_pairs_have_the_loss_of_no_difference_until_something_is_trained(loss, told):
    steps = [{"step": step, "loss": loss - 0.001 * (step - 1), "preference/better": 0.1 * (step - 1)}
             for step in range(1, 9)]
    assert [fault.detector for fault in faults_of(steps, {"nodes.update.function": "preference_update"})] == told
    with_examples = {"nodes.update.function": "preference_update", "nodes.sft.function": "supervised_update"}
    assert not [*faults_of(steps, with_examples)]


@pytest.mark.parametrize(("std", "told"), [(0.0, True), (0.45, False)])
def test_parts_that_cancel_each_other_are_named(std, told):
    steps = [line | {"reward/std": std, "reward/math": 0.1 * (line["step"] % 5), "reward/cancels":
                     1 - 0.1 * (line["step"] % 5)} for line in steps_of(7, first=1000)]
    assert [fault.evidence.what for fault in faults_of(steps)] == [
        "All completions of a step earn the same, though `cancels` and `math` vary"] * told


@pytest.mark.parametrize(("turns", "told"), [(4.0, True), (2.5, False)])
def test_conversations_that_never_end_are_told_from_tools_that_fail(turns, told):
    steps = steps_of(8, environment__turns=turns, environment__error_answers=0.6)
    fault, = faults_of(steps, SYNC | {"nodes.rollout.with.max_turns": "4"})
    assert fault.detector == "tool_errors"
    assert ("does not end at a final answer" in fault.evidence.probable) == told


@pytest.mark.parametrize(("right", "told"), [(0.2, False), (0.5, True)])
def test_a_reward_that_falls_with_right_answers_is_as_it_was(right, told):
    steps = steps_of(30, first=21, reward__mean=0.2, response__has_answer=right)
    assert ("reward_changed" in {fault.detector for fault in faults_of(steps)}) == told


def test_advantages_whose_cut_rows_are_dropped_have_no_mean_of_0():
    steps = steps_of(20, advantages__of_prompts=0.2)
    assert [fault.detector for fault in faults_of(steps, SYNC)] == ["advantage_baseline"]
    assert faults_of(steps, SYNC | {"nodes.overlong.function": "drop_truncated"}) == []


def test_a_policy_that_leaps_at_a_usual_gradient_has_other_weights():
    fault = next(fault for fault in faults_of(steps_of(40, first=21, policy__kl_reference=2.0))
                 if fault.detector == "kl_runs_off")
    assert "its weights were replaced or damaged" in fault.evidence.probable


def test_progress_that_is_lost_is_told_from_a_reference_that_moves():
    start = {"policy/entropy": 0.1, "response/length": 10.0, "response/alike": 0.7, "policy/kl_reference": 1e-5}
    later = {"policy/entropy": 0.2, "response/length": 16.0, "response/alike": 0.4, "policy/kl_reference": 0.1}
    for after, told in ((start, "lost its progress"), (later | {"policy/kl_reference": 1e-5}, "has become the policy")):
        steps = [line | (start if line["step"] < 4 else later if line["step"] < 15 else after)
                 for line in steps_of(17, first=1000)]
        fault = next(fault for fault in faults_of(steps) if fault.detector == "reference_moves")
        assert told in fault.evidence.probable


EQUAL = {"reward/zero_std_groups": 1.0, "reward/mean": 0.2, "response/alike": 0.3, "reward/max": 1.0, "reward/min": 0.0}
GENERATION = "roles.actor.generation."


@pytest.mark.parametrize(("changed", "settings", "cause", "remedy"), [
    ({}, {}, "does not depend on the completion", "nodes.reward.with.reward"),
    ({"response/alike": 0.875}, {f"{GENERATION}top_p": "0.05", "nodes.rollout.function": "generate"},
     "only the likeliest tokens are sampled", f"{GENERATION}top_p=1"),
    ({"reward/mean": 0.02, "validation/heldout": 0.4, "response/alike": 0.875, "reward/unanswered": 0.9,
      "response/has_answer": 0.0}, {}, "another form", "data.train"),
    ({"reward/mean": 0.02, "validation/heldout": 0.4, "response/alike": 0.875, "response/has_answer": 0.0}, {},
     "too hard", "data.train"),
    ({"reward/mean": 0.02, "validation/heldout": 0.4, "response/alike": 0.875}, {},
     "right answers earn hardly anything", "nodes.reward"),
    ({"reward/mean": 0.02, "validation/heldout": 0.01, "response/alike": 0.875, "response/has_answer": 0.02,
      "environment/turns": None}, {},
     "its tokenizer or weights are not those that it was trained with", "roles.*.model"),
    ({"reward/mean": 0.95, "response/has_answer": 0.95}, {}, "too easy", "informative_groups"),
    ({"reward/mean": 0.95, "response/has_answer": 0.1}, {}, "pays wrong answers, too", "nodes.reward"),
])
def test_equal_rewards_are_told_by_their_cause(changed, settings, cause, remedy):
    steps = [{name: value for name, value in (line | EQUAL | changed).items() if value is not None}
             for line in steps_of(12)]
    fault = next(fault for fault in faults_of(steps, {**SETTINGS, **settings}) if fault.detector == "no_signal")
    assert cause in fault.evidence.probable
    assert remedy in fault.evidence.remedy


def test_answers_that_a_stop_text_cuts_off_are_told_by_it():
    steps = [line | {"reward/unanswered": 1.0} for line in steps_of(12)]
    fault, = faults_of(steps, {**SETTINGS, "roles.actor.weight_decay": "0", f"{GENERATION}stop": '["####"]'})
    assert fault.detector == "answers_not_found"
    assert fault.evidence.remedy.startswith(f"{GENERATION}stop=[]")


def test_records_that_come_again_and_again():
    steps = [line | {"epoch": 0.8 * line["step"]} for line in steps_of(20, first=1000)]
    assert [(fault.detector, fault.step) for fault in faults_of(steps)] == [("data_repeats", 10)]
    assert faults_of([line | {"epoch": 0.1 * line["step"]} for line in steps]) == []


def test_a_trial_of_a_few_steps_says_little():
    """Random weights: no completion ends, none is right."""
    wrong: dict[str, Any] = {"response__truncated": 1.0, "reward__zero_std_groups": 1.0, "policy__entropy": 5.0}
    assert faults_of(steps_of(7, **wrong)) == []
    assert "truncation" in {fault.detector for fault in faults_of(steps_of(9, **wrong))}


def test_samples_that_come_again_and_data_that_goes_back():
    steps = [line | {"response/fingerprint": 1000.0 + step, "epoch": 0.1 * step}
             for step, line in enumerate(steps_of(20, first=1000))]
    assert faults_of(steps) == []
    steps[15]["response/fingerprint"] = 1004.0
    assert [fault.detector for fault in faults_of(steps)] == ["stale_data"]
    steps[15]["response/fingerprint"], steps[12]["epoch"] = 9.0, 0.3
    assert [fault.step for fault in faults_of(steps)] == [13]


def test_a_fault_is_said_once_and_one_that_is_off_never():
    steps = steps_of(40, first=21, response__truncated=0.9)
    assert [fault.detector for fault in faults_of(steps)] == ["truncation"]
    assert faults_of(steps, actions={"truncation": "off"}) == []


def test_the_cause_is_the_fault_that_is_no_symptom():
    steps = steps_of(40, first=21, advantages__reward_correlation=-0.9, policy__kl_reference=2.0, reward__mean=0.1)
    found = faults_of(steps)
    assert {"advantage_sign", "kl_runs_off"} <= {fault.detector for fault in found}
    main = main_fault(found)
    assert isinstance(main, LearningFault)
    assert main.detector == "advantage_sign"
    assert main_fault([]) is None


def test_the_cause_is_what_began_first_and_nearest_to_the_root():
    steps = steps_of(40, first=21, data__prompts_cut=60.0, advantages__std=20.0, policy__entropy=2.0)
    main = main_fault(faults_of(steps))
    assert main is not None
    assert main.detector == "data_lost"
    later = [line | {"data/prompts_cut": 60.0 * (line["step"] > 32)} for line in steps]
    assert {"data_lost", "advantage_scale"} <= {fault.detector for fault in faults_of(later)}
    main = main_fault(faults_of(later))
    assert main is not None
    assert main.detector == "advantage_scale", "what began 12 steps later is no cause"


QUIET = {"roles.actor.trained": "true", "nodes.update.function": "policy_update", "nodes.rollout.function": "generate",
         "nodes.rollout.with.group_size": "8", "roles.actor.learning_rate": "1e-6", "steps": "200"}


@pytest.mark.parametrize(("setting", "value", "fix"), [
    ("roles.actor.learning_rate", "0.1", "roles.actor.learning_rate="),
    ("roles.actor.betas", "[0.9999, 0.9]", "betas=[0.9, 0.95]"),
    ("roles.actor.betas", "[0.9, 0.0]", "betas=[0.9, 0.95]"),
    ("roles.actor.weight_decay", "1e4", "weight_decay=0"),
    ("roles.actor.generation.temperature", "0.0", "temperature=1"),
    ("roles.actor.generation.top_k", "1", "top_k=0"),
    ("nodes.update.with.clip", "1e-6", "with.clip=0.2"),
    ("nodes.reward.with.reward.math", "-1.0", "reward.math=1.0"),
])
def test_a_setting_that_no_run_learns_with_is_named_with_its_value(setting, value, fix):
    steps = [line | {"response/alike": 0.2} for line in steps_of(6, first=1000)]
    assert faults_of(steps, QUIET) == []
    fault, = faults_of(steps, QUIET | {setting: value})
    assert (fault.detector, fault.step) == ("unusual_setting", 3)
    assert f"`{setting}` is {value}" in fault.evidence.what
    assert fix in fault.evidence.remedy


@pytest.mark.parametrize(("path", "rate", "told"), [
    ("Qwen/Qwen3-8B", "1e-6", False), ("Qwen/Qwen3-8B", "1e-4", True), ("tiny", "1e-4", False), ("tiny", "2e-3", True),
])
def test_a_symptom_names_the_setting_that_explains_it(path, rate, told):
    settings = QUIET | {"roles.actor.model.path": path, "roles.actor.learning_rate": rate}
    fault, = (each for each in faults_of(steps_of(40, first=21, policy__kl_reference=2.0), settings)
              if each.detector == "kl_runs_off")
    assert (f"`roles.actor.learning_rate` is {rate}" in fault.evidence.cause) == told


def test_a_fault_of_the_start_names_the_form_that_prompts_have():
    settings = QUIET | {"data.prompt_suffix": " Answer in one word.", "data.question": "question"}
    for first, told in ((1, True), (20, False)):
        fault = next(each for each in faults_of(steps_of(40, first=first, response__truncated=0.9), settings)
                     if each.detector == "truncation")
        assert ("`data.prompt_suffix` is ' Answer in one word.'" in fault.evidence.cause) == told
        assert "data.question" not in fault.evidence.cause


@pytest.mark.parametrize(("most", "line"), [("14", "nodes.rollout.with.max_tokens=56"),
                                           ("400", "roles.actor.generation.max_new_tokens=96")])
def test_conversations_that_are_cut_off_want_the_smaller_limit_raised(most, line):
    settings = QUIET | {"roles.actor.generation.max_new_tokens": "24", "nodes.rollout.with.max_tokens": most}
    fault, = (each for each in faults_of(steps_of(12, response__truncated=0.9), settings)
              if each.detector == "truncation")
    assert line in fault.evidence.remedy


def test_an_optimizer_that_forgets_is_named_at_once():
    steps = [line | {"gradient/remembered": 2.0 * line["step"]} for line in steps_of(20, first=1000)]
    assert faults_of(steps) == []
    steps[11]["gradient/remembered"] = 1.0
    assert [(fault.detector, fault.step) for fault in faults_of(steps)] == [("optimizer_forgets", 12)]


def test_a_part_that_fines_everything_is_named_with_its_setting():
    steps = [line | {"reward/math": 0.5, "reward/length": -1.0} for line in steps_of(12, first=1000)]
    fault, = faults_of(steps, {"nodes.reward.with.reward.length.target": "3"})
    assert fault.detector == "idle_part"
    assert "nodes.reward.with.reward.length.target=3" in fault.evidence.cause


def test_a_reference_of_other_weights_is_told_by_a_penalty_in_the_reward():
    settings = SETTINGS | {"roles.actor.weight_decay": "0"}
    steps = [line | {"reward/kl": 8.0} for line in steps_of(5, first=1000)]
    fault, = faults_of([{name: value for name, value in line.items() if name != "policy/kl_reference"}
                        for line in steps], settings)
    assert (fault.detector, fault.step) == ("reference_differs", 1)


def test_a_run_file_may_name_each_detector():
    assert learning_detectors() == RULES.keys()


def test_each_detector_is_on_the_page():
    page = (ROOT / "docs/learning_faults.md").read_text()
    assert [name for name in RULES if f"`{name}`" not in page] == []


FLAT = """
from distflow import reward

@reward
def flat(completion, answer, row):
    return 1.0 if row >= 160 else 1.0 / (1 + len(completion))  # 32 rows a step: from step 6 on
"""


def test_a_run_that_a_detector_stops_keeps_the_checkpoint_before(launch, workspace):
    (workspace / "flat.py").write_text(FLAT)
    dag = (workspace / "grpo.yaml").read_text().replace("brevity", "flat")
    (workspace / "flat.yaml").write_text(dag)
    done = launch(2, "--dag", "flat.yaml", "--run-file", "tiny.yaml", "--name", "it", "--set", "steps=30", "--set",
                  "robust.detectors.no_signal=stop")
    run = workspace / "runs/it"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 8
    assert [step_of(path) for path in complete_checkpoints(run / "checkpoints")] == [2, 4]
    assert "after step 4:  distflow resume" in done.stdout
    event, = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if "no_signal" in line)
    assert (event["since"], event["step"]) == (6, 8)
    assert not (run / "model").exists()
