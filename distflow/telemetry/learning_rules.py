"""Rules that detect faults of learning. Thresholds are from recorded runs: `benchmarks/learning_faults.py judge`.

Each compares the last steps with the first ones, or with those just before; medians, so that one odd step is no fault.
"""

from __future__ import annotations

from functools import partial
from operator import lt
from statistics import mean, variance

from distflow.telemetry.learning_series import RULES, Evidence, Series, detector, middle, spread

__all__ = ["RULES", "fall"]

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
                    "distflow check the reward on a few completions of samples.jsonl, and change  "
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
                    "the problems are too easy" if easy else "the policy gives a prompt the same answer again and "
                    "again, or the problems are too hard for it",
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
    """The mean reward, or its deviation, leaps from one step to the next and stays there."""
    for name in (series.reward, "reward/std"):
        recent, before = series.last(name, 3), series.before(name, 3, 10, 6)
        if not recent or not before:
            continue
        noise = max(spread(before), 0.02, 0.1 * abs(middle(before)))
        gap = min(abs(value - middle(before)) for value in recent)
        same = len({value > middle(before) for value in recent}) == 1
        if same and gap > _LEAP * noise:
            return Evidence(series.steps[-3], name, f"`{name}` leapt from {middle(before):.3g} to {middle(recent):.3g}",
                            "a policy does not change so fast: the reward function, its data or its judge is another "
                            "one since then", "look at what changed there (`distflow why` lists events), and at the "
                            "completions below: do they earn what they should?",
                            {"before": middle(before), "now": middle(recent)})
    return None


_LEAP = 4.5


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


_SPLIT, _SURE = 8, 5.0  # fewest steps on each side of a fall, and standard errors that make it one


def fall(values: list[float]) -> int | None:
    """Return the index since which values are lower, where the two sides differ most; None if that may be chance."""
    best, found = _SURE, None
    for at in range(max(_SPLIT, len(values) - 40), len(values) - _SPLIT + 1):
        before, after = values[max(0, at - 5 * _SPLIT) : at], values[at:]
        error = (variance(before) / len(before) + variance(after) / len(after)) ** 0.5
        gap = mean(before) - mean(after)
        if gap > best * error and gap > 0.02 * abs(mean(before)):
            best, found = gap / error if error else float("inf"), at
    return found


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
    """One part of the reward rises while another falls."""
    moved = {}
    for name in series.parts:
        start, recent = series.first(name, 8), series.last(name, 6)
        if start and recent and len(series.known(name)) >= 14:
            usual = series.before(name, 6, 10, 6) or start
            low = min(middle(start), middle(usual))
            moved[name] = (middle(recent) - max(middle(start), middle(usual)) if middle(recent) < middle(usual) else
                           middle(recent) - low, max(spread(start), 0.03))
    up = [name for name, (shift, noise) in moved.items() if shift > 3 * noise and shift > 0.1]
    down = [name for name, (shift, noise) in moved.items() if shift < -2.5 * noise and shift < -0.1]
    if not up or not down:
        return None
    winner, loser = (name.removeprefix("reward/") for name in (up[0], down[0]))
    begin = middle(series.first(up[0], 8))
    return Evidence(series.since(up[0], lambda value: value > begin + 0.05), up[0],
                    f"Part `{winner}` of the reward rises while part `{loser}` falls",
                    f"reward hacking: `{winner}` can be earned without `{loser}`, which the policy gives up for it",
                    f"a smaller weight of `{winner}`:  nodes.reward.with.reward.{winner}=0.1  , or pay it only for "
                    "completions that are right", {up[0]: moved[up[0]][0], down[0]: moved[down[0]][0]})


@detector(rows="long")
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
    name = "policy/clip_ratio"
    recent = series.last(name, _RECENT)
    if not recent or middle(recent) < 0.25:
        return None
    return Evidence(series.since(name, lambda value: value > 0.15), name,
                    f"The bound of the loss is active on {middle(recent):.0%} of the tokens, which then teach nothing",
                    "the policy moves far within one batch: too many updates of it, or too large ones",
                    f"nodes.{_update(series)}.with.epochs=1 , or  {_lower_rate(series)}", {"clipped": middle(recent)})


