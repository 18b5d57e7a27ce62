"""Tables of faults that one number says outright: metrics that are out of bounds, and settings far from the usual.

    READINGS   a metric, the bound that it may not pass, and what it means
    USUAL      a setting, the range of runs that learn, what a value beyond it does, and which faults that explains

A line is a fault: a new metric or setting wants one line here. Rules that compare curves are in `learning_policy` and
`learning_rewards`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from distflow.telemetry.learning_series import (
    RECENT,
    Evidence,
    Origin,
    Rows,
    Series,
    add_rule,
    detector,
    middle,
    number,
)


@dataclass(frozen=True)
class Reading:
    """A metric that says a fault: the median and the last of its `steps` last values are from `least` to `most`. per:
    what values are divided by: another metric, `prompts`, or `setting`, a pattern of the setting that is probably
    wrong. Texts may have {value}, {name} (the metric's first part), {key}, {set} and {more} of the setting."""

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

    def look(self, series: Series) -> Evidence | None:
        key, given = series.setting(self.setting)
        divisor = {"": 1.0, "prompts": series.prompts, "setting": number(given, self.usual)}.get(
            self.per, middle(series.last(self.per, 1)))
        for metric in series.matching(self.metric) if divisor > 0 else ():
            values = [value / divisor for value in series.latest(metric, self.steps)]
            if not values or not all(self._holds(value) for value in (middle(values), values[-1])) or \
                    not self.when(series):
                continue
            said = {"value": middle(values), "name": metric.partition("/")[0], "key": key, "part": series.deciding_part,
                    "set": given or f"{self.usual:g}", "more": f"{4 * number(given, self.usual):.12g}"}
            what, cause, change = (text.format(**said) for text in (self.what, self.cause, self.change))
            return Evidence(series.since(metric, lambda value: self._holds(value / divisor)), metric, what, cause,
                            change, {"value": middle(values)})
        return None

    def _holds(self, value: float) -> bool:
        return self.least <= value <= self.most


def _some_right(series: Series) -> bool:
    """Whether there are right and wrong answers to tell apart."""
    right = middle(series.last("response/has_answer", 8))
    return 0.1 < right < 0.9


def _rewards_differ(series: Series) -> bool:
    return min(series.last("reward/std", 3) or series.last("environment/reward_std", 3) or [0.0]) > 0.01


_COMPARE = "compare a prompt of samples.jsonl with its answer and reward"
DATA, REWARD, ADVANTAGE, UPDATE, POLICY = Origin.DATA, Origin.REWARD, Origin.ADVANTAGE, Origin.UPDATE, Origin.POLICY
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
    Reading("data_lost", DATA, "data/texts_mended", 0.2, "{value:.0%} of the records have broken characters",
            "the file was written in another encoding, or texts were cut within a character",
            "write  data.train  again as UTF-8", per="prompts"),
    Reading("data_lost", DATA, "filter/*/prompts_short", 0.5, "Steps lack {value:.0%} of their prompts",
            "the filter drops most of what is drawn, and `{key}` ({set}) ends the search: problems are too hard or too "
            "easy for this model", "{key}={more} , or data of another difficulty", per="prompts",
            setting="nodes.*.with.max_draws", usual=10, steps=RECENT),
    Reading("data_lost", DATA, "distillation/failed", 0.1, "{value:.0%} of the rows have no answer of the teacher",
            "the served teacher fails or takes too long", "its address and its log", per="samples"),
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
    Reading("pairs_contradict", DATA, "preference/worse_has_answer", 0.75,
            "In {value:.0%} of the pairs the rejected answer is the right one, and the chosen one is wrong",
            "`chosen` and `rejected` are swapped, so that the model learns to prefer what is wrong",
            "data.columns={{chosen: rejected, rejected: chosen}} , or swap the fields of  data.train", steps=RECENT),
    Reading("pairs_contradict", DATA, "preference/worse_has_answer", 0.2,
            "In {value:.0%} of the pairs the rejected answer is the right one, and the chosen one is wrong",
            "the preferences are noisy: labels by chance, some pairs with chosen and rejected swapped, or a reward "
            "that ranks wrong answers first", "clean the pairs of  data.train ; nodes.update.with.label_smoothing=0.1 "
            " bears a few", steps=8),
    Reading("pairs_contradict", UPDATE, "preference/accuracy", 0.0,
            "The rejected answers are preferred: in {value:.0%} of the pairs alone the chosen one is ahead",
            "the preference has the wrong sign in a loss or node, or the learning rate is far too high",
            "the node that writes `preference`: 1 for the chosen answer", most=0.3, steps=8,
            when=lambda series: "best_and_worst" not in series.functions),  # whose pairs are new in each step
    Reading("reward_failures", REWARD, "*/timeouts", 0.1, "{value:.0%} of the samples have no reward in time",
            "the {name} takes longer than its limit, and what leaves the step is no random choice",
            "nodes.reward.with.limit=600 , or more  workers  there", per="samples"),
    Reading("reward_failures", REWARD, "reward/failed", 0.1,
            "The reward fails for {value:.0%} of the samples, which leave the step",
            "the reward raises or takes too long; the rest of the batch is what it does not fail for, so that the "
            "policy learns from a skewed choice",
            "the reason is in  events.jsonl  (reward_failed); a longer limit is  nodes.reward.with.limit=600",
            per="samples"),
    Reading("reward_failures", REWARD, "environment/failed", 0.1,
            "The environment fails for {value:.0%} of the samples, which leave the step",
            "the environment raises or takes too long; the rest of the batch is a skewed choice",
            "the reason is in  events.jsonl  (environment_failed)", per="samples"),
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
            "Right answers earn no more than wrong ones (correlation {value:.2f})",
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
    Reading("advantage_sign", ADVANTAGE, "advantages/min", -1e-9, "No advantage is below 0",
            "what earns less than the rest is never unlearnt: negative advantages are cut off, or the baseline is too "
            "low", "the node that writes `advantages`: it must return reward minus baseline", steps=RECENT,
            when=lambda series: middle(series.last("advantages/std", RECENT)) > 0.05, rows="low"),
    Reading("advantage_sign", ADVANTAGE, "advantages/max", -1e30, "No advantage is above 0",
            "nothing is ever reinforced: positive advantages are cut off, or the baseline is too high",
            "the node that writes `advantages`: it must return reward minus baseline", most=1e-9, steps=RECENT,
            when=lambda series: middle(series.last("advantages/std", RECENT)) > 0.05 and
            "distillation_advantage" not in series.functions, rows="high"),
    Reading("end_untrained", UPDATE, "response/trained", -1.0, "Only {value:.0%} of the sampled tokens are trained",
            "`response_mask` leaves out most of what the policy wrote",
            "the node that writes `response_mask`: True for all sampled tokens", most=0.5, steps=RECENT, rows="long",
            when=lambda series: not series.known("environment/turns")),
    Reading("unsampled_trained", UPDATE, "mismatch/unsampled", 0.01,
            "At least {value:.0%} of the trained tokens were not sampled by the policy",
            "`response_mask` lets tokens through that are not the policy's: padding, parts of the prompt, or what "
            "tools answered; or a node has changed `responses`",
            "the node that writes `response_mask`: True for sampled tokens alone", rows="long"),
    Reading("end_untrained", UPDATE, "response/end_untrained", 0.9,
            "The last token of {value:.0%} of the completions is not trained",
            "`response_mask` leaves out the token that ends a completion, so that the policy forgets to end",
            "the node that writes `response_mask`: it must be True for the end token too", steps=RECENT,
            when=lambda series: not series.known("environment/turns"), rows="long"),
    Reading("gradient_vanishes", UPDATE, "grad_norm", 1e-30,
            "The gradient nearly vanishes (norm {value:.1g}), though samples differ in what they earn",
            "something scales it down on its way: an adapter's `alpha` ({set}), a loss or weights close to 0",
            "{key}=32 , or the loss", most=1e-5, setting="roles.*.lora.alpha", usual=32, steps=8,
            when=lambda series: _rewards_differ(series) and middle(series.last("advantages/std", 8)) > 0.05),
    Reading("both_answers_fall", UPDATE, "preference/better", -1e30,
            "The preferred answers have become less likely, too ({value:.0f} nats each)",
            "`{key}` ({set}) hardly holds the policy to its reference, or the learning rate is too high: the loss only "
            "wants a distance between the two answers, and both fall", "{key}=0.3 , a lower rate, or  nll=1  there",
            most=-4.0, per="setting", setting="nodes.*.with.beta", usual=0.1, steps=RECENT,
            when=lambda series: "preference_update" in series.functions),
    Reading("value_head", UPDATE, "value/explained", -1e30,
            "The critic explains {value:.2f} of the variance of returns: less than a constant would",
            "the critic does not learn, or too fast: advantages are noise then",
            "roles.critic.learning_rate=1e-5 , and  nodes.update.with.critic_warmup=20  lets it learn first",
            most=-0.3, steps=8, when=lambda series: len(series.known("value/explained")) >= 12),
    Reading("value_head", UPDATE, "value/clipped", 0.5, "{value:.0%} of the critic's values moved too far in one step",
            "its learning rate is too high, or `clip` ({set}) of `value_update` is tiny against the returns",
            "roles.critic.learning_rate=1e-5 , or a larger  clip  there", setting="nodes.critic.with.clip", usual=0.2,
            steps=8),
    Reading("importance_lost", UPDATE, "importance/truncated", 0.4,
            "The importance weight of {value:.0%} of the tokens is out of bounds",
            "samples are of another policy than the one trained: too old (`staleness`), or by an engine that computes "
            "otherwise", "staleness=1 , or  roles.actor.rollout=hf  to see whether it is the engine"),
    Reading("importance_lost", UPDATE, "importance/rejected", 0.4,
            "{value:.0%} of the tokens are rejected as off-policy",
            "samples are of another policy than the one trained: too old (`staleness`), or by an engine that computes "
            "otherwise", "staleness=1 , or  roles.actor.rollout=hf  to see whether it is the engine"),
    Reading("teacher_tail", UPDATE, "distillation/teacher_tail", 0.7,
            "{value:.0%} of the teacher's probability is outside its most probable tokens",
            "`{key}` is {set}, too few for this teacher: the student learns a distribution that is cut off",
            "{key}=64", setting="nodes.*.with.k", usual=32),
    Reading("conversations_cut", POLICY, "environment/turns", 0.97,
            "Conversations end at their last turn, without an answer",
            "`{key}` is {set}, fewer than a call and an answer take: no conversation comes to its end",
            "{key}={more}", per="setting", setting="nodes.*.with.max_turns", usual=8, steps=RECENT,
            when=lambda series: middle(series.last("response/truncated", RECENT)) > 0.5 and
            middle(series.first("environment/turns", 2)) > 0.9 * middle(series.last("environment/turns", RECENT))),
    Reading("conversations_cut", REWARD, "environment/turns", 0.9,
            "Conversations now use all their turns ({value:.0%} of {set}), and end without an answer",
            "turns earn more than answers: the environment pays for a call, and the policy calls for the pay",
            "pay for the final answer alone, or let a turn cost something", per="setting",
            setting="nodes.*.with.max_turns", usual=8, steps=RECENT, rows="high",
            when=lambda series: middle(series.last("response/truncated", RECENT)) > 0.5 and series.earned > 0.05),
    Reading("tools_avoided", POLICY, "environment/turns", 0.0, "Conversations have one turn: no tool is ever asked",
            "the environment ends at the first turn, the model does not know how its tools are called, or `{key}` "
            "({set}) allows no more", "look at a conversation in trajectories/ ; demonstrations of calls (an sft run) "
            "come first", most=1.02, steps=6, setting="nodes.*.with.max_turns", usual=8, rows="low",
            when=lambda series: middle(series.first("environment/turns", 2)) < 1.1),
    Reading("conversations_cut", POLICY, "environment/cut", 0.3,
            "{value:.0%} of the conversations end for lack of tokens, not with an answer",
            "`{key}` is {set}, fewer than a conversation takes", "{key}={more}", per="samples",
            setting="nodes.*.with.max_tokens", usual=1024),
    Reading("empty_answers", POLICY, "response/length", 0.0, "Completions have {value:.1f} tokens: they are empty",
            "the policy ends at once: ending earns no less than a wrong answer, the prompt's form asks for nothing, or "
            "the end token was trained too much", "a reward below 0 for no answer, and the prompts' form",
            most=2.0, steps=RECENT, rows="low", symptom=True, when=lambda series: bool(series.known(series.reward))),
)


