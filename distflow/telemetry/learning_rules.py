"""Rules that detect faults of learning. Thresholds are from recorded runs: `benchmarks/learning_faults.py judge`.

Each compares the last steps with the first ones, or with those just before; medians, so that one odd step is no fault.
"""

from __future__ import annotations

from functools import partial
from operator import lt
from statistics import fmean as mean

from distflow.telemetry.learning_series import RULES, Evidence, Series, detector, fall, middle, spread, variance

__all__ = ["RULES"]

_RECENT = 4  # steps in which something must be seen
_FIRST = 5  # steps of a run that count as its beginning


def _setting(series: Series, end: str, usual: str) -> str:
    """Return the key of a run's setting that ends so, and is of the trained role where several are."""
    found = [key for key in series.settings if key.endswith(f".{end}")]
    trained = [key.split(".")[1] for key, value in series.settings.items()
               if key.startswith("roles.") and key.endswith(".trained") and value == "true"]
    return next((key for key in found if key.split(".")[1] in trained[:1]), found[0] if found else usual)


def _role(series: Series) -> str:
    return next((key.split(".")[1] for key, value in series.settings.items()
                 if key.startswith("roles.") and key.endswith(".trained") and value == "true"), "actor")


def _update(series: Series) -> str:
    """Return the node that trains the policy."""
    return next((key.split(".")[1] for key, value in series.settings.items()
                 if key.startswith("nodes.") and key.endswith(".function") and value == "policy_update"), "update")


def _lower_rate(series: Series) -> str:
    key = f"roles.{_role(series)}.learning_rate"
    known = series.settings.get(key)
    try:
        return f"{key}={float(known) / 10:g}" if known else f"{key}=1e-6"
    except ValueError:
        return f"{key}=1e-6"


# Rewards


@detector(rows="low")
def reward_constant(series: Series) -> Evidence | None:
    """All samples of the last steps earn the same."""
    std = "environment/reward_std" if series.reward == "environment/reward" else "reward/std"
    recent = series.last(std, _RECENT)
    if not recent or max(recent) > 1e-9:
        return None
    value, parts = series.last(series.reward, 1)[0], [name.removeprefix("reward/") for name in series.parts]
    since = series.since(std, lambda each: each <= 1e-9)
    named = f" (part{'s' * (len(parts) > 1)} {', '.join(f'`{name}`' for name in parts)})" if parts else ""
    return Evidence(since, series.reward, f"Every completion earns {value:.3g}{named}, so that nothing is learnt",
                    "the reward function pays the same for every completion: it does not find what it looks for, or an "
                    "error in it is taken for a verdict. Were all answers right, the data is too easy",
                    "try the reward on a few completions of samples.jsonl, and change  "
                    f"nodes.reward.with.reward={parts[0] if parts else 'NAME'}",
                    {"reward": value, "steps": len(series.steps)})


@detector(rows="low")
def answers_not_found(series: Series) -> Evidence | None:
    """The reward finds no final answer in nearly all completions, or in many more than before."""
    name = "reward/unanswered"
    recent, before = series.last(name, 3), series.before(name, 3, 10, 5)
    if not recent or min(recent) < 0.4:
        return None
    jumped = bool(before) and middle(recent) - middle(before) > 0.4
    if not jumped and (len(series.known(name)) < 8 or min(series.last(name, 8) or [0.0]) < 0.95):
        return None
    return Evidence(series.since(name, lambda each: each >= 0.4), name,
                    f"The reward finds no final answer in {middle(recent):.0%} of the completions"
                    f"{f', before in {middle(before):.0%}' if jumped else ''}",
                    "a parser's failure: completions do not have the form that the reward reads, as `#### 42` or "
                    "`\\boxed{42}`, or it reads another one than the prompt asks for",
                    "ask for the form in the question, or read what models write:  nodes.reward.with.reward="
                    "{math: {strict: false}}", {"unanswered": middle(recent)})


