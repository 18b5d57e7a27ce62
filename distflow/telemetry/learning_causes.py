"""Names the probable cause of a fault, by the run's settings and its other metrics.

    USUAL    a setting, the range of runs that learn, and what a value beyond it does
    CAUSES   faults, a reading that confirms their cause, the cause, and what to change

Facts of `learning_facts` come first, then what a reading confirms, then what a rule supposes. What changed when a fault
began comes before settings, which are as they were before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from distflow.telemetry.learning_facts import DOUBTS, FACTS, IMITATION, PAID, Seen, doubted, role_of
from distflow.telemetry.learning_series import (
    FIRST,
    RECENT,
    Evidence,
    Origin,
    Series,
    detector,
    middle,
    number,
)


@dataclass(frozen=True)
class Usual:
    """A setting and its range in runs that learn. sure: beyond these a run learns nothing, or breaks. does: below it,
    and behind `|` above it. fix: a usual value; default: a tenth of the bound. of: what is compared with the range, in
    a `unit` if it is not in proportion to the setting."""

    setting: str
    low: float
    high: float
    sure: tuple[float, float]
    does: str
    fix: str
    of: Callable[[Series, str, str], float] = lambda _series, _key, text: number(text, math.nan)
    unit: str = ""

    def beyond(self, series: Series) -> Iterator[Odd]:
        """Yield the settings that are out of the range."""
        for key in series.keys(self.setting):
            value, text = self.of(series, key, series.settings[key]), series.settings[key]
            above, below = _log(value) - _log(self.high), _log(self.low) - _log(value)
            if value < 0 <= self.low:
                above, below = -math.inf, math.inf
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


def _rate(series: Series, key: str, text: str) -> float:
    """Return a learning rate as that of a large policy's whole weights: adapters, critics and imitation bear ten times
    as much, models without a size in billions in their name fifty times."""
    role = f"roles.{role_of(key)}"
    adapts = series.settings.get(f"{role}.lora.rank", "null") != "null"
    if series.settings.get(f"{role}.trained") == "false":
        return math.nan
    judges = role_of(key) != series.trained_role or bool(series.functions & IMITATION)
    large = re.search(r"\d[bB]\b", series.settings.get(f"{role}.model.path", ""))
    return number(text, math.nan) / 10 ** (adapts + judges) / (1 if large else 50)


def _adapter(series: Series, key: str, text: str) -> float:
    rank = max(series.number(key.replace(".alpha", ".rank"), 16.0), 1.0)
    rooted = series.settings.get(key.replace(".alpha", ".rslora")) == "true"
    return number(text, 32.0) / (rank ** 0.5 if rooted else rank)


def _beta(index: int) -> Callable[[Series, str, str], float]:
    return lambda _series, _key, text: 1 - number(f"{text},".strip("[").split(",")[index].strip(" ]"), math.nan)


def _taken(series: Series, key: str, text: str) -> float:
    """Return the share of all weights that a step's decay takes."""
    return number(text, math.nan) * series.number(key.replace("weight_decay", "learning_rate"), 1e-6)