_LOSSES = frozenset({"kl_runs_off", "loss_spike", "entropy_explosion", "repetition", "reward_fell", "learning_rate",
                     "both_answers_fall"})
_OFF = _LOSSES | {"ratio_clipped", "entropy_collapse", "truncation", "answers_not_found", "no_signal", "held_out_falls"}
_ALIKE = frozenset({"no_signal", "duplicated_samples", "entropy_collapse"})
_RANDOM = _OFF - {"entropy_collapse"}
_STILL = frozenset({"policy_stuck", "gradient_vanishes"})
_OFTEN = frozenset({"ratio_clipped", "mismatch", *_LOSSES})


@dataclass(frozen=True)
class Usual:
    """A setting and its range in runs that learn. sure: beyond these a run learns nothing, or breaks. does: below it,
    and behind `|` above it. fix: a usual value; default: a tenth of the bound. explains: detectors whose fault may
    follow. of: what is compared with the range, in a `unit` if it is not in proportion to the setting."""

    setting: str
    low: float
    high: float
    sure: tuple[float, float]
    does: str
    fix: str
    explains: frozenset[str]
    of: Callable[[Series, str, str], float] = lambda _series, _key, text: number(text, math.nan)
    unit: str = ""

    def beyond(self, series: Series) -> Iterator[Odd]:
        """Yield the settings that are out of the range."""
        for key in series.keys(self.setting):
            value, text = self.of(series, key, series.settings[key]), series.settings[key]
            above, below = _log(value) - _log(self.high), _log(self.low) - _log(value)
            if max(above, below) > 1e-3:
                bound, side, of = (self.high, "at most", 0.1) if above > 0 else (self.low, "at least", 10.0)
                own = bound if self.unit or not value else bound * number(text, value) / value
                does, _, does_above = self.does.partition("|")
                yield Odd(max(above, below), not self.sure[0] <= value <= self.sure[1],
                          f"`{key}` is {text}{f', {value:.0%} {self.unit}' if self.unit else ''} (usual: {side} "
                          f"{own:.3g})", does_above if above > 0 and does_above else does,
                          f"{key}={self.fix or f'{own * of:.1g}'}")


