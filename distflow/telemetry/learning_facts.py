"""Facts that no healthy run on record has had, which are known before or at a run's first steps. What goes wrong later
most probably follows from one of them.

    DOUBTS    what preflight has noted of data and rewards
    FACTS     what the first steps say of models, data, validation, rewards and the DAG
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from distflow.telemetry.learning_series import (
    RECENT,
    Evidence,
    Origin,
    Series,
    add_rule,
    mean,
    middle,
    variance,
)

IMITATION = {"supervised_update", "reward_update", "distillation_update", "distillation_advantage"}
PAID = "try the reward on a few completions of samples.jsonl, and change  nodes.reward.with.reward"
Seen = tuple[object, ...] | bool | None
"""Values for the texts of a fact or cause; nothing where it is none."""


DOUBTS = {
    "held_out_trained": ("leaking_prompts", "validation measures what was learnt by heart"),
    "other_field": ("one_answer", "another field is learnt, or compared with, than was meant"),
    "answer_in_question": ("leaking_prompts", "the policy copies answers from their prompts"),
    "question_in_answer": ("data_lost", "the model learns to write questions, too"),
    "marks_in_texts": ("data_lost", "messages are divided where none ends, which the model has never seen"),
    "answers_contradict": ("duplicated_prompts", "one of the answers is wrong, and what is right earns nothing"),
    "pairs_contradict": ("pairs_contradict", "such pairs teach nothing, or what is worse"),
    "texts_cut": ("", "what is cut off is neither read nor learnt"),
    "unanswerable": ("answers_not_found", "whatever is answered to such a prompt earns the same"),
    "wrong_paid": ("reward_against_answers", "the reward pays wrong answers, too, and the policy finds the cheapest"),
    "right_unpaid": ("", "right answers do not earn what they should"),
    "paid_alike": ("", "the reward does not depend on the answer, or reads another form"),
}
"""What preflight may doubt, upstream first: the detector that says it without a symptom, if one does, and what
follows."""
_MANY = 0.4  # share of the records for which it must hold


def doubted(series: Series, kind: str) -> Evidence | None:
    """Return what preflight has noted of a kind, with what follows from it."""
    for doubt in series.doubts:
        if doubt.kind == kind and doubt.share >= _MANY:
            said = doubt.removesuffix(doubt.change).rstrip(" .")
            return Evidence(series.steps[0], series.goal[0], f"Before the start: {said}", DOUBTS[kind][1],
                            doubt.change or "what it names", sure=True)
    return None


def role_of(key: str) -> str:
    return key.split(".")[1]


class Fact(NamedTuple):
    """What no healthy run has had, and what follows from it. when: returns values for the texts. alerts: the detector
    that says it without a symptom; "": it explains symptoms alone. origin: facts are told upstream first."""

    origin: Origin
    alerts: str
    when: Callable[[Series], Seen]
    what: str
    does: str
    change: str

    def look(self, series: Series) -> Evidence | None:
        values = self.when(series) if len(series.steps) >= RECENT else None
        if not values:
            return None
        what, does, change = (text.format(*values if isinstance(values, tuple) else ())
                              for text in (self.what, self.does, self.change))
        return Evidence(series.steps[0], series.goal[0], what, does, change, sure=True)


def _untrained_model(series: Series) -> Seen:
    """Return the role that begins with random weights, where these stay, or nothing is ever earned with them."""
    frozen = [value for key, value in series.settings.items() if key.endswith(".model.architecture") and
              series.settings.get(f"roles.{role_of(key)}.trained") != "true"]
    for key in series.keys("roles.*.model.architecture"):
        role = f"roles.{role_of(key)}"
        kept = [f"`{role}.{name}`" for name in ("lora.rank", "freeze") if
                series.settings.get(f"{role}.{name}", "null") not in ("null", "[]")]
        if kept:
            return key, f", and {kept[0]} keeps most of them frozen"
        if "null" not in frozen and series.settings.get(f"{role}.trained") != "true":
            return key, ", and nothing trains it"
        if role_of(key) == series.trained_role and _unearned(series, 0.95):
            return key, ", and rewards teach only what a model already does now and then"
    return None


def _unearned(series: Series, share: float) -> bool:
    """Whether in so many groups of the first steps all samples earn the same."""
    return len(series.steps) >= 8 and series.start(f"{series.reward.partition('/')[0]}/zero_std_groups", 8) > share


def _random_start(series: Series) -> Seen:
    """Return the entropy of the first steps, if it is that of a model that does not know the task."""
    entropy, usual = series.start("policy/entropy", RECENT), series.setting_of_role("generation.temperature", 1) <= 1.2
    return entropy > 1 and usual and _unearned(series, 0.6) and \
        series.start("response/has_answer", RECENT) < 0.05 and (entropy,)


def _scored_otherwise(series: Series) -> Seen:
    """Return by which reward no held-out answer is right, though answers are right in training."""
    by, held_out = series.settings.get("validation.reward", ""), [
        value for name in series.known_names("validation/") for _, value in series.known(name)]
    other = f"reward/{by.rpartition(':')[2]}" not in series.known_names("reward/")
    return len(held_out) >= 3 and max(held_out) <= 0 and series.start("response/has_answer") > 0.25 and other and \
        not series.known("environment/turns") and (by,)


def _longer(series: Series) -> Seen:
    found = series.start("preference/length_correlation", RECENT)
    return "labelled_pairs" in series.functions and abs(found) > 0.9 and ("longer" if found > 0 else "shorter",)


def _by_place(series: Series) -> Seen:
    """Return how the reward goes with the place of a sample in its group, if that is no chance."""
    found = [value for _, value in series.known("reward/place_correlation")]
    certain = len(found) >= 8 and abs(mean(found)) > max(0.2, 6 * (variance(found) / len(found)) ** 0.5)
    return certain and (mean(found),)


def _wrong_pays(series: Series) -> Seen:
    """Return what the best wrong answers and the right ones earn, if that is the same in most of the steps."""
    most, right = dict(series.known("earned/wrong_max")), dict(series.known("earned/right"))
    as_much = [step for step in right if most.get(step, -math.inf) >= right[step] > 0]
    usual = series.start("earned/wrong", 8) > 0.15 * series.start("earned/right", 8)  # equal answers in other words
    return usual and len(as_much) > 0.3 * len(right) and (middle([most[step] for step in as_much]), middle(
        [right[step] for step in as_much]), series.deciding_part)


def _counts_more(series: Series) -> Seen:
    """Return from what to what right answers earn, and wrong ones at most, if the reward has one part and is no plain
    verdict."""
    low, high, wrong = (series.start(f"earned/{name}", 8) for name in ("right_min", "right_max", "wrong_max"))
    return len(series.parts) <= 1 and high - low > 0.1 * high > 0 and (low, high, wrong)


def _other_reference(series: Series) -> Seen:
    """Return what pairs have before anything is trained, if it is not what they have without a difference."""
    better, loss = (dict(series.known(name)).get(1, math.nan) for name in ("preference/better", "loss"))
    if abs(better) > 0.05:
        return f"answers have an implicit reward of {better:.2g}, not 0",
    plain = {name for name in series.functions if name.endswith("_update")} == {"preference_update"} and not (
        series.keys("nodes.*.with.loss") or series.keys("nodes.*.with.nll"))
    return plain and abs(loss - math.log(2)) > 0.01 and (f"pairs have a loss of {loss:.3g}, not log 2",)


def _tiny_differences(series: Series) -> Seen:
    """Return how far wrong answers differ, if that is next to nothing and yet decides groups without a right one."""
    gap = series.start("earned/right") - series.start("earned/wrong")
    apart = middle([high - low for (_, high), (_, low) in zip(series.known("earned/wrong_max"),
                                                               series.known("earned/wrong_min"))])
    return 0 < apart < 0.1 * gap and "group_advantage" in series.functions and (apart, gap)


def _uncorrected(series: Series) -> Seen:
    """Return how old samples are whose ratio is 1, whatever the policy has learnt since they were sampled."""
    old, ratios = series.recent("staleness/mean", RECENT), series.last("policy/ratio", RECENT)
    again = any(value == "logprobs" and series.settings.get(key.replace(".function", ".role")) == series.trained_role
                for key, value in series.settings.items() if key.endswith(".function"))
    return again and old > 0 and not series.known("importance/with_ratio") and len(series.steps) >= 8 and \
        bool(ratios) and max(abs(value - 1) for value in ratios) < 1e-4 and (old,)


def _filtered_late(series: Series) -> Seen:
    """Return the node that fines answers before groups are filtered by what they earn, if it fines many."""
    of = {series.settings[key]: key.split(".")[1] for key in series.keys("nodes.*.function")}
    late, fine = of.get("informative_groups", ""), of.get("overlong_penalty", "")
    after = late and f'"{fine}"' in series.settings.get(f"nodes.{late}.dependencies", "")
    return bool(fine) and bool(after) and series.start("reward/overlong", RECENT) > 0.1 and (late, fine)


def _other_target(series: Series) -> Seen:
    """Return what the critic says on average and what is earned, if its loss is less than this gap would make it."""
    gamma, lam = (min((series.number(key, 1.0) for key in series.keys(f"nodes.*.with.{name}")), default=1.0)
                  for name in ("gamma", "lam"))
    said, earned = series.recent("value/mean", 4), series.recent(series.reward, 8)
    reach = min(1.0, 1 / max(1e-9, (1 - gamma * lam) * series.recent("response/length")))  # how much of it returns hold
    return len(series.steps) >= 16 and gamma >= 0.99 and abs(said) < 0.4 * abs(earned) and \
        series.recent("value/loss") < 0.4 * (reach * (earned - said)) ** 2 and (said, earned)


def _all_told(series: Series) -> Seen:
    told = series.start("environment/told", 8)  # by a tool that gives it away: also where calls are wrong
    return told > max(0.8, series.start("environment/reward", 8) + 0.1) and (told,)


def _cancelled(series: Series) -> Seen:
    """Return the parts of the reward that vary from step to step, if completions of a step earn the same each time."""
    vary = [f"`{name[7:]}`" for name in sorted(series.parts)
            if variance(series.last(name, RECENT) or [0.0, 0.0]) > 1e-4]
    return max(series.last("reward/std", RECENT) or [1.0]) < 1e-6 and len(vary) > 1 and (" and ".join(vary),)


def _swapped_fields(series: Series) -> Seen:
    marked = series.start("prompt/marked", 3)  # as prompts with solved examples are, whose answers are marked, too
    return marked > 0.5 and series.start("prompt/unmarked", 3) > 0.5 and (marked,)


def _frozen(series: Series) -> Seen:
    """Return the setting that freezes parts of a trained role."""
    key, value = next(((key, series.settings[key]) for key in series.keys("roles.*.freeze")
                       if series.settings[key] != "[]"), ("", ""))
    return bool(key) and (key, value)


_TRAINED = "begin with a trained model (roles.*.model: PATH), as an sft run leaves one"
FACTS = (
    Fact(Origin.DATA, "data_lost", _swapped_fields, "{0:.0%} of the prompts hold the mark of a final answer (`####`)",
         "questions and answers have changed places: the model learns to write questions",
         "exchange  data.question  and  data.answer , or the fields of  data.train"),
    Fact(Origin.DATA, "", lambda series: series.start("samples") < 8 and (series.start("samples"),), "A step has "
         "{0:.0f} samples", "so few samples are noise: most steps teach nothing, and the others what was chance",
         "a larger  data.batch  or  nodes.rollout.with.group_size"),
    Fact(Origin.DATA, "", _longer, "Nearly all chosen answers are {0} than the rejected ones",
         "length alone tells them apart, and the model learns to write {0} ones, not better ones",
         "pairs of like length in  data.train"),
    Fact(Origin.DATA, "unusual_setting", _untrained_model, "`{0}` begins with random weights{1}",
         "the model is untrained: nothing can be learnt from there, or from it", _TRAINED),
    Fact(Origin.DATA, "unusual_setting", _random_start, "The policy begins with {0:.2g} nats of entropy and hardly a "
         "right answer", "the starting model is not trained for this task, or some of its weights were not loaded",
         f"the files of  roles.actor.model ; or {_TRAINED}"),
    Fact(Origin.REWARD, "held_out_falls", _scored_otherwise, "`validation.reward` ({0}) pays for no held-out answer, "
         "though right answers are given in training", "validation's reward reads another form of answers than the "
         "training reward, so that its curve says nothing", "validation.reward: the reward of training"),
    Fact(Origin.REWARD, "leaking_prompts", _all_told, "{0:.0%} of what tools answer at first is already the "
         "final answer",
         "the environment gives away the answer of the problem, whatever it is asked: nothing has to be solved",
         "what the environment returns"),
    Fact(Origin.REWARD, "reward_against_answers", _cancelled, "All completions of a step earn the same, though "
         "{0} vary", "these parts of the reward cancel each other: what one pays, another takes", "their weights in  "
         "nodes.reward.with.reward"),
    Fact(Origin.REWARD, "reward_against_answers", _by_place, "Rewards follow the place of a sample in its group "
         "(correlation {0:.2f})", "the position decides, not the answer, as with a judge that prefers what it is "
         "shown first", "score each answer alone, or in an order by chance"),
    Fact(Origin.REWARD, "reward_against_answers", _wrong_pays, "Some wrong answers earn {0:.3g}, and right ones "
         "{1:.3g}", "the reward pays for wrong answers, too{2}: what it pays beside a right result can be "
         "earned without one", PAID),
    Fact(Origin.REWARD, "", _counts_more, "Right answers earn from {0:.3g} to {1:.3g}, and wrong ones up to {2:.3g}",
         "the reward counts something beside the result, such as steps, length or form, and more of it earns more than "
         "to be right", PAID),
    Fact(Origin.UPDATE, "reference_differs", _other_reference, "Before anything is trained, policy and reference "
         "differ: {0}", "the reference is not the model that is trained, or its log-probabilities are of other rows",
         "roles.reference: {{copy_of: actor}}"),
    Fact(Origin.REWARD, "", _tiny_differences, "Wrong answers differ by {0:.2g} in what they earn, and right ones earn "
         "{1:.2g} more", "such a small difference (of length, of form) counts fully where no answer of a group is "
         "right, since advantages are divided by the deviation", "nodes.advantage.with.scale=false , or no such part"),
    Fact(Origin.ADVANTAGE, "unusual_setting", _filtered_late, "Node `{0}` filters groups after `{1}` has fined "
         "answers", "the length penalty makes rewards of a group differ, so that groups of wrong answers pass the "
         "filter, and the shortest of these is learnt", "{0}: dependencies: [reward] , and `{1}` after it"),
    Fact(Origin.ADVANTAGE, "value_head", _other_target, "Values are {0:.2g} on average, and rewards {1:.2g}",
         "the critic learns another target than returns", "the node that writes `returns`"),
    Fact(Origin.UPDATE, "importance_lost", lambda series: middle([value for _, value in series.known(
         "importance/with_ratio")]) < -1e-6, "Importance weights are the smaller, the likelier a token has become",
         "importance is inverted: it must be the trainer's probability over the rollout's",
         "the node that writes `importance`, or  truncated_importance  in its place"),
    Fact(Origin.UPDATE, "importance_lost", _uncorrected, "The ratio is exactly 1, though samples are {0:.1f} versions "
         "old", "a node `logprobs` of the trained role recomputes the old policy, so that nothing corrects for stale "
         "samples, and the bound stops nothing", "a node `truncated_importance` after it, as in async runs, or take it "
         "out"),
    Fact(Origin.UPDATE, "", _frozen, "`{0}` is {1}", "parts of the model are frozen, and what is left may be too "
         "little to learn with", "{0}=[]"),
)


for _kind, (_alerts, _) in DOUBTS.items():
    if _alerts:
        add_rule(_alerts, lambda series, kind=_kind: doubted(series, kind) if len(series.steps) == 1 else None,
                 rows="high", origin=Origin.DATA)
for _fact in FACTS:
    if _fact.alerts:
        add_rule(_fact.alerts, _fact.look, rows="high", origin=_fact.origin)
