"""Rules that detect faults of rewards, of data and of tools."""

from __future__ import annotations

from collections.abc import Sequence

from distflow.telemetry.learning_series import (
    FIRST,
    RECENT,
    Evidence,
    Origin,
    Series,
    detector,
    fall,
    mean,
    middle,
    spread,
    variance,
)

# Rewards


@detector(rows="low", origin=Origin.REWARD)
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


@detector(rows="high", origin=Origin.POLICY)
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


@detector(rows="low", symptom=True, origin=Origin.POLICY)
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
    if value > 0.5 * most > 0 and (right := middle(series.last("response/has_answer", 8))) < 0.6 * value / most:
        return (f"the reward pays for something else than right answers, of which there are {right:.0%}", paid)
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
                f"too hard{series.own_form}",
                f"{paid} , or take easier data")
    if max(series.last("reward/std", RECENT) or [1.0]) <= 1e-9:
        return "the reward function pays the same for every completion: an error in it is taken for a verdict", paid
    return ("the policy gives a prompt the same answer again and again: too low a temperature, or too little entropy",
            f"{generation}.temperature=1.0, a larger group_size, or easier data")


@detector(rows="low", symptom=True, origin=Origin.REWARD)
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


@detector(rows="low", symptom=True, origin=Origin.OUTCOME)
def reward_fell(series: Series) -> Evidence | None:
    """The mean reward, or what else training improves, is worse than before, by more than chance."""
    name, sign = series.goal
    values = series.known(name)
    at = fall([sign * value for _, value in values])
    if at is None or name == "loss" and "supervised_update" not in series.functions:  # others are near 0
        return None
    before, after = (mean(value for _, value in part) for part in (values[:at][-40:], values[at:]))
    what = "The reward fell" if name == series.reward else f"`{name}` got worse:"
    return Evidence(values[at][0], name, f"{what} from {before:.3f} to {after:.3f}",
                    "the policy became worse, or the reward or the data harder" if name == series.reward else
                    "each update is too large (the learning rate), or the data contradicts itself, or is another since "
                    "then", f"go on from a checkpoint before it with  {series.lower_rate}",
                    {"before": before, "after": after})


@detector(rows="high", origin=Origin.REWARD)
def reward_hacking(series: Series) -> Evidence | None:
    """The reward, or one part of it, rises while another part, right answers, or what held-out ones earn, fall."""
    right, parts = "response/has_answer", series.parts if len(series.parts) > 1 else []
    moved = {name: moves for name in (*parts, right, series.reward) if (moves := _moves(series, name)) is not None}
    up = [name for name, (shift, errors) in moved.items() if errors > 4 and shift > 0.1 and name != right]
    down = [name for name, (shift, errors) in moved.items()
            if errors < -2.2 and shift < -0.05 and (name in parts or up and name == right)]
    fallen = _held_out_fall(series) if parts else None
    if not up or not (down or fallen):
        return None
    winner = max(up, key=lambda name: (name in parts, moved[name][1]))
    loser = min(down, key=lambda name: moved[name][1]) if down else fallen[0] if fallen else ""
    told = "the share of right answers" if loser == right else \
        f"part `{loser.removeprefix('reward/')}`" if loser in parts else f"`{loser}`"
    part, begin = winner.removeprefix("reward/"), middle(series.first(winner, 8))
    what = f"Part `{part}` of the reward" if winner in parts else "The reward"
    return Evidence(series.since(winner, lambda value: value > begin + 0.05), winner,
                    f"{what} rises while {told} falls",
                    f"reward hacking: `{part}` can be earned without the other, which the policy gives up for it",
                    f"a smaller weight of `{part}`:  nodes.reward.with.reward.{part}=0.1  , or pay it only for "
                    "completions that are right" if winner in parts else
                    "a reward that pays for right answers alone: look at what earns most below",
                    {winner: moved[winner][0]})


@detector(rows="low", origin=Origin.REWARD)
def idle_part(series: Series) -> Evidence | None:
    """A part of the reward fines every completion, or its form is never met."""
    for name in series.parts if len(series.parts) > 1 else ():
        known = [value for _, value in series.known(name)]
        never = name == "reward/format" and max(known) < 0.02
        if len(known) < 8 or max(known) - min(known) > 0.02 or not (max(known) < -0.5 or never):
            continue
        part = name.removeprefix("reward/")
        key, value = series.setting(f"nodes.*.with.reward.{part}*")
        return Evidence(series.steps[0], name,
                        f"Part `{part}` of the reward is {middle(known):.2g} for every completion",
                        "nothing that the model writes meets what it asks for"
                        f"{f' ({key}={value})' if value else ''}: it teaches nothing, and drowns the other parts where "
                        "its weight is large", f"another target or pattern of `{part}`, or a smaller weight", {})
    return None


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
    """Return the validation that has become worse, the step of its best mean, this mean, and the last one."""
    for name in series.known_names("validation/"):
        known = series.known(name)
        at, best = max(known[:-2], key=lambda pair: pair[1], default=(0, 0.0))
        if best >= 0.1 and max(value for _, value in known[-2:]) <= 0.75 * best:
            return name, at, best, known[-1][1]
    return None