def _sampled(series: Series, _key: str, text: str) -> float:
    """Return how a run samples: 0 tokens are all of them."""
    samples = series.known("response/alike") and series.functions & {"generate", "converse"}
    return number(text, math.nan) if samples else math.nan


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
    Usual("roles.*.learning_rate", 5e-9, 1e-5, (1e-12, 1e-4),
          "updates are too small to change anything|each update is too large: the model is destroyed, not trained",
          "", of=_rate),
    Usual("roles.*.lora.alpha", 0.2, 16, (0.02, 100),
          "the adapter has no effect on the model|the adapter outweighs the model that it is added to", "32",
          of=_adapter),
    Usual("roles.*.betas", 0.03, 1, (0.005, 1), "the optimizer follows gradients of hundreds of steps ago",
          "[0.9, 0.95]", of=_beta(0), unit="of the gradient is new"),
    Usual("roles.*.betas", 0, 0.2, (0, 0.5), "|the optimizer forgets how large gradients are, so that one outlier "
          "moves all weights", "[0.9, 0.95]", of=_beta(1), unit="of the squares is forgotten"),
    Usual("roles.*.max_grad_norm", 0.01, 1e9, (1e-8, math.inf), "gradients are scaled down to nothing", "1.0"),
    Usual("roles.*.weight_decay", 0, 3e-4, (0, 1e-3), "|each step takes more than a thousandth of all weights, "
          "which are gone before anything is learnt", "0", of=_taken),
    Usual("roles.*.generation.temperature", 0.4, 1.4, (0.05, 2),
          "a prompt gets the same answer again and again, and nothing is compared|completions are random", "1",
          of=_sampled),
    Usual("validation.temperature", 0, 1.4, (0, 1.8), "|held-out answers are random: they tell little of the policy",
          "0"),
    Usual("roles.*.generation.top_p", 0.5, 1, (0.1, 1), "only the likeliest tokens are sampled: answers hardly differ",
          "1", of=_sampled),
    Usual("roles.*.generation.top_k", 5, math.inf, (1.5, math.inf),
          "only the likeliest tokens are sampled: answers hardly differ", "0", of=_tokens),
    Usual("roles.*.generation.min_p", 0, 0.3, (0, 0.8), "|only the likeliest tokens are sampled: answers hardly differ",
          "0", of=_sampled),
    Usual("nodes.*.with.clip", 0.02, 1, (1e-3, 5), "the bound stops every update at once: nearly no token teaches "
          "anything|nothing bounds how far a batch moves the policy", "0.2", of=_clip),
    Usual("nodes.*.with.epochs", 1, 6, (1, 50), "|each batch is used for too many updates", "1"),
    Usual("nodes.*.with.kl", 0, 0.5, (0, 5), "|the KL term outweighs what is earned: the policy is held where it is",
          "0.001"),
    Usual("nodes.*.with.entropy", 0, 0.05, (0, 0.2), "|the bonus outweighs the reward: the policy is paid for being "
          "random", "0"),
    Usual("nodes.*.with.nll", 0, 5, (0, 50), "|the likelihood of preferred answers outweighs what is preferred", "1"),
    Usual("nodes.*.with.gamma", 0.99, 1, (0.9, 1), "most tokens never hear of the reward at the end", "1.0"),
    Usual("nodes.*.with.centering", 0, 1, (0, 20), "|all scores are drawn to 0, so that none tells answers apart",
          "0.01"),
    Usual("nodes.*.with.beta", 0.005, 2, (5e-4, 20), "nothing holds the policy to its reference|the loss is saturated "
          "by the smallest difference: the policy hardly moves", "0.1",
          of=_of_function("preference_update")),
    Usual("nodes.*.with.label_smoothing", 0, 0.3, (0, 0.4), "|labels count as wrong about as often as right, so that "
          "pairs teach nothing", "0"),
    Usual("nodes.*.with.k", 4, math.inf, (1.5, math.inf),
          "the teacher shows too few tokens to learn a distribution from", "32", of=_of_function("top_logprobs")),
    Usual("nodes.*.with.reward.math", 1e-9, math.inf, (0, math.inf),
          "right answers cost: a weight below 0 has the wrong sign", "1.0"),
    Usual("staleness", 0, 8, (0, 64), "|samples are of policies that are long gone", "1"),
)


def unusual(series: Series) -> list[Odd]:
    """Return the settings that are out of their usual range, the farthest first."""
    return sorted((odd for usual in USUAL for odd in usual.beyond(series)), reverse=True)


@detector(origin=Origin.DATA)
def unusual_setting(series: Series) -> Evidence | None:
    """A setting is so far from the usual that the run cannot learn."""
    sure = [odd for odd in unusual(series) if odd.sure] if len(series.steps) >= 3 else []
    return Evidence(series.steps[0], series.goal[0], sure[0].what, sure[0].does, sure[0].fix) if sure else None


class Cause(NamedTuple):
    """Cause of faults. when: reads what confirms it at a fault's first step, and returns values for its texts.
    explains: names of detectors; without one, those of all symptoms."""

    when: Callable[[Series, int], Seen]
    text: str
    change: str
    explains: str = ""


def _leap(series: Series, since: int) -> Seen:
    """Return which metric that no policy moves leapt when a fault began, from where to where, at which step."""
    for pattern, words in _INPUTS.items():
        for name in series.matching(pattern):
            known = series.known(name)
            for begin in range(since - 3, since + 4):
                before = [value for step, value in known if begin - 12 <= step < begin][-10:]
                after = [value for step, value in known if begin <= step][:RECENT]
                if len(before) < FIRST or len(after) < 2:
                    continue
                least, most = min(before), max(before)
                margin = most - least + 0.05 * abs(middle(before)) + 1e-9
                if min(after) > most + margin or max(after) < least - margin:
                    return name, middle(before[-3:]), middle(after), begin, words
    return None