class Odd(NamedTuple):
    """A setting out of its usual range. distance: in e-folds. sure: whether nothing is learnt with it."""

    distance: float
    sure: bool
    what: str
    does: str
    fix: str


def _log(value: float) -> float:
    return math.log(max(value, 1e-12))


def _role_of(key: str) -> str:
    return key.split(".")[1]


def _rate(series: Series, key: str, text: str) -> float:
    """Return a learning rate as that of a large policy's whole weights: adapters, critics and imitation bear ten times
    as much, models without a size in billions in their name fifty times."""
    role = f"roles.{_role_of(key)}"
    adapts = series.settings.get(f"{role}.lora.rank", "null") != "null"
    judges = _role_of(key) != series.trained_role or bool(series.functions & _IMITATION)
    large = re.search(r"\d[bB]\b", series.settings.get(f"{role}.model.path", ""))
    return number(text, math.nan) / 10 ** (adapts + judges) / (1 if large else 50)


_SAMPLING = {"generate", "converse"}
_IMITATION = {"supervised_update", "reward_update", "distillation_update", "distillation_advantage"}


def _adapter(series: Series, key: str, text: str) -> float:
    rank = max(series.number(key.replace(".alpha", ".rank"), 16.0), 1.0)
    rooted = series.settings.get(key.replace(".alpha", ".rslora")) == "true"
    return number(text, 32.0) / (rank ** 0.5 if rooted else rank)