@detector(symptom=True)
def no_signal(series: Series) -> Evidence | None:
    """In nearly all groups all samples earn the same."""
    name = "environment/zero_std_groups" if series.reward == "environment/reward" else "reward/zero_std_groups"
    recent = series.last(name, 8)
    if not recent or middle(recent) < 0.85:
        return None
    value, most = middle(series.last(series.reward, 8)), max(series.last(series.reward, 8) or [0.0])
    easy = most > 0.9
    return Evidence(series.since(name, lambda each: each >= 0.7), name,
                    f"In {middle(recent):.0%} of the groups all samples earn the same, and teach nothing",
                    "the problems are too easy" if easy else
                    "hardly any answer is right: the problems are too hard, or the reference answers are wrong or in a "
                    "form that the reward does not read" if value < 0.1 else
                    "the policy gives a prompt the same answer again and again: too low a temperature, or too little "
                    "entropy",
                    "data of another difficulty, or a node `informative_groups` as dapo.yaml has it"
                    if easy else f"roles.{_role(series)}.generation.temperature=1.0, a larger group_size, or easier "
                    "data", {"share": middle(recent), "reward": value})


@detector(rows="high")
def reward_noise(series: Series) -> Evidence | None:
    """The same completion of a prompt earns now this, now that."""
    name = "reward/inconsistent"
    recent = series.last(name, _RECENT)
    if not recent or middle(recent) < 0.25:
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"{middle(recent):.0%} of the completions that equal another one to their prompt earn something "
                    "else", "the reward is noise: a judge that contradicts itself, a sandbox that fails now and then, "
                    "or rewards of other rows", "score one completion several times; a judge wants  temperature 0 , or "
                    "several verdicts", {"inconsistent": middle(recent)})


@detector(rows="low", symptom=True)
def reward_changed(series: Series) -> Evidence | None:
    """The mean reward, or its deviation, leaps within a few steps and stays there."""
    for name in (series.reward, "reward/std"):
        recent, before = series.last(name, _RECENT), series.before(name, _RECENT, 10, 6)
        if not recent or not before:
            continue
        old, noise = middle(before), max(spread(before), variance(before) ** 0.5, 0.02, 0.1 * abs(middle(before)))
        gaps = [abs(value - old) / noise for value in recent]
        same = len({value > old for value in recent}) == 1
        leapt = min(gaps[-3:]) > _LEAP or mean(gaps) > _LEAP_OF_MEAN and min(gaps) > _LEAST or \
            min(gaps) > _LEAST and _pays_more(series)
        if same and leapt:
            return Evidence(series.steps[-_RECENT if min(gaps) > _LEAST else -3], name,
                            f"`{name}` leapt from {old:.3g} to {middle(recent):.3g}",
                            "a policy does not change so fast: the reward function, its data or its judge is another "
                            "one since then", "look at what changed there (`distflow why` lists events), and at the "
                            "completions below: do they earn what they should?",
                            {"before": old, "now": middle(recent)})
    return None


_LEAP, _LEAP_OF_MEAN, _LEAST = 4.5, 3.2, 1.5  # standard deviations


def _pays_more(series: Series) -> bool:
    """Return whether more is paid now than the most that was paid before, which was the same in all steps."""
    recent, before = series.last("reward/max", _RECENT), series.before("reward/max", _RECENT, 10, 6)
    return bool(recent and before) and max(before) - min(before) < 1e-6 and min(recent) > 1.05 * max(before) > 0


@detector(rows="low", symptom=True)
def reward_fell(series: Series) -> Evidence | None:
    """The mean reward is lower than before, by more than chance."""
    values = series.known(series.reward)
    at = fall([value for _, value in values])
    if at is None:
        return None
    before, after = (mean(value for _, value in part) for part in (values[:at][-40:], values[at:]))
    return Evidence(values[at][0], series.reward, f"The reward fell from {before:.3f} to {after:.3f}",
                    "the policy became worse, or the reward or the data harder",
                    f"go on from a checkpoint before it with  {_lower_rate(series)}",
                    {"before": before, "after": after})


@detector()
def reward_failures(series: Series) -> Evidence | None:
    """Many samples have no reward, or their environment fails."""
    for name, what in (("reward/failed", "reward"), ("environment/failed", "environment")):
        failed, samples = series.last(name, 3), series.last("samples", 3)
        if failed and samples and min(each / max(count, 1.0) for each, count in zip(failed, samples)) > 0.1:
            share, least = middle(failed) / max(middle(samples), 1.0), 0.1 * middle(samples)
            return Evidence(series.since(name, partial(lt, least)), name,
                            f"The {what} fails for {share:.0%} of the samples, which leave the step",
                            f"the {what} raises or takes too long; the rest of the batch is what it does not fail for, "
                            "so that the policy learns from a skewed choice",
                            "the reason is in  events.jsonl  (reward_failed, environment_failed); a longer limit is  "
                            "nodes.reward.with.limit=600", {"share": share})
    return None