_INPUTS = {
    "learning_rate": "a schedule, or a resume with another rate",
    "staleness/mean": "samples are older than before: the same ones are trained again, or sampling stands still",
    "prompt/length": "the prompts are others than before: another file, source or template",
    "prompt/same_answer": "the prompts are others than before",
    "reward/max": "the reward pays on another scale than before",
    "reward/min": "the reward pays on another scale than before",
    "environment/same_answers": "the tools answer otherwise than before",
}


def _replaced(series: Series, since: int) -> Seen:
    """Return from where to where the policy leapt in one step, if no larger gradient or rate moved it."""
    far, norms = dict(series.known("policy/kl_reference")), dict(series.known("grad_norm"))
    for step in range(max(since - 4, 7), since + 4):
        before, pushed = [far.get(at, math.nan) for at in range(step - 5, step)], norms.get(step - 1, math.inf)
        if far.get(step, 0.0) > max(0.3, 8 * max(before)) and pushed < 4 * middle([*norms.values()]):
            return max(before), far[step], step
    return None


def _right(series: Series, count: int = 8) -> float:
    return series.recent("response/has_answer", count)


def _most(series: Series) -> float:
    return max((value for _, value in series.known("reward/max")), default=math.nan)


def _pays_others(series: Series, _since: int) -> Seen:
    """Return how many completions earn, and how many are right, if far fewer."""
    paid, right = series.recent(series.reward) / max(_most(series), 1e-9), _right(series)
    return (paid, right) if paid > max(right / 0.6, right + 0.1) else None


def _abstains(series: Series, _since: int) -> Seen:
    """Return what a wrong answer costs, if ever more samples earn alike."""
    least = min((value for _, value in series.known("reward/min")), default=0.0)
    alike = series.recent("reward/std") < 0.8 * series.start("reward/std", 8)
    return least < 0 and alike and (-least,)


def _held_out(series: Series, at: int) -> float:
    """Return what held-out answers earned, at first (0) or last (-1)."""
    return max((series.known(each)[at][1] for each in series.known_names("validation/")), default=math.nan)


def _by_elimination(series: Series, _since: int) -> Seen:
    """Return where it lies that hardly anything is earned, and what to change: in the reward, if answers are right; in
    the training problems, if held-out ones are solved; in the model that is begun with, if neither are."""
    earned, right, held_out = series.recent(series.reward), _right(series), _held_out(series, -1)
    by, form = series.settings.get("validation.reward", "math"), series.recent("reward/unanswered")
    if right > max(0.1, 2 * earned):
        return f"right answers earn hardly anything: {right:.0%} of the completions give the record's, and the " \
               "reward does not find it, as where it reads another form or only a part of the text", PAID
    if _most(series) <= 0 and held_out > 0.1 and f"reward/{by}" not in series.parts:
        return "the reward does not find right answers: nothing has ever earned, and held-out answers earn " \
               f"{held_out:.2g} by `{by}`", PAID
    if 0 <= earned < 0.25 * held_out:
        words = "are too hard for this model, or their reference answers are wrong" if form < 0.3 else \
            "have another form (template, instructions) or other reference answers than held-out ones"
        return f"the training problems {words}: training earns {earned:.2g}, and held-out ones {held_out:.2g}", \
            "compare a prompt of samples.jsonl with a held-out one (data.train, data.question, data.answer), and " \
            "their rewards"
    alone = not series.known("environment/turns")  # else tools may be to blame
    if alone and series.start(series.reward, 8) < 0.1 and _held_out(series, 0) < 0.1 and not form > 0.3:
        return "the starting model solves neither training nor held-out problems, though it answers in their form: " \
               "its tokenizer or weights are not those that it was trained with, or it does not know the task", \
               "the files of  roles.*.model ; its answers in samples.jsonl"
    return earned < 0.1 and ("hardly any completion earns anything: the problems are too hard, their reference answers "
                             "are wrong, or the reward does not find what it looks for", PAID)


def _narrow(series: Series, _since: int) -> Seen:
    """Return the lengths of prompts, if they are nearly the same in all steps."""
    least = min((value for _, value in series.known("prompt/length_min")), default=0.0)
    most = max((value for _, value in series.known("prompt/length_max")), default=math.inf)
    return most - least < 0.1 * most and (least, most)