def _beta(index: int) -> Callable[[Series, str, str], float]:
    return lambda _series, _key, text: 1 - number(f"{text},".strip("[").split(",")[index].strip(" ]"), math.nan)


def _taken(series: Series, key: str, text: str) -> float:
    """Return the share of all weights that a step's decay takes."""
    return number(text, math.nan) * series.number(key.replace("weight_decay", "learning_rate"), 1e-6)


def _of_steps(series: Series, _key: str, text: str) -> float:
    """Return a number of steps in proportion to those of the run; a trial of a few steps says nothing."""
    steps = series.number("steps", math.inf)
    return number(text, math.nan) / steps if steps >= 20 else math.nan


def _sampled(series: Series, _key: str, text: str) -> float:
    """Return how a run samples: 0 tokens are all of them."""
    return number(text, math.nan) if series.known("response/alike") and series.functions & _SAMPLING else math.nan


def _compared(series: Series, _key: str, text: str) -> float:
    """Return how many samples of a prompt are compared with each other, if they are."""
    return number(text, math.nan) if series.functions & {"group_advantage", "leave_one_out_advantage"} else math.nan


def _tokens(series: Series, key: str, text: str) -> float:
    return _sampled(series, key, text) or math.inf


def _of_function(*names: str) -> Callable[[Series, str, str], float]:
    """Return a setting of nodes of these functions alone."""
    return lambda series, key, text: number(text, math.nan) \
        if series.settings.get(f"{key.rpartition('.with.')[0]}.function") in names else math.nan