@detector()
def mismatch(series: Series) -> Evidence | None:
    """Trainer and rollout disagree about the probability of the same tokens."""
    name, late = "mismatch/logprob_mean", "mismatch/logprob_late"
    recent = series.last(name, 3)
    if not recent or min(recent) < 0.05 or max(series.last("staleness/max", 3) or [0.0]) > 0:
        return None
    start, tail = series.before(name, 3, 10, 5), middle(series.last(late, 3))
    grows = tail > 1.3 * middle(recent)
    return Evidence(series.since(name, lambda value: value > 0.05), name,
                    f"Trainer and rollout differ by {middle(recent):.2g} nats a token"
                    f"{f', before by {middle(start):.2g}' if start else ''}{', most late in a row' if grows else ''}",
                    "the engine that samples does not hold the weights that are trained, or computes them otherwise "
                    "(precision, kernels, positions)",
                    f"roles.{_role(series)}.rollout=hf  shows whether it is the engine; until then a node "
                    "`truncated_importance` corrects for it", {"mean": middle(recent), "late": tail})


# Updates


@detector()
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
    """The learning rate is so small that nothing changes."""
    name = "learning_rate"
    rates, moved = series.last(name, 8), series.last("policy/kl_reference", 8)
    if not rates or max(rates) > 1e-8 and not (moved and max(moved) < 1e-7 and max(rates) > 0):
        return None
    key = f"roles.{_role(series)}.learning_rate"
    return Evidence(series.steps[-8], name, f"The policy does not move: the learning rate is {max(rates):.1g}",
                    "the learning rate is far below what models of any size take (1e-7 to 1e-5, adapters 1e-5 to 1e-4)",
                    f"{key}=1e-6", {"learning_rate": max(rates)})


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
                    "roles.critic.learning_rate=1e-5 , and  nodes.update.with.critic_warmup=20  lets it learn first",
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
    """Held-out answers become worse while training earns more."""
    for name in series.names("validation/") or [key for key in ("validation/heldout",) if series.known(key)]:
        known = series.known(name)
        if len(known) < 3:
            continue
        best = max(known[:-2], key=lambda pair: pair[1])
        if best[1] < 0.1 or max(value for _, value in known[-2:]) > 0.75 * best[1]:
            continue
        earned = [value for step, value in series.known(series.reward) if abs(step - best[0]) < 4]
        if earned and middle(series.last(series.reward, 4)) >= middle(earned) - 0.02:
            return Evidence(known[-2][0], name, f"`{name}` fell from {best[1]:.3f} to {known[-1][1]:.3f} while the "
                            "reward in training did not",
                            "the policy learns what earns in training alone: wrong answers in the training data, a "
                            "reward that can be gamed, or problems that it knows by heart",
                            "compare the completions with their answers; keep the best with  validation.best=true",
                            {"best": best[1], "now": known[-1][1]})
    return None


@detector()
def duplicated_prompts(series: Series) -> Evidence | None:
    """Many prompts of a step are the same."""
    name = "prompt/repeated"
    recent = series.last(name, 3)
    if not recent or min(recent) < 0.2:
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"{middle(recent):.0%} of a step's prompts are there twice",
                    "the training data repeats itself, so that a step learns from few problems",
                    "distflow validate --prove  names what is there twice; take it out of  data.train",
                    {"share": middle(recent)})


@detector(rows="high")
def leaking_prompts(series: Series) -> Evidence | None:
    """Prompts hold their answers."""
    name = "prompt/has_answer"
    recent = series.last(name, 3)
    if not recent or min(recent) < 0.2:
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"{middle(recent):.0%} of the prompts hold their own answer",
                    "the answer leaks into the question, so that the policy learns to copy it",
                    "take the answer out of the questions of  data.train", {"share": middle(recent)})


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