def _foreign(series: Series, _since: int) -> Seen:
    """Return the first loss and what held-out answers earned then, if the model could do the task before."""
    held_out, loss = _held_out(series, 0), series.first("loss", 1)
    return series.goal[0] == "loss" and held_out > 0.2 and bool(loss) and loss[0] > 0.8 and (loss[0], held_out)


def _returned(series: Series, _since: int) -> Seen:
    """Return whether what the policy samples is like that of the first steps again."""
    nearer = 0
    for name in ("policy/entropy", "response/length", "response/alike"):
        start, before, now = (middle(values) for values in (
            series.first(name, 3), series.before(name, 2, 8, 4), series.last(name, 2)))
        nearer += abs(now - start) < abs(now - before)
    return nearer >= 2


def _left_behind(series: Series, since: int) -> Seen:
    """Return whether trainer and rollout part once something is trained: they had the same weights, and agreed."""
    return since <= _EARLY and series.start("mismatch/logprob_mean", 1) < 1e-4


def _endless(series: Series, _since: int) -> Seen:
    """Return how many turns all conversations have had from the start, if these are all that they may have."""
    most = number(series.setting("nodes.*.with.max_turns")[1], math.inf)
    return 1 < most < series.start("environment/turns", 3) / 0.98 and (most,)


def _misaligned(series: Series, _since: int) -> Seen:
    start, now = series.start("value/loss", 3), series.recent("value/loss")
    return now < 0.8 * start and (start, now)


def _independent(series: Series, _since: int) -> Seen:
    silent = series.last("reward/zero_std_groups", 8)
    return bool(silent) and min(silent) == 1 and max(series.last("reward/std", 8) or [0.0]) > 0 and \
        bool(series.known("response/alike")) and not series.copied