@detector(rows="long", symptom=True, origin=Origin.REWARD)
def length_hacking(series: Series) -> Evidence | None:
    """Rewards follow lengths, and lengths grow."""
    name, length = "reward/length_correlation", "response/length"
    recent, start, now = series.last(name, RECENT), series.first(length, FIRST), series.last(length, RECENT)
    if recent and start and middle(recent) < -0.65 and middle(now) < 0.75 * middle(start):
        return Evidence(series.since(name, lambda value: value < -0.4), length,
                        f"Shorter completions earn more (correlation {middle(recent):.2f}), and completions shrink: "
                        f"{middle(start):.0f} → {middle(now):.0f} tokens",
                        "the reward, or a penalty of length, pays for few tokens more than for what is right",
                        "a smaller weight of the length, or a larger  max_length  of `overlong_penalty`",
                        {"correlation": middle(recent), "length": middle(now)})
    if not recent or not start or middle(recent) < 0.65 or middle(now) < 1.4 * middle(start):
        return None
    return Evidence(series.since(name, lambda value: value > 0.4), length,
                    f"Longer completions earn more (correlation {middle(recent):.2f}), and completions grow: "
                    f"{middle(start):.0f} → {middle(now):.0f} tokens",
                    "length hacking: the reward pays for length, or a loss that averages over tokens favours it",
                    "add a cost of length, as  nodes.reward.with.reward={math: 1.0, length: {weight: 0.2, target: "
                    f"{middle(start):.0f}}}}}", {"correlation": middle(recent), "length": middle(now)})


# Data and tools


@detector(rows="high", symptom=True, origin=Origin.REWARD)
def held_out_falls(series: Series) -> Evidence | None:
    """Held-out answers become worse while training does as well as before."""
    fallen = _held_out_fall(series)
    if fallen is None:
        return None
    name, at, best, now = fallen
    goal, sign = series.goal
    if goal != series.reward and now > 0.5 * best:  # imitation of any kind moves held-out answers to and fro
        return None
    then = [sign * value for step, value in series.known(goal) if abs(step - at) < 4]
    recent = [sign * value for value in series.last(goal, 4)]
    if not then or not recent or middle(recent) < middle(then) - 0.02:
        return None
    return Evidence(at + 1, name, f"`{name}` fell from {best:.3f} to {now:.3f} while `{goal}` in training did not get "
                    "worse", _why_held_out_falls(series, goal),
                    "compare the completions with their answers; keep the best with  validation.best=true",
                    {"best": best, "now": now})


def _why_held_out_falls(series: Series, goal: str) -> str:
    """Return the probable cause of held-out answers that become worse."""
    if goal.startswith("preference/"):
        return ("the pairs prefer what is wrong: `chosen` and `rejected` are swapped, or the labels are noise; or both "
                "answers become unlikely (the learning rate, a small `beta`)")
    if any("distillation" in name for name in series.functions):
        return ("the teacher is worse than its student at these problems, or shows it too little: another model than "
                "meant, another prompt form, a small `k`")
    if goal == "loss":
        return ("the answers that are learnt are wrong, of other questions, cut off, or of another form than held-out "
                "ones are judged by; or the model learns them by heart (the learning rate, too many epochs)")
    least, most = (pick((each for _, each in series.known(f"reward/{end}")), default=1.0)
                   for end, pick in (("min", min), ("max", max)))
    if most <= 0:
        return "the training reward has the wrong sign: nothing has ever earned more than 0"
    if part := series.deciding_part:
        return f"right answers hardly count in the training reward{part}: give it a smaller weight"
    if least < 0 and middle(series.last("reward/std", 8)) < 0.8 * middle(series.first("reward/std", 8)):
        return (f"a wrong answer costs {-least:g} and none costs nothing: on problems that it may get wrong, no answer "
                "earns more, and the policy stops answering. Pay wrong and missing answers alike")
    if (alike := middle(series.first("prompt/same_answer", 8))) > 0.5:
        return f"{alike:.0%} of a step's prompts have the same answer, which the policy gives to everything"
    return ("the policy learns what earns in training alone: wrong answers in the training data, mostly the same "
            "answer there, a reward that can be gamed or pays for the wrong thing, or problems that it knows by heart")


@detector(origin=Origin.DATA)
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


@detector(origin=Origin.DATA)
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


@detector(rows="low", origin=Origin.REWARD)
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


@detector(rows="low", origin=Origin.REWARD)
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
