"""Table of faults that one metric says outright: READINGS, each a metric, its bound, and what is wrong beyond it.

A new metric wants one line here. Rules that compare curves are in `learning_curves`, causes and settings in
`learning_causes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.telemetry.learning_series import (
    FIRST,
    RECENT,
    Evidence,
    Origin,
    Rows,
    Series,
    add_rule,
    middle,
    number,
)


@dataclass(frozen=True)
class Reading:
    """A metric that says a fault: the median and the last of its `steps` last values (0: as many as have enough rows)
    are from `least` to `most`. rise, plus, drop: bounds in proportion to the metric's values before, which are those of
    `base` steps, without it the run's first ones. per: what values are divided by: another metric, `prompts`, or
    `setting`, a pattern of the setting that is probably wrong. Texts may have the fields of `_said`."""

    detector: str
    origin: Origin
    metric: str
    least: float
    what: str
    cause: str
    change: str
    most: float = math.inf
    per: str = ""
    setting: str = ""
    usual: float = 0.0  # of the setting, where the run does not say it
    steps: int = 3
    when: Callable[[Series], bool] = lambda _series: True
    rows: Rows = ""
    symptom: bool = False
    rise: float = 0.0
    plus: float = 0.0
    drop: float = 0.0
    base: int = 0

    def look(self, series: Series) -> Evidence | None:
        steps, divisor = self.steps or series.window, self._divisor(series)
        compared = bool(self.rise or self.plus or self.drop)
        for metric in series.matching(self.metric) if divisor > 0 else ():
            values = [value / divisor for value in series.latest(metric, steps)]
            if not values or not _within(values, self.least, self.most):
                continue
            before = middle(series.before(metric, steps, self.base, (self.base + 1) // 2) if self.base else
                            series.first(metric, FIRST)) / divisor if compared else 0.0
            least, most = max(self.least, self.rise * before + self.plus) if compared else self.least, \
                min(self.most, self.drop * before) if self.drop else self.most
            if not before >= 0 or not _within(values, least, most) or not self.when(series):
                continue
            said = self._said(series, metric) | {"value": middle(values), "before": before}
            what, cause, change = (text.format(**said) for text in (self.what, self.cause, self.change))
            since = series.since(metric, lambda value, low=least * divisor, high=most * divisor: low <= value <= high)
            return Evidence(since, metric, what, cause, change,
                            {"value": middle(values)} | ({"before": before} if compared else {}))
        return None

    def _divisor(self, series: Series) -> float:
        if self.per in ("", "prompts"):
            return series.prompts if self.per else 1.0
        return number(series.setting(self.setting)[1], self.usual) if self.per == "setting" else \
            series.recent(self.per, 1)

    def _said(self, series: Series, metric: str) -> dict[str, object]:
        """Return the fields of texts: the metric's first part, the setting with its value and a larger one, the trained
        role, the node that trains it, and lines of other settings."""
        key, given = series.setting(self.setting)
        return {"metric": metric, "name": metric.partition("/")[0], "last": metric.rpartition("/")[2],
                "key": key, "set": given or f"{self.usual:g}",
                "more": f"{4 * number(given, self.usual):.12g}", "part": series.deciding_part, "step": series.steps[-1],
                "earned": series.recent(series.reward, RECENT), "own": series.own_nodes,
                "parts": ", ".join(f"`{name.removeprefix('reward/')}`" for name in series.parts) or "reward",
                "role": series.trained_role, "node": series.update_node, "lower": series.lower_rate}


def _within(values: Sequence[float], least: float, most: float) -> bool:
    return least <= middle(values) <= most and least <= values[-1] <= most


def _some_right(series: Series) -> bool:
    """Whether there are right and wrong answers to tell apart."""
    right = series.recent("response/has_answer")
    return 0.1 < right < 0.9


def _rewards_differ(series: Series) -> bool:
    return min(series.last("reward/std", 3) or series.last("environment/reward_std", 3) or [0.0]) > 0.01


def _rewarded(series: Series) -> bool:
    return bool(series.known(series.reward))


def _speaks(series: Series) -> bool:
    """Whether the policy is rewarded and began with weights that had learnt to end what they say."""
    return _rewarded(series) and not series.keys(f"roles.{series.trained_role}.model.architecture")


def _bounded(series: Series) -> bool:
    """Whether the loss's bound is one that few tokens reach."""
    return series.settings.get(f"nodes.{series.update_node}.with.loss", "ppo") in ("ppo", "reinforce")


def _tight(series: Series) -> bool:
    low, high = (series.number(f"nodes.{series.update_node}.with.{key}", 0.2) for key in ("clip", "clip_high"))
    return high < low / 2