@detector(rows="high")
def reward_hacking(series: Series) -> Evidence | None:
    """One part of the reward rises while another, or what held-out answers earn, falls."""
    moved = {name: moves for name in series.parts if (moves := _moves(series, name)) is not None}
    up = [name for name, (shift, errors) in moved.items() if errors > 4 and shift > 0.1]
    down = [name for name, (shift, errors) in moved.items() if errors < -2.2 and shift < -0.05]
    fallen = _held_out_fall(series)
    if len(series.parts) < 2 or not up or not (down or fallen):
        return None
    winner = max(up, key=lambda name: moved[name][1])
    loser = f"part `{min(down, key=lambda name: moved[name][1]).removeprefix('reward/')}`" if down else \
        f"`{fallen[0] if fallen else ''}`"
    part, begin = winner.removeprefix("reward/"), middle(series.first(winner, 8))
    return Evidence(series.since(winner, lambda value: value > begin + 0.05), winner,
                    f"Part `{part}` of the reward rises while {loser} falls",
                    f"reward hacking: `{part}` can be earned without the other, which the policy gives up for it",
                    f"a smaller weight of `{part}`:  nodes.reward.with.reward.{part}=0.1  , or pay it only for "
                    "completions that are right", {winner: moved[winner][0]})


def _moves(series: Series, name: str) -> tuple[float, float] | None:
    """Return how far the mean of a metric has moved from the first steps to the last, and in how many standard
    errors."""
    start, recent = series.first(name, 10), series.last(name, 8)
    if not start or not recent or len(series.known(name)) < 18:
        return None
    error = (max(variance(start), 4e-4) / len(start) + max(variance(recent), 4e-4) / len(recent)) ** 0.5
    shift = mean(recent) - mean(start)
    return shift, shift / error


def _held_out_fall(series: Series) -> tuple[str, int, float, float] | None:
    """Return the validation that has become worse, since when, its best and its last mean."""
    for name in series.known_names("validation/"):
        known = series.known(name)
        best = max(known[:-2], key=lambda pair: pair[1], default=(0, 0.0))
        if best[1] >= 0.1 and max(value for _, value in known[-2:]) <= 0.75 * best[1]:
            return name, known[-2][0], best[1], known[-1][1]
    return None


@detector(rows="long", symptom=True)
def length_hacking(series: Series) -> Evidence | None:
    """Rewards follow lengths, and lengths grow."""
    name, length = "reward/length_correlation", "response/length"
    recent, start, now = series.last(name, _RECENT), series.first(length, _FIRST), series.last(length, _RECENT)
    if not recent or not start or middle(recent) < 0.6 or middle(now) < 1.25 * middle(start):
        return None
    return Evidence(series.since(name, lambda value: value > 0.4), length,
                    f"Longer completions earn more (correlation {middle(recent):.2f}), and completions grow: "
                    f"{middle(start):.0f} → {middle(now):.0f} tokens",
                    "length hacking: the reward pays for length, or a loss that averages over tokens favours it",
                    "add a cost of length, as  nodes.reward.with.reward={math: 1.0, length: {weight: 0.2, target: "
                    f"{middle(start):.0f}}}}}", {"correlation": middle(recent), "length": middle(now)})


# The policy


@detector(rows="low", symptom=True)
def entropy_collapse(series: Series) -> Evidence | None:
    """The policy becomes certain of what earns no more than before."""
    name, signal = "policy/entropy", "reward/zero_std_groups"
    start, recent = series.first(name, _FIRST), series.last(name, _RECENT)
    if not start or not recent or len(series.known(name)) < 2 * _FIRST or middle(start) < 0.02:
        return None
    left = middle(recent) / middle(start)
    earned = middle(series.last(series.reward, _RECENT)) - middle(series.first(series.reward, _FIRST))
    silent = middle(series.last(signal, _RECENT)) - middle(series.first(signal, _FIRST))
    if not (left < 0.1 or left < 0.35 and earned < 0.05 or left < 0.65 and silent > 0.2 and earned < 0.0):
        return None
    bound = middle(start) * 0.8
    return Evidence(series.since(name, lambda value: value < bound), name,
                    f"Entropy collapsed from {middle(start):.3g} to {middle(recent):.3g} nats, and the reward moved by "
                    f"{earned:+.2f}",
                    "the policy settles on a few answers before it has found better ones: each update is too large, or "
                    "only what is already likely is reinforced",
                    f"nodes.{_update(series)}.with.clip_high=0.28 , or  nodes.{_update(series)}.with.entropy=0.001 , "
                    f"or  {_lower_rate(series)}", {"before": middle(start), "now": middle(recent), "reward": earned})