_EARLY = 8  # first step of faults that the start of a run explains
_HELD, _SIGNAL, _STUCK = "held_out_falls", "no_signal", "policy_stuck"
_FORMED = "answers_not_found no_signal truncation repetition entropy_explosion"
CAUSES = (
    Cause(_leap, "`{0}` leapt from {1:.3g} to {2:.3g} at step {3}, which no policy does: {4}",
          "what changed at step {3}: settings, data, a resume"),
    Cause(_replaced, "the policy leapt within one step ({0:.2g} to {1:.2g} nats from its reference at step {2}), at "
          "the usual gradient: its weights were replaced or damaged, as by a checkpoint that is loaded in part",
          "what wrote weights at step {2}"),
    Cause(lambda series, since: since > _EARLY and bool(series.known("environment/turns")) and not series.policy_leapt,
          "the environment is another one since then: its tools fail or answer wrongly, or it pays otherwise",
          "look at the observations in trajectories/", "reward_changed reward_fell no_signal"),
    Cause(_pays_others, "the reward pays wrong answers, too: {0:.0%} of the completions earn, and {1:.0%} are right",
          PAID, "no_signal held_out_falls reward_against_answers"),
    Cause(lambda series, _since: "model_score" in series.functions and not series.own_nodes, "the reward "
          "model does not tell right answers from wrong ones: its head has random weights, as a base model's, or it "
          "knows another form of texts", "the model of the role that scores", "reward_against_answers"),
    Cause(_abstains, "a wrong answer costs {0:g} and none costs nothing: on problems that it may get wrong, no answer "
          "earns more, and the policy stops answering", "pay wrong and missing answers alike", _HELD),
    Cause(lambda series, _since: series.recent("reward/answer_correlation") < 0.8 and
          (series.recent("reward/answer_correlation"),), "the training reward pays for the wrong thing, at "
          "least in part: its correlation with right answers is {0:.2f}", PAID, _HELD),
    Cause(lambda series, _since: (epoch := series.recent("epoch", 1)) >= 3 and (epoch,),
          "the model learns its few records by heart: each has been trained {0:.0f} times",
          "more records in  data.train , fewer steps, a lower rate", _HELD),
    Cause(lambda series, _since: (share := series.recent("prompt/unmarked")) >= 0.3 and (share,), "{0:.0%} of the "
          "answers that are learnt lack the mark (`####`, `\\boxed{{}}`) by which held-out ones are read: they have "
          "another form", "mark the final answers of  data.train", _HELD),
    Cause(_foreign, "the answers that are learnt have another form than the model's own, belong to other questions, or "
          "are shifted by a token: their loss is {0:.2g} at first, though it answers {1:.0%} of the held-out problems",
          "compare a record's answer with what the model writes", _HELD),
    Cause(_narrow, "the training data is narrow: all prompts have {0:.0f} to {1:.0f} tokens, as one kind of question, "
          "and the policy specialises on it", "training data as diverse as what it is held out for", _HELD),
    Cause(lambda series, _since: series.recent(series.reward) > 0.9 * _most(series) > 0 and
          series.recent(series.reward) > 0.9, "the problems are too easy",
          "data of another difficulty, or a node `informative_groups` as dapo.yaml has it", _SIGNAL),
    Cause(_independent, "the reward does not depend on the completion: it reads the prompt or the record in its place, "
          "or one verdict is kept for all samples of a prompt", PAID, _SIGNAL),
    Cause(lambda series, _since: series.steps[-1] < (last := series.setting_of_role("warmup_steps", 0.0)) and (last,),
          "the learning rate is in a warm-up of {0:.0f} steps", "roles.actor.warmup_steps=20", _STUCK),
    Cause(_returned, "the policy has lost its progress: its weights are those of the start again, as by a resume from "
          "the wrong checkpoint", "distflow resume  takes the newest checkpoint", "reference_moves"),
    Cause(_left_behind, "the sampler never gets what is trained, or a node gives the reference's log-probabilities as "
          "the sampler's: they equal the trainer's in the first step, and no longer once it has trained",
          "what loads weights into the sampler, or the node that writes `rollout_logprobs`", "mismatch"),
    Cause(_endless,
          "conversations always go on to their last turn ({0:.0f}): the environment does not end at a final answer",
          "what the environment returns for a final answer: Turn(done=True)",
          "tool_errors same_observations no_signal"),
    Cause(_misaligned, "values are misaligned: they belong to other tokens or rows, since the critic's own loss fell "
          "from {0:.2g} to {1:.2g}", "what changes `values` between the critic and the advantages",
          "value_head"),
    Cause(lambda series, _since: (stops := series.setting("roles.*.generation.stop"))[1] not in ("", "[]") and stops,
          "completions end before their answer, at a text of `stop` ({1})", "{0}=[]", "answers_not_found"),
    Cause(lambda series, _since: series.number((most := series.setting("nodes.*.with.max_tokens"))[0], math.inf) <
          series.setting_of_role("generation.max_new_tokens", math.inf) and (*most, 4 * number(most[1], 0.0)),
          "`{0}` is {1}, fewer tokens than a conversation takes", "{0}={2:.12g}", "truncation"),
    Cause(lambda series, since: since <= _EARLY and bool(series.own_form) and (series.own_form,),
          "prompts have a form that the model does not know{0}", "the form that the model knows", _FORMED),
    Cause(_by_elimination, "{0}", "{1}", "no_signal truncation"),
)


def explained(series: Series, detector: str, seen: Evidence, symptom: bool) -> Evidence:
    """Return evidence whose cause begins with what explains it, upstream first: what changed then, facts that no
    healthy run has, unusual settings, other readings. At most three are told."""
    if seen.sure:
        return seen
    odd = [each for each in unusual(series) if symptom or each.fix.partition("=")[0] not in seen.remedy][:2]
    facts = [(True, fact) for kind in DOUBTS if symptom and (fact := doubted(series, kind))]
    facts += [(bool(each.alerts), fact) for each in FACTS if symptom and (fact := each.look(series))]
    told = {sure: [(f"{fact.what[0].lower()}{fact.what[1:]}: {fact.cause}", fact.remedy)
                   for alerts, fact in facts if alerts == sure] for sure in (True, False)}
    changed, found = list[tuple[str, str]](), list[tuple[str, str]]()
    for cause in CAUSES:
        if (detector in cause.explains.split() if cause.explains else symptom) and \
                (values := cause.when(series, seen.since)):
            values = values if isinstance(values, tuple) else ()
            first = cause.when is _leap and seen.since > _EARLY  # settings were so before
            (changed if first else found).append((cause.text.format(*values), cause.change.format(*values)))
    if odd:
        told[True].append(("; and ".join(f"{each.what}, so that {each.does}" for each in odd),
                           " , or  ".join(each.fix for each in odd)))
    found = [*changed, *told[True], *told[False], *found]
    causes, remedies = zip(*found[:2], (seen.cause, seen.remedy))
    return replace(seen, cause="; or ".join(causes), remedy=" , or  ".join(dict.fromkeys(remedies)), sure=bool(found))
