"""Rules that detect faults of rewards, of data and of tools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import lt

from distflow.telemetry.learning_series import (
    FIRST,
    RECENT,
    Evidence,
    Series,
    detector,
    fall,
    mean,
    middle,
    spread,
    variance,
)

# Rewards


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
    key = f"roles.{series.trained_role}.generation.stop"
    stops = series.settings.get(key, "[]")
    return Evidence(series.since(name, lambda each: each >= 0.4), name,
                    f"The reward finds no final answer in {middle(recent):.0%} of the completions"
                    f"{f', before in {middle(before):.0%}' if jumped else ''}",
                    f"completions end before their answer, at a text of `stop` ({stops})" if stops != "[]" else
                    "a parser's failure: completions do not have the form that the reward reads, as `#### 42` or "
                    "`\\boxed{42}`, or it reads another one than the prompt asks for",
                    f"{key}=[]" if stops != "[]" else
                    "ask for the form in the question, or read what models write:  nodes.reward.with.reward="
                    "{math: {strict: false}}", {"unanswered": middle(recent)})


@detector(rows="high")
def duplicated_samples(series: Series) -> Evidence | None:
    """The samples of a prompt are copies of each other, though the policy is not certain."""
    name = "response/alike"
    recent, entropy = series.last(name, 3), series.last("policy/entropy", 3)
    if not series.copied or not entropy or middle(entropy) < 0.02:
        return None
    return Evidence(series.since(name, lambda share: share > 0.4), name,
                    f"{middle(recent):.0%} of the completions are copies of another one to their prompt, at an entropy "
                    f"of {middle(entropy):.2g} nats a token",
                    f"{'sampling is narrowed, or ' if series.narrowed else ''}the samples of a prompt have one seed, "
                    "or rows are copied: a policy that is as uncertain as this one gives different answers",
                    f"{series.narrowed or 'the seed of the sampler'} , or the node that writes `responses`",
                    {"alike": middle(recent), "entropy": middle(entropy)})


@detector(rows="low", symptom=True)
def no_signal(series: Series) -> Evidence | None:
    """In nearly all groups all samples earn the same, or all samples of the last steps do."""
    kind = series.reward.partition("/")[0]
    name, std = f"{kind}/zero_std_groups", "reward/std" if kind == "reward" else f"{kind}/reward_std"
    recent, same = series.last(name, 8), max(series.last(std, RECENT) or [1.0]) <= 1e-9
    if not same and (not recent or middle(recent) < 0.85 or series.group_sizes == [1]):  # those have another baseline
        return None
    value = middle(series.last(series.reward, RECENT if same else 8))
    cause, remedy = _why_no_signal(series, value, recent)
    parts = ", ".join(f"`{each.removeprefix('reward/')}`" for each in series.parts)
    return Evidence(series.since(std, lambda each: each <= 1e-9) if same else
                    series.since(name, lambda each: each >= 0.7), series.reward if same else name,
                    f"Every completion earns {value:.3g} ({parts or 'reward'}), so that nothing is learnt" if same else
                    f"In {middle(recent):.0%} of the groups all samples earn the same, and teach nothing",
                    cause, remedy, {"share": 1.0 if same else middle(recent), "reward": value})


def _why_no_signal(series: Series, value: float, silent: Sequence[float]) -> tuple[str, str]:
    """Return the probable cause of equal rewards, and what to change."""
    generation, reward = f"roles.{series.trained_role}.generation", "nodes.reward.with.reward"
    least, most = (pick([each for _, each in series.known(f"reward/{name}")] or [value])
                   for name, pick in (("min", min), ("max", max)))
    paid = "try the reward on a few completions of samples.jsonl, and change  " + reward
    if series.copied and series.narrowed:
        return "a prompt gets the same answer again and again, since sampling is narrowed", series.narrowed
    if least < 0 >= most:
        return ("no completion has ever earned more than 0: a weight has the wrong sign, or all parts are penalties",
                f"{reward}: a weight above 0 for what is right")
    if value > 0.9 * most > 0 and value > 0.9:
        return ("the problems are too easy",
                "data of another difficulty, or a node `informative_groups` as dapo.yaml has it")
    if silent and min(silent) == 1 and most > least and max(series.last("reward/std", 8) or [0.0]) > 0 and \
            series.known("response/alike") and not series.copied:
        return ("the reward does not depend on the completion: it reads the prompt or the record in its place, or one "
                "verdict is kept for all samples of a prompt", paid)
    if series.worse_than_held_out:
        return series.worse_than_held_out
    if value < 0.1:
        return ("hardly any completion earns anything: the reward does not find what it looks for, the reference "
                "answers are wrong, the prompts have another form (template) than the model knows, or the problems are "
                "too hard",
                f"{paid} , or take easier data")
    if max(series.last("reward/std", RECENT) or [1.0]) <= 1e-9:
        return "the reward function pays the same for every completion: an error in it is taken for a verdict", paid
    return ("the policy gives a prompt the same answer again and again: too low a temperature, or too little entropy",
            f"{generation}.temperature=1.0, a larger group_size, or easier data")


@detector(rows="high")
def reward_noise(series: Series) -> Evidence | None:
    """The same completion of a prompt earns now this, now that."""
    name = "reward/inconsistent"
    recent = series.last(name, RECENT)
    if not recent or middle(recent) < 0.25:
        return None
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"{middle(recent):.0%} of the completions that equal another one to their prompt earn something "
                    "else", "the reward is noise: a judge that contradicts itself, a sandbox that fails now and then, "
                    "verdicts kept for other completions, or rewards of other rows",
                    "score one completion several times; a judge wants  temperature 0 , or "
                    "several verdicts", {"inconsistent": middle(recent)})


@detector(rows="low", symptom=True)
def reward_changed(series: Series) -> Evidence | None:
    """The mean reward, or its deviation, leaps within a few steps and stays there."""
    for name in (series.reward, "reward/std"):
        recent, before = series.last(name, RECENT), series.before(name, RECENT, 10, 6)
        if not recent or not before or max(series.last("reward/std", 3) or [1.0]) <= 1e-9:  # which `no_signal` says
            continue
        old, noise = middle(before), max(spread(before), variance(before) ** 0.5, 0.02, 0.1 * abs(middle(before)))
        gaps = [abs(value - old) / noise for value in recent]
        same = len({value > old for value in recent}) == 1
        leapt = min(gaps[-3:]) > _LEAP or mean(gaps) > _LEAP_OF_MEAN and min(gaps) > _LEAST or \
            min(gaps) > _LEAST and _pays_more(series)
        if same and leapt:
            return Evidence(series.steps[-RECENT if min(gaps) > _LEAST else -3], name,
                            f"`{name}` leapt from {old:.3g} to {middle(recent):.3g}",
                            "a policy does not change so fast: the reward function, its data or its judge is another "
                            "one since then", "look at what changed there (`distflow why` lists events), and at the "
                            "completions below: do they earn what they should?",
                            {"before": old, "now": middle(recent)})
    return None


_LEAP, _LEAP_OF_MEAN, _LEAST = 4.5, 3.2, 1.5  # standard deviations


def _pays_more(series: Series) -> bool:
    """Return whether more is paid now than the most that was paid before, which was the same in all steps."""
    recent, before = series.last("reward/max", RECENT), series.before("reward/max", RECENT, 10, 6)
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
                    f"go on from a checkpoint before it with  {series.lower_rate}",
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
    recent, start, now = series.last(name, RECENT), series.first(length, FIRST), series.last(length, RECENT)
    if not recent or not start or middle(recent) < 0.65 or middle(now) < 1.4 * middle(start):
        return None
    return Evidence(series.since(name, lambda value: value > 0.4), length,
                    f"Longer completions earn more (correlation {middle(recent):.2f}), and completions grow: "
                    f"{middle(start):.0f} → {middle(now):.0f} tokens",
                    "length hacking: the reward pays for length, or a loss that averages over tokens favours it",
                    "add a cost of length, as  nodes.reward.with.reward={math: 1.0, length: {weight: 0.2, target: "
                    f"{middle(start):.0f}}}}}", {"correlation": middle(recent), "length": middle(now)})


# Data and tools


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
                    "the training reward has the wrong sign: nothing has ever earned more than 0"
                    if max((each for _, each in series.known("reward/max")), default=1.0) <= 0 else
                    "the policy learns what earns in training alone: wrong answers in the training data, a reward that "
                    "can be gamed or pays for the wrong thing, or problems that it knows by heart",
                    "compare the completions with their answers; keep the best with  validation.best=true",
                    {"best": best, "now": now})


@detector()
def data_repeats(series: Series) -> Evidence | None:
    """The same few records come again and again."""
    name = "epoch"
    known = series.known(name)
    if len(known) < 8 or known[-1][1] < 8 or known[-1][1] - known[-8][1] < 2:
        return None
    return Evidence(known[0][0], name, f"Each record has been trained {known[-1][1]:.0f} times in {known[-1][0]} steps",
                    "the data has few records for its batch: the policy learns them by heart",
                    "more records in  data.train , or a smaller  data.batch ; held-out answers tell whether it harms",
                    {"epoch": known[-1][1]})


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
    start, recent = series.first(name, FIRST), series.last(name, RECENT)
    if not start or not recent or middle(recent) < 0.2 or middle(recent) < 0.5 and middle(recent) < 2 * middle(start):
        return None
    earned = middle(series.last(series.reward, RECENT)) - middle(series.first(series.reward, FIRST))
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
    start, recent = series.first(name, FIRST), series.last(name, RECENT)
    if not start or not recent or middle(start) < 1.3 or middle(recent) - 1 > 0.4 * (middle(start) - 1):
        return None
    return Evidence(series.since(name, lambda value: value < middle(start) - 0.2), name,
                    f"Conversations fell from {middle(start):.1f} to {middle(recent):.1f} turns: the policy no longer "
                    "asks its tools",
                    "what the tools answer does not help, as where they fail or answer with errors",
                    "look at the observations in trajectories/", {"before": middle(start), "now": middle(recent)})