def _clip(series: Series, key: str, text: str) -> float:
    start = key.rpartition(".")[0]
    bounded = series.settings.get(f"{start}.loss", "ppo") == "ppo" and series.settings.get(
        key.replace(".with.clip", ".function"), "") in ("policy_update", "value_update")
    return number(text, math.nan) if bounded else math.nan


USUAL = (
    Usual("roles.*.learning_rate", 1e-9, 1e-5, (1e-12, 1e-4),
          "updates are too small to change anything|each update is too large: the model is destroyed, not trained",
          "", _OFF | _STILL | {"value_head"}, of=_rate),
    Usual("roles.*.lora.alpha", 0.2, 16, (0.02, 100),
          "the adapter has no effect on the model|the adapter outweighs the model that it is added to", "32",
          _OFF | _STILL, of=_adapter),
    Usual("roles.*.betas", 0.03, 1, (0.005, 1), "the optimizer follows gradients of hundreds of steps ago",
          "[0.9, 0.95]", _OFF | _STILL, of=_beta(0), unit="of the gradient is new"),
    Usual("roles.*.betas", 0, 0.2, (0, 0.5), "|the optimizer forgets how large gradients are, so that one outlier "
          "moves all weights", "[0.9, 0.95]", _OFF, of=_beta(1), unit="of the squares is forgotten"),
    Usual("roles.*.max_grad_norm", 0.01, 1e9, (1e-8, math.inf), "gradients are scaled down to nothing", "1.0", _STILL),
    Usual("roles.*.warmup_steps", 0, 0.5, (0, 2), "|the learning rate never reaches its value", "20", _STILL,
          of=_of_steps),
    Usual("roles.*.weight_decay", 0, 3e-4, (0, 1e-3), "|each step takes more than a thousandth of all weights, "
          "which are gone before anything is learnt", "0", _OFF, of=_taken),
    Usual("roles.*.generation.temperature", 0.4, 1.4, (0.05, 2),
          "a prompt gets the same answer again and again, and nothing is compared|completions are random", "1",
          _ALIKE | _RANDOM | {"mismatch"}, of=_sampled),
    Usual("roles.*.generation.top_p", 0.5, 1, (0.1, 1), "only the likeliest tokens are sampled: answers hardly differ",
          "1", _ALIKE, of=_sampled),
    Usual("roles.*.generation.top_k", 5, math.inf, (1.5, math.inf),
          "only the likeliest tokens are sampled: answers hardly differ", "0", _ALIKE, of=_tokens),
    Usual("roles.*.generation.min_p", 0, 0.3, (0, 0.8), "|only the likeliest tokens are sampled: answers hardly differ",
          "0", _ALIKE, of=_sampled),
    Usual("nodes.*.with.clip", 0.02, 1, (1e-3, 5), "the bound stops every update at once: nearly no token teaches "
          "anything|nothing bounds how far a batch moves the policy", "0.2", _OFTEN | _STILL, of=_clip),
    Usual("nodes.*.with.epochs", 1, 6, (1, 50), "|each batch is used for too many updates", "1", _OFTEN),
    Usual("nodes.*.with.kl", 0, 0.5, (0, 5), "|the KL term outweighs what is earned: the policy is held where it is",
          "0.001", _STILL | {"no_signal", "reward_fell", "loss_spike", "kl_runs_off"}),
    Usual("nodes.*.with.entropy", 0, 0.05, (0, 0.2), "|the bonus outweighs the reward: the policy is paid for being "
          "random", "0", _RANDOM),
    Usual("nodes.*.with.gamma", 0.99, 1, (0.9, 1), "most tokens never hear of the reward at the end", "1.0",
          _STILL | {"no_signal", "value_head"}),
    Usual("nodes.*.with.lam", 0.5, 1, (0.1, 1), "advantages trust the critic alone, which knows nothing of the end at "
          "first", "0.95", _STILL | {"no_signal", "value_head"}),
    Usual("nodes.*.with.group_size", 3, 512, (0, math.inf), "a sample has few others of its prompt to be compared with",
          "8", frozenset({"no_signal"}), of=_compared),
    Usual("nodes.*.with.nll", 0, 5, (0, 100), "|imitation of the preferred answers outweighs the preference", "1",
          _STILL | {"held_out_falls"}),
    Usual("nodes.*.with.centering", 0, 1, (0, 20), "|all scores are drawn to 0, so that none tells answers apart",
          "0.01", _STILL),
    Usual("nodes.*.with.beta", 0.005, 2, (5e-4, 20), "nothing holds the policy to its reference|the loss is saturated "
          "by the smallest difference: the policy hardly moves", "0.1", _OFF | _STILL,
          of=_of_function("preference_update")),
    Usual("nodes.*.with.label_smoothing", 0, 0.3, (0, 0.4), "|labels count as wrong about as often as right, so that "
          "pairs teach nothing", "0", _STILL),
    Usual("nodes.*.with.entropy_quantile", 0, 0.9, (0, 0.98), "|hardly any token is trained", "0.8", _STILL),
    Usual("nodes.*.with.epsilon", 0, 0.1, (0, 10), "|advantages are divided down to nothing", "1e-6", _STILL,
          of=_of_function("group_advantage")),
    Usual("nodes.*.with.k", 4, math.inf, (1.5, math.inf),
          "the teacher shows too few tokens to learn a distribution from", "32",
          frozenset({"teacher_tail", "entropy_collapse", "held_out_falls"}), of=_of_function("top_logprobs")),
    Usual("nodes.*.with.reward.math", 1e-9, math.inf, (0, math.inf),
          "right answers cost: a weight below 0 has the wrong sign", "1.0",
          frozenset({"no_signal", "held_out_falls", "reward_against_answers", "reward_fell"})),
    Usual("staleness", 0, 8, (0, 64), "|samples are of policies that are long gone", "1",
          _OFTEN | {"importance_lost", "held_out_falls"}),
)


