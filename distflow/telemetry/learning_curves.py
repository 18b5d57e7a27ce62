"""Rules that compare curves: of losses, gradients, rates and rewards, of the parts of a reward, of held-out answers."""

from __future__ import annotations

from distflow.telemetry.learning_series import (
    RECENT,
    SPIKE_WINDOW,
    Evidence,
    Origin,
    Series,
    add_rule,
    detector,
    fall,
    mean,
    middle,
    spike,
    spread,
    variance,
)


@detector(symptom=True, origin=Origin.OUTCOME)
def loss_spike(series: Series) -> Evidence | None:
    """A loss or a gradient norm leaps, or is no number."""
    for name in series.matching("*"):
        if name.rpartition("/")[2] not in ("loss", "grad_norm"):
            continue
        known = series.known(name)
        now, before = known[-1][1], [value for _, value in known[-SPIKE_WINDOW - 1 : -1]]
        if what := spike(name, before, now):
            return Evidence(series.steps[-1], name, what,
                            "one batch differs from all others: a reward or an advantage of another scale, a very long "
                            "row, or a number that is nearly infinite", "look at the samples of that step;  "
                            f"roles.{series.trained_role}.max_grad_norm=1.0  bounds what it does, and  "
                            "robust.detectors.loss_spike=restart  repeats the step", {"now": now})
    return None


@detector(rows="low", symptom=True, origin=Origin.REWARD)
def reward_changed(series: Series) -> Evidence | None:
    """The mean reward, or its deviation, leaps within a few steps and stays there."""
    for name in (series.reward, "reward/std"):
        recent, before = series.last(name, RECENT), series.before(name, RECENT, 10, 6)
        if not recent or not before or max(series.last("reward/std", 3) or [1.0]) <= 1e-9:  # which `no_signal` says
            continue
        old, noise = middle(before), max(spread(before), variance(before) ** 0.5, 0.02, 0.1 * abs(middle(before)))
        gaps = [abs(value - old) / noise for value in recent]
        same = len({value > old for value in recent}) == 1 and not series.policy_leapt and not _follows_answers(series)
        leapt = min(gaps[-3:]) > _LEAP or mean(gaps) > _LEAP_OF_MEAN and min(gaps) > _LEAST
        if same and leapt:
            return Evidence(series.steps[-RECENT if min(gaps) > _LEAST else -3], name,
                            f"`{name}` leapt from {old:.3g} to {middle(recent):.3g}",
                            "a policy does not change so fast: the reward function, its data or its judge is another "
                            "one since then", "look at what changed there (`distflow why` lists events), and at the "
                            "completions below: do they earn what they should?",
                            {"before": old, "now": middle(recent)})
    return None


def _follows_answers(series: Series) -> bool:
    """Whether more, or less, is earned as more, or fewer, answers are right: the reward is as it was."""
    right, earned = (series.recent(name, RECENT) - middle(series.before(name, RECENT, 10, 6))
                     for name in ("response/has_answer", series.reward))
    return 0 < earned * right < 1.25 * right * right


_LEAP, _LEAP_OF_MEAN, _LEAST = 4.5, 3.2, 1.5  # standard deviations


@detector(rows="low", symptom=True, origin=Origin.OUTCOME)
def reward_fell(series: Series) -> Evidence | None:
    """The mean reward, or what else training improves, is worse than before, by more than chance."""
    name, sign = series.goal
    values = series.known(name)
    at = fall([sign * value for _, value in values])
    if at is None or name == "loss" and "supervised_update" not in series.functions:  # others are near 0
        return None
    before, after = (mean(value for _, value in part) for part in (values[:at][-40:], values[at:]))
    if "distillation" in name and after < 1.5 * before:  # the student's own samples change with it
        return None
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


def _held_out_unlike(series: Series) -> Evidence | None:
    """Return that held-out answers are far fewer than those of training from the first step on."""
    right = series.start("response/has_answer")
    for name in series.known_names("validation_high/"):
        first = series.known(name)[0][1]
        if right > max(0.2, 3 * first) and not series.known("environment/turns") and \
                series.settings.get("validation.reward", "math") == "math":
            return Evidence(series.steps[0], name.replace("_high", ""), f"At first {right:.0%} of the completions in "
                            f"training are right, and of the held-out ones {first:.0%} at most",
                            "the held-out answers are wrong, as those of other questions, or have another form",
                            "records of  validation.data , and its fields  data.question, data.answer",
                            {"right": right})
    return None


add_rule("held_out_falls", _held_out_unlike, rows="high", origin=Origin.DATA)


def _held_out_fall(series: Series) -> tuple[str, int, int, float, float] | None:
    """Return the validation that has become worse, the steps at which it was best and last as good, its best mean, and
    the last one."""
    for name in series.known_names("validation/"):
        known = series.known(name)
        at, best = max(known[:-2], key=lambda pair: pair[1], default=(0, 0.0))
        if best >= 0.1 and max(value for _, value in known[-2:]) <= 0.75 * best:
            return name, at, max((step for step, value in known if value > 0.75 * best), default=at), best, known[-1][1]
    return None


@detector(rows="high", symptom=True, origin=Origin.REWARD)
def held_out_falls(series: Series) -> Evidence | None:
    """Held-out answers become worse while training does as well as before."""
    fallen = _held_out_fall(series)
    if fallen is None:
        return None
    name, at, good, best, now = fallen
    goal, sign = series.goal
    if goal != series.reward and now > 0.5 * best:  # imitation of any kind moves held-out answers to and fro
        return None
    then = [sign * value for step, value in series.known(goal) if abs(step - at) < 4]
    recent = [sign * value for value in series.last(goal, 4)]
    if not then or not recent or middle(recent) < middle(then) - 0.02:
        return None
    return Evidence(good + 1, name, f"`{name}` fell from {best:.3f} to {now:.3f} while `{goal}` in training did not "
                    "get worse", _WHY_HELD_OUT.get(goal.partition("/")[0], _WHY_HELD_OUT["reward"]),
                    "compare the completions with their answers; keep the best with  validation.best=true",
                    {"best": best, "now": now})


_WHY_HELD_OUT = {
    "preference": "the pairs prefer what is wrong: `chosen` and `rejected` are swapped, or the labels are noise; or "
                  "both answers become unlikely (the learning rate, a small `beta`)",
    "distillation": "the teacher is worse than its student at these problems, or shows it too little: another model "
                    "than meant, another prompt form, a small `k`",
    "loss": "the answers that are learnt are wrong or of other questions; or cut off; or of another form than held-out "
            "ones; or learnt by heart",
    "reward": "the training reward pays for something else than held-out answers: it can be gamed; or the training "
              "problems are unlike the held-out ones; or known by heart; or their reference answers are wrong",
}


@detector(origin=Origin.DATA)
def stale_data(series: Series) -> Evidence | None:
    """A step trains on the samples of an earlier one."""
    name = "response/fingerprint"
    now, earlier = series.last(name, 1), series.known(name)[:-1]
    same = [step for step, value in earlier if now and value == now[0] and value]
    if not same:
        return None
    return Evidence(series.steps[-1], name, f"The samples of step {series.steps[-1]} are those of step {same[-1]}",
                    "the position in the data or the sampler's seed is that of an earlier step, as after a resume",
                    "distflow resume  restores both; a loop of your own must save the position", {})