@detector(symptom=True)
def entropy_explosion(series: Series) -> Evidence | None:
    """The policy becomes random."""
    name = "policy/entropy"
    start, recent = series.first(name, 3), series.last(name, _RECENT)
    earned = middle(series.last(series.reward, _RECENT)) - middle(series.first(series.reward, _FIRST))
    grown = middle(recent) - middle(start) if start and recent else 0.0
    if not (grown > max(3.0 * middle(start), 0.3) or grown > max(1.4 * middle(start), 0.1) and earned < 0.05):
        return None
    bonus = series.settings.get(f"nodes.{_update(series)}.with.entropy", "")
    paid = bonus not in ("", "0", "0.0")
    return Evidence(series.since(name, lambda value: value > 1.3 * middle(start)), name,
                    f"Entropy rose from {middle(start):.3g} to {middle(recent):.3g} nats: completions become random",
                    f"the entropy bonus ({bonus}) outweighs the reward" if paid else
                    "updates make likely tokens unlikely faster than they find better ones: the rate is too high, or "
                    "most advantages are negative",
                    f"nodes.{_update(series)}.with.entropy=0" if paid else _lower_rate(series),
                    {"before": middle(start), "now": middle(recent)})


@detector(rows="long", symptom=True)
def truncation(series: Series) -> Evidence | None:
    """Many completions are cut off."""
    name = "response/truncated"
    start, recent = series.first(name, 3), series.last(name, _RECENT)
    if not recent or not (middle(recent) > 0.5 or middle(recent) - middle(start) > 0.25):
        return None
    key = _setting(series, "max_new_tokens", "roles.actor.generation.max_new_tokens")
    most = series.settings.get(key, "")
    more = f"{key}={2 * int(most)}" if most.isdigit() else f"a larger {key}"
    return Evidence(series.since(name, lambda value: value > 0.25), name,
                    f"{middle(recent):.0%} of the completions are cut off at the limit of tokens",
                    "completions do not come to an end: the limit is too short for the task, or the policy earns by "
                    "going on", f"{more} , or a node `overlong_penalty` as dapo.yaml has it",
                    {"truncated": middle(recent)})


@detector(rows="long", symptom=True)
def repetition(series: Series) -> Evidence | None:
    """Completions repeat themselves."""
    name = "response/repetition"
    start, recent = series.first(name, _FIRST), series.last(name, _RECENT)
    if not start or not recent or middle(recent) < max(0.1, 3 * middle(start)):
        return None
    bound = max(0.05, 2 * middle(start))
    return Evidence(series.since(name, lambda value: value > bound), name,
                    f"{middle(recent):.0%} of the runs of four tokens in a completion were in it before",
                    "the policy goes round in circles: what repeats earns, or the policy has left the language that it "
                    "knew", f"nodes.{_update(series)}.with.kl=0.01 , and a reward that does not pay for what repeats",
                    {"repetition": middle(recent)})


@detector(symptom=True)
def kl_runs_off(series: Series) -> Evidence | None:
    """The policy is far from the reference and moves on."""
    name = "policy/kl_reference"
    recent, before = series.last(name, _RECENT), series.before(name, _RECENT, 8, 4)
    if not recent or not before or middle(recent) < 0.3 or middle(recent) < 1.5 * middle(before):
        return None
    node = _update(series)
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"KL to the reference runs off: {middle(before):.3g} → {middle(recent):.3g} nats a token",
                    "updates are too large for the model, or the KL term too weak to hold it",
                    f"{_lower_rate(series)} , or  nodes.{node}.with.kl=0.01", {"kl": middle(recent)})


@detector(symptom=True)
def ratio_clipped(series: Series) -> Evidence | None:
    """The loss's bound is active on many tokens."""
    name, node = "policy/clip_ratio", _update(series)
    recent, bounded = series.last(name, 8), series.settings.get(f"nodes.{node}.with.loss", "ppo")
    if not recent or middle(recent) < 0.15 or bounded not in ("ppo", "reinforce"):  # others bound most tokens
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"The bound of the loss is active on {middle(recent):.0%} of the tokens, which then teach nothing",
                    "the policy moves far within one batch: too many updates of it, or too large ones",
                    f"nodes.{node}.with.epochs=1 , or  {_lower_rate(series)}", {"clipped": middle(recent)})