def _on_policy(series: Series) -> bool:
    return max(series.last("staleness/max", 3) or [0.0]) == 0


def _one_sided(series: Series) -> bool:
    """Whether differences have one sign, as rounding has not, and are small, as those of foreign tokens are not."""
    return _on_policy(series) and series.recent("mismatch/logprob_max", 3) < 2 and math.log(
        series.recent("mismatch/perplexity_ratio", 3)) > 0.9 * series.recent("mismatch/logprob_mean", 3)


def _no_longer_exact(series: Series) -> bool:
    """Whether trainer and rollout agreed to rounding in the first step: training changes nothing in that, and another
    sampler after a resume may."""
    return _on_policy(series) and len(series.steps) < 40 and series.start("mismatch/logprob_mean", 1) < 1e-4


def _grew(series: Series) -> float:
    """Return how many times as long as at the start completions are, if the reward pays for more than to be right.
    Of conversations each turn counts: those that are right at once end at once."""
    if series.recent("reward/answer_correlation") > 0.9:
        return math.nan
    turns = "environment/turns"
    more = series.recent(turns, RECENT) / max(series.start(turns), 1e-9) if series.known(turns) else 1.0
    return series.recent("response/length", RECENT) / max(series.start("response/length") * more, 1e-9)


def _settles(series: Series) -> bool:
    return series.start("policy/entropy") >= 0.02 and len(series.steps) >= 2 * FIRST and \
        _rewarded(series)


def _untrained(series: Series) -> bool:
    """Whether this is the run's first step, of a policy that its reference copies, or that is far from its own."""
    return series.steps == [1] and (series.recent("policy/kl_reference", 1) > 0.15 or any(
        key.endswith(".copy_of") and value == series.trained_role for key, value in series.settings.items()))


def _early(series: Series) -> bool:
    """Whether the run is in its first steps, and its reference was the policy."""
    return len(series.steps) <= 12 and ((series.known("policy/kl_reference") or [(0, 0.0)])[0][1] < 0.05 or
                                        not _one_update(series))


def _one_update(series: Series) -> bool:
    return not any(series.number(f"nodes.{series.update_node}.with.{key}", 1) > 1 for key in ("epochs", "mini_batches"))


def _differ(series: Series) -> bool:
    """Whether samples differ in what they earn; `no_signal` says why where they do not."""
    return not series.recent(f"{series.reward.partition('/')[0]}/zero_std_groups") >= 0.8


def _trains(series: Series) -> bool:
    """Whether the policy should move: its warm-up is over, or longer than the run."""
    warmup, steps = series.setting_of_role("warmup_steps", 0.0), series.number("steps", 0.0)
    return _differ(series) and not series.copies_policy and (series.steps[-1] >= warmup or warmup >= steps)


def _ended(series: Series) -> bool:
    """Whether a rate that falls by a schedule is at its end long before the run's."""
    rates, floor = [value for _, value in series.known("learning_rate")], series.setting_of_role("min_learning_rate", 0)
    return series.scheduled and series.steps[-1] < 0.8 * series.number("steps", 0.0) and \
        max(rates) > 2 * rates[-1] and rates[-1] <= floor + 0.02 * (max(rates) - floor)


def _stays(series: Series) -> bool:
    """Whether a tiny rate is not one of a warm-up, or of a schedule's end."""
    return series.setting_of_role("learning_rate", 0.0) <= 1e-8 or not series.scheduled and _trains(series)


_COMPARE = "compare a prompt of samples.jsonl with its answer and reward"
DATA, REWARD, ADVANTAGE, UPDATE, POLICY, OUTCOME = Origin
_SYMPTOM: dict[str, Any] = {"steps": 0, "symptom": True}
_LIMIT: dict[str, Any] = {"rows": "long", "setting": "roles.*.generation.max_new_tokens", "usual": 256}
_ALIKE = ("the policy gives a prompt the same answer again and again: too low a temperature, or too little entropy",
          "roles.{role}.generation.temperature=1.0, a larger group_size, or easier data")
_ADVANTAGES = "the node that writes `advantages`: it must return reward minus baseline, in the order of its rows"
_UNFROZEN = "roles.{role}.freeze=[] ; a loss of your own must not detach the log-probabilities"
_ONE_LAYER = ("{value:.1%} of the gradient's square is of layer `{last}`",
              "this layer's numbers overflow or are scaled wrongly, or all others are cut off from the loss (frozen, "
              "detached)", "compare the gradients of this layer's parameters with those of another engine:  engine: "
              "fsdp , dtype: float32")
_FAR = ("KL to the reference is {value:.2g} nats a token before anything is trained",
        "the reference is asked otherwise than the policy (another temperature, template or position), or is not the "
        "model that is trained: it has other weights",
        "roles.reference={{copy_of: {role}}} , and no temperature of its own at its node")