def unusual(series: Series, detector: str = "") -> list[Odd]:
    """Return the settings that are out of their usual range, the farthest first: all, or those that explain a fault."""
    return sorted((odd for usual in USUAL if not detector or detector in usual.explains
                   for odd in usual.beyond(series)), reverse=True)


@detector(origin=DATA)
def unusual_setting(series: Series) -> Evidence | None:
    """A setting is so far from the usual that the run cannot learn."""
    sure = [odd for odd in unusual(series) if odd.sure] if len(series.steps) >= 3 else []
    return Evidence(series.steps[0], series.goal[0], sure[0].what, sure[0].does, sure[0].fix) if sure else None


def explained(series: Series, detector: str, seen: Evidence) -> Evidence:
    """Return evidence whose cause begins with the unusual settings that explain it. A rule that wants one of them
    changed has nothing to add."""
    odd, form = unusual(series, detector)[:2], series.own_form
    if form and detector in _FORMED and seen.since <= _EARLY and form not in seen.cause:
        seen = replace(seen, cause=f"{seen.cause}; or prompts have a form that the model does not know{form}")
    known = [each.fix.partition("=")[0] in seen.remedy for each in odd]
    if not odd:
        return seen
    causes = [f"{each.what}, so that {each.does}" for each in odd]
    return replace(seen, cause="; and ".join(causes) + ("" if any(known) else f". If not that: {seen.cause}"),
                   remedy=" , or  ".join([*(each.fix for each, told in zip(odd, known) if not told), seen.remedy]))


_FORMED, _EARLY = frozenset({"answers_not_found", "no_signal", "truncation", "repetition", "entropy_explosion"}), 8


for _reading in READINGS:
    add_rule(_reading.detector, _reading.look, rows=_reading.rows, symptom=_reading.symptom, origin=_reading.origin)