@detector()
def mismatch(series: Series) -> Evidence | None:
    """Trainer and rollout disagree about the probability of the same tokens."""
    name, late = "mismatch/logprob_mean", "mismatch/logprob_late"
    recent, start = series.last(name, 3), series.before(name, 3, 10, 5)
    grew = bool(start and recent) and min(recent) > 3 * middle(start)  # deep models in half precision begin at 0.08
    if not recent or min(recent) < (0.05 if grew else 0.25) or max(series.last("staleness/max", 3) or [0.0]) > 0:
        return None
    tail = middle(series.last(late, 3))
    grows = tail > 1.3 * middle(recent)
    return Evidence(series.since(name, lambda value: value > 0.05), name,
                    f"Trainer and rollout differ by {middle(recent):.2g} nats a token"
                    f"{f', before by {middle(start):.2g}' if start else ''}{', most late in a row' if grows else ''}",
                    "the engine that samples does not hold the weights that are trained, or computes them otherwise "
                    "(precision, kernels, positions)",
                    f"roles.{_role(series)}.rollout=hf  shows whether it is the engine; until then a node "
                    "`truncated_importance` corrects for it", {"mean": middle(recent), "late": tail})


# Updates


@detector(symptom=True)
def gradient_spike(series: Series) -> Evidence | None:
    """The gradient's norm leaps."""
    name = "grad_norm"
    now, before = series.last(name, 1), [each for each in series.before(name, 1, 20, 6) if each > 0]
    if not now or len(before) < 6 or now[0] < 10 * middle(before):
        return None
    return Evidence(series.steps[-1], name, f"The gradient's norm leapt from {middle(before):.3g} to {now[0]:.3g}",
                    "one batch differs from all others: a reward or an advantage of another scale, a very long row, or "
                    "a number that is nearly infinite", f"look at the samples of that step;  "
                    f"roles.{_role(series)}.max_grad_norm=1.0  bounds what it does",
                    {"before": middle(before), "now": now[0]})


@detector(symptom=True)
def no_gradient(series: Series) -> Evidence | None:
    """The gradient is 0."""
    for name in series.names(""):
        if name.rpartition("/")[2] == "grad_norm" and max(series.last(name, 10) or [1.0]) == 0:
            return Evidence(series.since(name, lambda value: value == 0), name,
                            f"`{name}` has been 0 for 10 steps: nothing is learnt",
                            "the samples of each prompt earn the same", "data of another difficulty, or a reward that "
                            "tells better from worse: see the completions in samples.jsonl", {"steps": 10})
    return None


@detector()
def learning_rate(series: Series) -> Evidence | None:
    """The policy does not move at all, or leaves the model that it was within a few steps."""
    name, kl = "learning_rate", "policy/kl_reference"
    rates, moved, key = series.last(name, 8), series.last(kl, 8), f"roles.{_role(series)}.learning_rate"
    signal = middle(series.last("reward/zero_std_groups", 8)) < 0.8
    if rates and max(rates) > 0 and (max(rates) <= 1e-8 or moved and max(moved) < 1e-7 and signal):
        return Evidence(series.steps[-8], name, f"The policy does not move: the learning rate is {max(rates):.1g}",
                        "the learning rate is far below what models take (1e-7 to 1e-5, adapters 1e-5 to 1e-4)",
                        f"{key}=1e-6", {"learning_rate": max(rates)})
    now, entropy, start = series.last(kl, 1), series.last("policy/entropy", 2), series.first("policy/entropy", 2)
    early = len(series.steps) <= 12
    leapt = bool(now) and now[0] > 0.5
    broke = bool(entropy and start) and min(entropy) > max(4 * min(start), min(start) + 0.3) and \
        middle(series.last(series.reward, 2)) < 0.5 * middle(series.first(series.reward, 2))
    if not early or not (leapt or broke):
        return None
    epochs = series.settings.get(f"nodes.{_update(series)}.with.epochs", "1")
    rate = series.last(name, 1)
    return Evidence(series.steps[0], kl if leapt else "policy/entropy",
                    f"The policy left the model that it was within {len(series.steps)} steps"
                    f"{f' ({now[0]:.2g} nats a token from the reference)' if leapt else ''}",
                    f"the learning rate{f' ({rate[0]:.1g})' if rate else ''} is far above what such a model takes"
                    f"{f', or {epochs} updates of each batch are too many' if epochs != '1' else ''}",
                    f"{_lower_rate(series)}{f' , or  nodes.{_update(series)}.with.epochs=1' if epochs != '1' else ''}",
                    {"kl": now[0] if now else 0.0, "learning_rate": rate[0] if rate else 0.0})