_OTHER_BASELINES = {"gae", "baseline_advantage", "discounted_advantage", "distillation_advantage", "rank_filter",
                    "drop_truncated"}  # the last two leave rows out whose advantages belong to the mean
_MISMATCH = (
    "Trainer and rollout differ by {value:.2g} nats a token, before by {before:.2g}",
    "the engine that samples does not hold the weights that are trained, or computes them otherwise (precision, "
    "kernels, positions, temperature); or a node has changed `responses` after they were sampled; or the trainer is "
    "not deterministic (dropout)", "roles.{role}.rollout=hf  shows whether it is the engine; until then a node "
    "`truncated_importance` corrects for it")
_RATE_LEAPS = (
    "The learning rate leapt from {before:.2g} to {value:.2g}",
    "a resume or a change of settings with another rate, or a schedule or warm-up that begins again",
    "go on from a checkpoint before it with  roles.{role}.learning_rate={before:.2g}")
_CUT = (
    "{value:.0%} of the completions are cut off at the limit of tokens",
    "completions do not come to an end: the limit is too short for the task; or the policy earns by going on",
    "{key}={more} , or a node `overlong_penalty` as dapo.yaml has it")
READINGS = (
    Reading("data_lost", DATA, "data/prompts_cut", 0.1, "{value:.0%} of the prompts lose their beginning",
            "`{key}` is {set}, and they are longer: the instructions, or the question itself, are cut off",
            "{key}={more} , or  data.long_prompts=drop", per="prompts", setting="data.max_prompt_tokens", usual=1024),
    Reading("data_lost", DATA, "data/targets_cut", 0.1, "{value:.0%} of the answers to be learnt lose their end",
            "`{key}` is {set}, and they are longer: the result, and the token that ends an answer, are never learnt",
            "{key}={more}", per="samples", setting="data.max_target_tokens", usual=1024),
    Reading("data_lost", DATA, "*/prompts_cut", 0.1, "{value:.0%} of the prompts for another role lose their beginning",
            "`{key}` is {set}, and they are longer: the role answers without what was cut off", "{key}={more}",
            per="samples", setting="nodes.*.with.max_prompt_tokens", usual=1024),
    Reading("data_lost", DATA, "data/records_skipped", 0.3, "{value:.1f} records are skipped for each prompt of a step",
            "records are empty, or longer than `data.max_prompt_tokens` allows: what is left is a skewed choice",
            "data.max_prompt_tokens=4096 , or mend the records", per="prompts"),
    Reading("data_lost", DATA, "filter/*/prompts_short", 0.5, "Steps lack {value:.0%} of their prompts",
            "the filter drops most of what is drawn, and `{key}` ({set}) ends the search: problems are too hard or too "
            "easy for this model", "{key}={more} , or data of another difficulty", per="prompts",
            setting="nodes.*.with.max_draws", usual=10, steps=RECENT),
    Reading("answers_not_found", DATA, "reward/unanswerable", 0.1,
            "{value:.0%} of the completions cannot be scored: their records lack a reference answer with a mark, as "
            "others have it", "the records' answers have several forms, or end before the result: whatever is answered "
            "to such a prompt earns the same", "mend or drop these records of  data.train", steps=8),
    Reading("stale_data", DATA, "epoch", 0.0, "The data went back from epoch {before:.3f} to {value:.3f}",
            "the position in the data is that of an earlier step, as after a resume",
            "distflow resume  restores it; a loop of your own must save it", steps=1, base=1, drop=1 - 1e-9),
    Reading("duplicated_prompts", DATA, "prompt/repeated", 0.2, "{value:.0%} of a step's prompts are there twice",
            "the training data repeats itself, so that a step learns from few problems",
            "distflow validate --prove  names what is there twice; take it out of  data.train"),
    Reading("leaking_prompts", DATA, "prompt/has_answer", 0.2, "{value:.0%} of the prompts hold their own answer",
            "the answer leaks into the question, so that the policy learns to copy it; nothing is wrong if questions "
            "offer their answers to choose from, or quote a text",
            "take the answer out of the questions of  data.train , or  robust.detectors.leaking_prompts=off",
            rows="high"),
    Reading("one_answer", DATA, "prompt/same_answer", 0.7, "{value:.0%} of a step's prompts have the same answer",
            "the training data is skewed, or `data.answer` names the wrong field: the policy earns by one answer to "
            "everything", "data with other answers, or another  data.answer", steps=8, rows="high"),
    Reading("pairs_contradict", DATA, "preference/worse_has_answer", 0.2,
            "In {value:.0%} of the pairs the rejected answer is the right one, and the chosen one is wrong",
            "chosen and rejected are swapped, or labels are noise; or a reward ranks wrong answers first",
            "data.columns={{chosen: rejected, rejected: chosen}} , or clean the pairs of  data.train", steps=8),
    Reading("pairs_contradict", DATA, "response/alike", 0.1,
            "At least {value:.0%} of the chosen and rejected answers are identical, so that there is nothing to prefer",
            "one field is read twice, or the pairs were made of equal answers", "pairs of  data.train  that differ",
            when=lambda series: "labelled_pairs" in series.functions),
    Reading("no_signal", DATA, "preference/accuracy", 0.99,
            "Pairs are told apart from the first steps on (accuracy {value:.0%})",
            "the pairs are too easy: rejected answers are trivially bad, or differ from chosen ones by their form, "
            "which teaches nothing about what is right", "rejected answers that a model would give",
            when=lambda series: 5 <= len(series.steps) <= 8 and "best_and_worst" not in series.functions and
            min(value for _, value in series.known("preference/accuracy")[1:]) >= 0.99),
    Reading("pairs_contradict", UPDATE, "preference/accuracy", 0.0,
            "The rejected answers are preferred: in {value:.0%} of the pairs alone the chosen one is ahead",
            "the preference has the wrong sign in a loss or node, or the learning rate is far too high",
            "the node that writes `preference`: 1 for the chosen answer", most=0.3, steps=8,
            when=lambda series: "best_and_worst" not in series.functions and  # whose pairs are new in each step
            series.recent("preference/margin") < -1e-6),
    Reading("reward_failures", REWARD, "*/failed", 0.1,
            "The {name} fails for {value:.0%} of the samples, which leave the step",
            "the {name} raises or takes too long; what is left of the batch to learn from is a skewed choice",
            "the reason is in  events.jsonl ; where it takes too long, a longer  limit  at its node", per="samples"),
    Reading("reward_noise", REWARD, "reward/inconsistent", 0.25,
            "{value:.0%} of the completions that equal another one to their prompt earn something else",
            "the reward is noise: a judge that contradicts itself, a sandbox that fails now and then, verdicts kept "
            "for other completions, or rewards of other rows",
            "score one completion several times; a judge wants  temperature 0 , or several verdicts", steps=RECENT,
            rows="high"),
    Reading("reward_against_answers", REWARD, "reward/answer_correlation", -1.01,
            "Right answers earn less than wrong ones (correlation {value:.2f})",
            "the reward has the wrong sign, pays for wrong answers, or compares with another field than the answer"
            "{part}", f"nodes.reward.with.reward: a weight above 0 for what is right; {_COMPARE}", most=-0.3, steps=6,
            rows="high"),
    Reading("reward_against_answers", REWARD, "reward/answer_correlation", -0.3,
            "Right answers earn no more than wrong ones (correlation {value:.2f}{own})",
            "something else decides the reward: noise, rewards of other rows, another of its parts, or another field "
            "than the answer{part}; nothing is wrong if being right is not the task",
            f"{_COMPARE}, or  robust.detectors.reward_against_answers=off", most=0.25, steps=8, when=_some_right,
            rows="high"),
    Reading("overlong", REWARD, "reward/overlong", 0.35,
            "The length penalty is charged to {value:.0%} of the completions",
            "`{key}` is {set}, which right answers reach: `overlong_penalty` teaches short answers instead of right "
            "ones", "{key}={more}", setting="nodes.*.with.max_length", usual=256, steps=RECENT, rows="long"),
    Reading("same_observations", REWARD, "environment/same_answers", 0.9,
            "{value:.0%} of what the tools answer is the same text",
            "the tool always says the same, whatever it is asked: it fails without an error, reads the wrong argument, "
            "or is a stub", "look at the observations in trajectories/", steps=8),
    Reading("advantage_sign", ADVANTAGE, "advantages/reward_correlation", -1.01,
            "Advantages go against the rewards of their rows (correlation {value:.2f})",
            "the advantage has the wrong sign, so that what earns less is reinforced", _ADVANTAGES, most=-0.3,
            rows="high"),
    Reading("advantage_sign", ADVANTAGE, "advantages/reward_correlation", -0.3,
            "Advantages do not follow the rewards of their rows (correlation {value:.2f})",
            "rows and advantages are mixed up, or every row gets the same advantage whatever it earns", _ADVANTAGES,
            most=0.35, rows="high"),
    Reading("advantage_sign", ADVANTAGE, "advantages/std", 0.0, "All advantages are the same, whatever rows earn",
            "every completion is reinforced alike: the advantage does not read the rewards", _ADVANTAGES, most=1e-6,
            rows="high", when=lambda series: _rewards_differ(series) and
            abs(series.recent("advantages/mean", 3)) > 1e-3),
    Reading("advantage_scale", ADVANTAGE, "advantages/std", 1e-12, "Advantages nearly vanish (deviation {value:.1g})",
            "rewards differ, but what is made of them is scaled down to nothing", "the node that writes `advantages`; "
            "nodes.update.with.normalize=batch", most=0.01, steps=8, when=_rewards_differ),
    Reading("no_signal", DATA, "distillation/[rd]*", -1e-5,
            "Teacher and student agree from the start ({value:.1g} nats)",
            "the teacher is the student itself, or its log-probabilities are the student's", "the teacher's model:  "
            "roles.teacher.model", most=1e-5, steps=1, when=lambda series: len(series.steps) == 1),
    Reading("end_untrained", UPDATE, "response/trained", -1.0, "Only {value:.0%} of the sampled tokens are trained",
            "`response_mask` leaves out most of what the policy wrote",
            "the node that writes `response_mask`: True for all sampled tokens", most=0.5, steps=RECENT, rows="long"),
    Reading("unsampled_trained", UPDATE, "mismatch/unsampled", 0.01,
            "At least {value:.0%} of the trained tokens were not sampled by the policy",
            "`response_mask` lets tokens through that are not the policy's: padding, parts of the prompt, or what "
            "tools answered; or a node has changed `responses`",
            "the node that writes `response_mask`: True for sampled tokens alone", rows="long"),
    Reading("end_untrained", UPDATE, "response/end_untrained", 0.9,
            "The last token of {value:.0%} of the completions is not trained",
            "`response_mask` leaves out the token that ends a completion, so that the policy forgets to end",
            "the node that writes `response_mask`: it must be True for the end token too", steps=RECENT,
            rows="long"),
    Reading("both_answers_fall", UPDATE, "preference/better", -1e30,
            "The preferred answers have become less likely, too ({value:.0f} nats each)",
            "`{key}` ({set}) hardly holds the policy to its reference, or the learning rate is too high: the loss only "
            "wants a distance between the two answers, and both fall", "{key}=0.3 , a lower rate, or  nll=1  there",
            most=-4.0, per="setting", setting="nodes.*.with.beta", usual=0.1, steps=RECENT,
            when=lambda series: "preference_update" in series.functions),
    Reading("value_head", UPDATE, "value/explained", -1e30,
            "The critic explains {value:.2f} of the variance of returns: less than a constant would",
            "the critic learns too fast, or not at all: advantages are noise then",
            "roles.critic.learning_rate=1e-5 , and  nodes.update.with.critic_warmup=20  lets it learn first",
            most=-0.04, steps=12, when=lambda series: len(series.known("value/explained")) >= 16),
    Reading("importance_lost", UPDATE, "importance/rejected", 0.4,
            "{value:.0%} of the tokens are rejected as off-policy",
            "samples are of another policy than the one trained: too old (`staleness`), or by an engine that computes "
            "otherwise", "staleness=1 , or  roles.actor.rollout=hf  to see whether it is the engine"),
    Reading("teacher_tail", UPDATE, "distillation/teacher_tail", 0.7,
            "{value:.0%} of the teacher's probability is outside its most probable tokens",
            "`{key}` is {set}, too few for this teacher: the student learns a distribution that is cut off",
            "{key}=64", setting="nodes.*.with.k", usual=32),
    Reading("conversations_cut", REWARD, "environment/turns", 0.9,
            "Conversations now use all their turns ({value:.0%} of {set}), and end without an answer",
            "turns earn more than answers: the environment pays for a call, and the policy calls for the pay",
            "pay for the final answer alone, or let a turn cost something", per="setting",
            setting="nodes.*.with.max_turns", usual=8, steps=RECENT, rows="high",
            when=lambda series: series.recent("response/truncated", RECENT) > 0.5 and series.earned > 0.05),
    Reading("tools_avoided", POLICY, "environment/turns", 0.0, "Conversations have one turn: no tool is ever asked",
            "the environment ends at the first turn, the model does not know how its tools are called, or `{key}` "
            "({set}) allows no more", "look at a conversation in trajectories/ ; demonstrations of calls (an sft run) "
            "come first", most=1.02, steps=6, setting="nodes.*.with.max_turns", usual=8, rows="low",
            when=lambda series: series.start("environment/turns", 2) < 1.1),
    Reading("conversations_cut", POLICY, "environment/cut", 0.3,
            "{value:.0%} of the conversations end for lack of tokens, not with an answer",
            "`{key}` is {set}, fewer than a conversation takes", "{key}={more}", per="samples",
            setting="nodes.*.with.max_tokens", usual=1024),
    Reading("empty_answers", POLICY, "response/length", 0.0, "Completions have {value:.1f} tokens: they are empty",
            "the policy ends at once: ending earns no less than a wrong answer, the prompt's form asks for nothing, or "
            "the end token was trained too much", "a reward below 0 for no answer, and the prompts' form",
            most=2.0, steps=RECENT, rows="low", symptom=True, when=lambda series: bool(series.known(series.reward))),
    Reading("data_repeats", DATA, "epoch", 8, "Each record has been trained {value:.0f} times in {step} steps",
            "the data has few records for its batch: the policy learns them by heart",
            "more records in  data.train , or a smaller  data.batch ; held-out answers tell whether it harms", steps=1,
            when=lambda series: series.last("epoch", 8)[-1:] > [value + 2 for value in series.last("epoch", 8)[:1]]),
    Reading("answers_not_found", REWARD, "reward/unanswered", 0.95,
            "The reward finds no final answer in {value:.0%} of the completions",
            "a parser's failure: completions do not have the form that the reward reads, as `#### 42` or "
            "`\\boxed{{42}}`; or it reads another one than the prompt asks for", "ask for the form in the question, or "
            "read what models write:  nodes.reward.with.reward={{math: {{strict: false}}}}", steps=8, rows="low"),
    Reading("length_hacking", REWARD, "reward/length_correlation", -1.01,
            "Shorter completions earn more (correlation {value:.2f}), and completions shrink",
            "the reward, or a penalty of length, pays for few tokens more than for what is right",
            "a smaller weight of the length, or a larger  max_length  of `overlong_penalty`", most=-0.65, steps=RECENT,
            rows="long", symptom=True, when=lambda series: _grew(series) < 0.75),
    Reading("length_hacking", REWARD, "reward/length_correlation", 0.65,
            "Longer completions earn more (correlation {value:.2f}), and completions grow",
            "length hacking: the reward pays for length, or a loss that averages over tokens favours it",
            "add a cost of length, as  nodes.reward.with.reward={{math: 1.0, length: {{weight: 0.2, target: 100}}}}",
            steps=RECENT, rows="long", symptom=True, when=lambda series: _grew(series) >= 1.4),
    Reading("tool_errors", REWARD, "environment/error_answers", 0.4, "{value:.0%} of what the tools answer are errors",
            "the tools fail, or the policy calls them in a form that they do not take",
            "look at the observations in trajectories/ , and pay nothing for turns that fail", steps=RECENT,
            rows="low"),
    Reading("tools_avoided", REWARD, "environment/turns", 0.0,
            "Conversations fell from {before:.1f} to {value:.1f} turns: the policy no longer asks its tools",
            "what the tools answer does not help, as where they fail or answer with errors",
            "look at the observations in trajectories/", steps=RECENT, rows="low", drop=0.7,
            when=lambda series: series.start("environment/turns") >= 1.3),
    Reading("advantage_baseline", ADVANTAGE, "advantages/of_prompts", 0.1,
            "{value:.0%} of the advantages' square is common to all samples of a prompt",
            "the baseline is not the mean of the prompt's own samples, as where rewards are normalised over the batch, "
            "or rows are grouped wrongly: easy prompts are reinforced, hard ones unlearnt",
            "a node `group_advantage` or `leave_one_out_advantage` in place of what writes `advantages`", most=0.999,
            steps=RECENT, when=lambda series: not series.functions & _OTHER_BASELINES),
    Reading("advantage_scale", ADVANTAGE, "advantages/std", 5.0, "Advantages have a deviation of {value:.3g}; losses "
            "expect about 1", "the advantage is not divided by the deviation of rewards",
            "nodes.{node}.with.normalize=batch , or a node `group_advantage`",
            when=lambda series: "distillation_advantage" not in series.functions),
    Reading("mismatch", UPDATE, "mismatch/perplexity_ratio", 1.003,
            "The sampler finds its tokens likelier than the trainer does, by {value:.3g} times, and none less likely",
            "its log-probabilities are of another distribution: processed by `top_p`, `top_k`, `min_p` or a lower "
            "temperature, or renormalised among fewer tokens", "what the sampler returns: log-probabilities before "
            "`top_p` and `top_k`, at the temperature that is trained", when=_one_sided),
    Reading("mismatch", UPDATE, "staleness/max", 1.0,
            "Samples are by weights that are {value:.0f} updates old, and mode sync samples by those that it "
            "trains", "the sampler never gets what is trained: `{key}` is {set}, which "
            "keeps older weights", "{key}={role}", setting="nodes.rollout.role",
            when=lambda series: series.settings.get("mode") == "sync"),
    Reading("mismatch", UPDATE, "mismatch/logprob_mean", 0.002, *_MISMATCH, when=_no_longer_exact),
    Reading("mismatch", UPDATE, "mismatch/logprob_mean", 0.25, *_MISMATCH, when=_on_policy),
    Reading("mismatch", UPDATE, "mismatch/logprob_mean", 0.02, *_MISMATCH, when=_on_policy, base=10, rise=3),
    Reading("policy_stuck", UPDATE, "*grad_norm", 0.0, "The parameters are as they were: `{metric}` stays 0",
            "no gradient reaches them: all are frozen (adapters: both matrices 0), or the loss does not depend on them",
            _UNFROZEN, most=0.0, steps=8, when=_differ),
    Reading("policy_stuck", UPDATE, "*gradient/moved", 0.0, "An update moves {value:.0%} of the weights by more "
            "than a hundredth of the learning rate", "the optimizer's steps do not reach them: they are cut off from "
            "the loss, or kept in so few digits (bfloat16) that small updates are lost in rounding",
            "float32 weights where the optimizer steps; a loss of your own must not detach the log-probabilities",
            most=0.2, steps=8, when=_differ),
    Reading("policy_stuck", UPDATE, "policy/kl_reference", 0.0,
            "The model is as it was: `{metric}` stays {value:.1g}",
            "no parameter moves: all are frozen, or the optimizer has others than the model's; or it scales gradients "
            "down to nothing", _UNFROZEN, most=2e-6, steps=16, when=_trains),
    Reading("policy_stuck", UPDATE, "*learning_rate", 0.0, "The learning rate has fallen to {value:.1g} by step {step}",
            "its schedule ends too early: it counts fewer steps than the run has, or is advanced several times a step",
            "roles.{role}.schedule=constant", when=_ended),
    Reading("policy_stuck", UPDATE, "*learning_rate", 0.0, "`{metric}` is {value:.1g}: nothing moves",
            "that is far below what models take (1e-7 to 1e-5, adapters 1e-5 to 1e-4)",
            "roles.{role}.learning_rate=1e-6", most=1e-8, steps=8, when=_stays),
    Reading("gradient_of_one_layer", UPDATE, "gradient/share_of_layer/[0-9]*", 0.999, *_ONE_LAYER, steps=8),
    Reading("gradient_of_one_layer", UPDATE, "gradient/share_of_layer/[0-9]*", 0.9, *_ONE_LAYER, steps=RECENT,
            when=lambda series: len(series.steps) >= 2 * RECENT and not any(
                value > 0.75 for name in series.known_names("gradient/share_of_layer/")
                for step, value in series.known(name) if step <= series.steps[-RECENT - 1])),
    Reading("reference_differs", UPDATE, "policy/kl_reference", 0.003, *_FAR, steps=1,
            when=lambda series: _untrained(series) and _one_update(series)),
    Reading("reference_differs", UPDATE, "reward/kl", 0.003, *_FAR, steps=1, per="response/length", when=_untrained),
    Reading("reference_moves", UPDATE, "policy/kl_reference", 0.0, "KL to the reference is always 0",
            "the reference takes the policy's weights in each step (follow), so that it holds nothing",
            "roles.reference.follow=null , or a mix below 1 and a larger  every", most=0.0, steps=8,
            when=lambda series: series.copies_policy),
    Reading("reference_moves", UPDATE, "policy/kl_reference", 0.0,
            "KL to the reference dropped from {before:.2g} to {value:.2g} in one step",
            "the reference has become the policy: its weights were replaced, or it follows the policy",
            "roles.reference.follow=null , or a mix below 1", steps=2, base=6, drop=0.25,
            when=lambda series: min(series.before("policy/kl_reference", 2, 6, 4) or [0.0]) > max(
                0.002, 4 * max(series.last("policy/kl_reference", 2)))),
    Reading("reference_moves", UPDATE, "preference/margin", -1e-6, "Policy and reference differ in nothing, ever",
            "the reference takes the policy's weights in each step (follow), or is the policy itself",
            "roles.reference.follow=null", most=1e-6, steps=8),
    Reading("gradients_kept", UPDATE, "*gradient/kept", 1.0, "Gradients are left behind an update",
            "they are not set to zero, so that gradients of earlier steps add up in each update",
            "the loop or hook that replaces  zero_grad()"),
    Reading("teacher_differs", ADVANTAGE, "distillation/misplaced", 0.05, "The token before or after fits a "
            "teacher's log-probabilities better than their own, and so do the student's there (by {value:.2g})",
            "the log-probabilities of the teacher are shifted by one token: they belong to the neighbours",
            "what writes or changes `teacher_logprobs`: one for each token of `responses`, in its place"),
    Reading("optimizer_forgets", UPDATE, "*gradient/remembered", 1e-9,
            "The optimizer remembers {value:.0f} updates, and {before:.0f} in the step before",
            "its state is cleared or made anew (each step, or by a resume without it): every update is as large as the "
            "first and follows one batch alone",
            "make the optimizer once, and save its state with the model; distflow resume  restores it", steps=1, base=1,
            drop=1),
    Reading("learning_rate", UPDATE, "policy/kl_reference", 0.5,
            "The policy left the model that it was within {step} steps ({value:.2g} nats a token from the reference)",
            "the learning rate is far above what such a model takes; or a batch is used for too many updates",
            "{lower} , or  nodes.{node}.with.epochs=1", steps=1, when=_early),
    Reading("learning_rate", UPDATE, "learning_rate", 0.0, *_RATE_LEAPS, steps=1, base=10, rise=3),
    Reading("ratio_clipped", UPDATE, "policy/clip_ratio", 0.15,
            "The bound of the loss is active on {value:.0%} of the tokens, which then teach nothing",
            "the policy moves far within one batch: too many updates of it, or too large ones",
            "nodes.{node}.with.epochs=1 , or  {lower}", steps=8, symptom=True, when=_bounded),
    Reading("ratio_clipped", UPDATE, "policy/clip_ratio_high", 0.02,
            "The upper bound of the loss is active on {value:.0%} of the tokens",
            "`clip_high` is far below `clip`: good answers may hardly become likelier, while bad ones become unlikely",
            "nodes.{node}.with.clip_high=0.2", steps=8, symptom=True, when=_tight),
    Reading("duplicated_samples", POLICY, "response/alike", 0.0,
            "{value:.0%} of the completions are copies of another one to their prompt, though the policy is uncertain",
            "the samples of a prompt have one seed, or rows are copied: such a policy gives different answers",
            "the seed of the sampler, or the node that writes `responses`", rows="high",
            when=lambda series: series.copied and series.recent("policy/entropy", 3) >= 0.02),
    Reading("no_signal", OUTCOME, "*reward*std", 0.0, "Every completion earns {earned:.3g} ({parts}), so that nothing "
            "is learnt", *_ALIKE, steps=RECENT, symptom=True, rows="low", most=1e-9),
    Reading("no_signal", OUTCOME, "*/zero_std_groups", 0.85,
            "In {value:.0%} of the groups all samples earn the same, and teach nothing", *_ALIKE, steps=8, symptom=True,
            rows="low", when=lambda series: series.group_sizes != [1]),  # those have another baseline
    Reading("entropy_collapse", POLICY, "policy/entropy", 0.0,
            "Entropy collapsed from {before:.3g} to {value:.3g} nats, and little more is earned",
            "the policy settles on a few answers before it has found better ones: each update is too large, or only "
            "what is already likely is reinforced",
            "nodes.{node}.with.clip_high=0.28  or  entropy=0.001  there, or  {lower}", **_SYMPTOM, rows="low",
            drop=0.35, when=lambda series: _settles(series) and series.earned < 0.05),
    Reading("entropy_explosion", POLICY, "policy/entropy", 0.3,
            "Entropy rose from {before:.3g} to {value:.3g} nats: completions become random",
            "updates make likely tokens unlikely faster than they find better ones: the learning rate is too high; or "
            "most advantages are negative", "{lower}", **_SYMPTOM, rise=4),
    Reading("truncation", POLICY, "response/truncated", 0.5, *_CUT, **_SYMPTOM, **_LIMIT, when=_speaks),
    Reading("truncation", POLICY, "response/truncated", 0.0, *_CUT, **_SYMPTOM, **_LIMIT, rise=1, plus=0.25,
            when=_rewarded),
    Reading("repetition", POLICY, "response/repetition", 0.15,
            "{value:.0%} of the runs of four tokens in a completion were in it before",
            "the policy goes round in circles: what repeats earns; or it has left the language that it knew",
            "nodes.{node}.with.kl=0.01 , and a reward that does not pay for what repeats", steps=RECENT, rows="long",
            symptom=True, rise=3, when=_rewarded),
    Reading("kl_runs_off", POLICY, "policy/kl_reference", 0.3,
            "KL to the reference runs off: {before:.3g} → {value:.3g} nats a token",
            "updates are too large for the model: the learning rate is too high; or the KL term is too weak to hold "
            "it, or of the wrong sign", "{lower} , or  nodes.{node}.with.kl=0.01", steps=RECENT, symptom=True, base=8,
            rise=1.5, when=lambda series: series.last("policy/kl_reference", 1) > [1.0] or series.earned <= 0.1),
)


for _reading in READINGS:
    add_rule(_reading.detector, _reading.look, rows=_reading.rows, symptom=_reading.symptom, origin=_reading.origin)