@detector(rows="high")
def advantage_sign(series: Series) -> Evidence | None:
    """Advantages do not follow rewards."""
    name = "advantages/reward_correlation"
    recent = series.last(name, 3)
    paid, given = series.last("reward/std", 3), series.last("advantages/std", 3)
    usual = abs(middle(series.last("advantages/mean", 3)))
    if paid and given and min(paid) > 0.01 and max(given) < 1e-6 and usual > 1e-3:  # all 0 is no signal
        return Evidence(series.since("advantages/std", lambda value: value < 1e-6), "advantages/std",
                        f"All advantages are {middle(series.last('advantages/mean', 3)):.3g}, whatever rows earn",
                        "every completion is reinforced alike: the advantage does not read the rewards",
                        "the node that writes `advantages`: it must return reward minus baseline")
    if not recent or max(recent) > 0.35:
        return None
    turned = middle(recent) < -0.3
    return Evidence(series.since(name, lambda value: value <= 0.35), name,
                    f"Advantages {'go against' if turned else 'do not follow'} the rewards of their rows (correlation "
                    f"{middle(recent):.2f})",
                    "the advantage has the wrong sign, so that what earns less is reinforced" if turned else
                    "rows and advantages are mixed up, or every row gets the same advantage whatever it earns",
                    "the node that writes `advantages`: it must return reward minus baseline, in the order of its rows",
                    {"correlation": middle(recent)})


@detector()
def advantage_scale(series: Series) -> Evidence | None:
    """Advantages are of another size than losses expect, or have no baseline."""
    size, center = series.last("advantages/std", 3), series.last("advantages/mean", 3)
    large = bool(size) and min(size) > 5.0
    biased = bool(size and center) and min(map(abs, center)) > 1.0 and abs(middle(center)) > middle(size)
    if not large and not biased:
        return None
    name = "advantages/std" if large else "advantages/mean"
    return Evidence(series.since(name, lambda value: abs(value) > (5.0 if large else 1.0)), name,
                    f"Advantages have a {'deviation' if large else 'mean'} of {middle(size if large else center):.3g}; "
                    f"losses expect about {'1' if large else '0'}",
                    "the advantage is not divided by the deviation of rewards" if large else
                    "the advantage lacks its baseline: every sample is reinforced",
                    f"nodes.{_update(series)}.with.normalize=batch , or a node `group_advantage`",
                    {"std": middle(size), "mean": middle(center)})


@detector()
def value_head(series: Series) -> Evidence | None:
    """The critic explains less of the returns than a constant would."""
    name = "value/explained"
    recent = series.last(name, 8)
    if not recent or len(series.known(name)) < 12 or middle(recent) > -0.3:
        return None
    return Evidence(series.since(name, lambda value: value < 0), name,
                    f"The critic explains {middle(recent):.2f} of the variance of returns: less than a constant would",
                    "the critic does not learn, or too fast: advantages are noise then",
                    f"roles.critic.learning_rate=1e-5 , and  nodes.{_update(series)}.with.critic_warmup=20  lets it "
                    "learn first",
                    {"explained": middle(recent)})


@detector()
def reference_moves(series: Series) -> Evidence | None:
    """KL to the reference drops to nothing while the policy is trained."""
    name = "policy/kl_reference"
    recent, before = series.last(name, 2), series.before(name, 2, 6, 4)
    if not recent or not before or middle(before) < 0.003 or max(recent) > 0.25 * min(before):
        return None
    return Evidence(series.steps[-2], name,
                    f"KL to the reference dropped from {middle(before):.2g} to {middle(recent):.2g} in one step",
                    "the reference has become the policy: its weights were replaced, or it follows the policy",
                    "roles.reference.follow=null , or a mix below 1", {"before": middle(before), "now": middle(recent)})


# Data


@detector(rows="high", symptom=True)
def held_out_falls(series: Series) -> Evidence | None:
    """Held-out answers become worse while training earns as much."""
    fallen = _held_out_fall(series)
    if fallen is None:
        return None
    name, since, best, now = fallen
    at = next(step for step, value in series.known(name) if value == best)
    earned = [value for step, value in series.known(series.reward) if abs(step - at) < 4]
    if not earned or middle(series.last(series.reward, 4)) < middle(earned) - 0.02:
        return None
    return Evidence(since, name, f"`{name}` fell from {best:.3f} to {now:.3f} while the reward in training did not",
                    "the policy learns what earns in training alone: wrong answers in the training data, a reward that "
                    "can be gamed or pays for the wrong thing, or problems that it knows by heart",
                    "compare the completions with their answers; keep the best with  validation.best=true",
                    {"best": best, "now": now})


@detector()
def duplicated_prompts(series: Series) -> Evidence | None:
    """Many prompts of a step are the same."""
    return _prompts(series, "prompt/repeated", "of a step's prompts are there twice",
                    "the training data repeats itself, so that a step learns from few problems",
                    "distflow validate --prove  names what is there twice; take it out of  data.train")


@detector(rows="high")
def leaking_prompts(series: Series) -> Evidence | None:
    """Prompts hold their answers."""
    return _prompts(series, "prompt/has_answer", "of the prompts hold their own answer",
                    "the answer leaks into the question, so that the policy learns to copy it; nothing is wrong if "
                    "questions offer their answers to choose from, or quote a text",
                    "take the answer out of the questions of  data.train , or  robust.detectors.leaking_prompts=off")


def _prompts(series: Series, name: str, what: str, cause: str, remedy: str) -> Evidence | None:
    recent = series.last(name, 3)
    if not recent or min(recent) < 0.2:
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name, f"{middle(recent):.0%} {what}", cause, remedy,
                    {"share": middle(recent)})


@detector()
def stale_data(series: Series) -> Evidence | None:
    """A step trains on the samples of an earlier one, or the data begins again."""
    name = "response/fingerprint"
    now, earlier = series.last(name, 1), series.known(name)[:-1]
    same = [step for step, value in earlier if now and value == now[0] and value]
    epochs = series.last("epoch", 2)
    back = bool(epochs) and epochs[1] < epochs[0]
    if not same and not back:
        return None
    what = f"The samples of step {series.steps[-1]} are those of step {same[-1]}" if same else \
        f"The data went back from epoch {epochs[0]:.3f} to {epochs[1]:.3f}"
    return Evidence(series.steps[-1], name if same else "epoch", what,
                    "the position in the data or the sampler's seed is that of an earlier step, as after a resume",
                    "distflow resume  restores both; a loop of your own must save the position", {})


@detector(rows="low")
def tool_errors(series: Series) -> Evidence | None:
    """Tools answer with errors, often from the start or more often than before."""
    name = "environment/error_answers"
    start, recent = series.first(name, _FIRST), series.last(name, _RECENT)
    if not start or not recent or middle(recent) < 0.2 or middle(recent) < 0.5 and middle(recent) < 2 * middle(start):
        return None
    earned = middle(series.last(series.reward, _RECENT)) - middle(series.first(series.reward, _FIRST))
    return Evidence(series.since(name, lambda value: value > 0.15), name,
                    f"{middle(recent):.0%} of what the tools answer are errors, at the start {middle(start):.0%}",
                    "the policy has learned to earn by calls that fail" if earned > 0.05 else
                    "the tools fail, or the policy calls them in a form that they do not take",
                    "look at the observations in trajectories/ , and pay nothing for turns that fail",
                    {"errors": middle(recent), "before": middle(start)})


@detector(rows="low")
def tools_avoided(series: Series) -> Evidence | None:
    """Conversations have fewer turns than at the start."""
    name = "environment/turns"
    start, recent = series.first(name, _FIRST), series.last(name, _RECENT)
    if not start or not recent or middle(start) < 1.3 or middle(recent) - 1 > 0.4 * (middle(start) - 1):
        return None
    return Evidence(series.since(name, lambda value: value < middle(start) - 0.2), name,
                    f"Conversations fell from {middle(start):.1f} to {middle(recent):.1f} turns: the policy no longer "
                    "asks its tools",
                    "what the tools answer does not help, as where they fail or answer with errors",
                    "look at the observations in trajectories/", {"before": middle(start), "now": middle(recent)})
