"""Rules that detect faults of the policy, its advantages and its updates."""

from __future__ import annotations

from distflow.telemetry.learning_series import (
    FIRST,
    RECENT,
    SPIKE_WINDOW,
    Evidence,
    Origin,
    Series,
    detector,
    middle,
    spike,
)

# The policy


@detector(rows="low", symptom=True, origin=Origin.POLICY)
def entropy_collapse(series: Series) -> Evidence | None:
    """The policy becomes certain of what earns no more than before."""
    name, signal = "policy/entropy", "reward/zero_std_groups"
    start, recent = series.first(name, FIRST), series.last(name, RECENT)
    if not start or not recent or len(series.known(name)) < 2 * FIRST or middle(start) < 0.02 or \
            not series.known(series.reward):
        return None
    left = middle(recent) / middle(start)
    earned = series.earned
    silent = middle(series.last(signal, RECENT)) - middle(series.first(signal, FIRST))
    if not (left < 0.1 or left < 0.35 and earned < 0.05 or left < 0.65 and silent > 0.2 and earned < 0.0):
        return None
    bound = middle(start) * 0.8
    return Evidence(series.since(name, lambda value: value < bound), name,
                    f"Entropy collapsed from {middle(start):.3g} to {middle(recent):.3g} nats, and the reward moved by "
                    f"{earned:+.2f}",
                    "the policy settles on a few answers before it has found better ones: each update is too large, or "
                    "only what is already likely is reinforced",
                    f"nodes.{series.update_node}.with.clip_high=0.28  or  entropy=0.001  there, or  "
                    f"{series.lower_rate}", {"before": middle(start), "now": middle(recent), "reward": earned})


@detector(symptom=True, origin=Origin.POLICY)
def entropy_explosion(series: Series) -> Evidence | None:
    """The policy becomes random."""
    name = "policy/entropy"
    start, recent, earned = series.first(name, 3), series.last(name, series.window), series.earned
    grown = middle(recent) - middle(start) if start and recent else 0.0
    bonus = series.settings.get(f"nodes.{series.update_node}.with.entropy", "")
    paid = bonus not in ("", "0", "0.0")
    costs = earned < -0.05 or paid and earned < 0.05
    if not (grown > max(3.0 * middle(start), 0.3) or grown > max(1.4 * middle(start), 0.1) and costs):
        return None
    return Evidence(series.since(name, lambda value: value > 1.3 * middle(start)), name,
                    f"Entropy rose from {middle(start):.3g} to {middle(recent):.3g} nats: completions become random",
                    f"the entropy bonus ({bonus}) outweighs the reward" if paid else
                    "updates make likely tokens unlikely faster than they find better ones: the rate is too high, or "
                    "most advantages are negative",
                    f"nodes.{series.update_node}.with.entropy=0" if paid else series.lower_rate,
                    {"before": middle(start), "now": middle(recent)})


@detector(rows="long", symptom=True, origin=Origin.POLICY)
def truncation(series: Series) -> Evidence | None:
    """Many completions are cut off."""
    name = "response/truncated"
    start, recent = series.first(name, 3), series.last(name, series.window)
    cut = middle(recent) if recent and series.known(series.reward) else 0.0
    if cut <= 0.5 and cut - middle(start) <= 0.25 or not cut:
        return None
    key, ends = f"roles.{series.trained_role}.generation.max_new_tokens", min(series.first(name, FIRST) or [0.0]) < 0.95
    whole = series.setting("nodes.*.with.max_tokens")[0] if series.known("environment/turns") else ""
    key = whole if series.number(whole, 1e9) < series.number(key, 1e9) else key  # of a conversation, all its turns
    most, worse = int(series.number(key, 0.0)), series.worse_than_held_out
    more = f"{key}={2 * most}" if most else f"a larger {key}"
    return Evidence(series.since(name, lambda value: value > 0.25), name,
                    f"{cut:.0%} of the completions are cut off at the limit of tokens",
                    worse[0] if worse else
                    "completions do not come to an end: the limit is too short for the task, or the policy earns by "
                    "going on" if ends else
                    "completions have not ended from the start: the model does not know this prompt's form, or ends "
                    "with another token than the sampler waits for; or the limit is too short",
                    worse[1] if worse else f"{more} , or a node `overlong_penalty` as dapo.yaml has it",
                    {"truncated": cut})


@detector(rows="long", symptom=True, origin=Origin.POLICY)
def repetition(series: Series) -> Evidence | None:
    """Completions repeat themselves."""
    name = "response/repetition"
    start, recent = series.first(name, FIRST), series.last(name, RECENT)
    if not start or not recent or middle(recent) < max(0.1, 3 * middle(start)) or not series.known(series.reward):
        return None
    bound = max(0.05, 2 * middle(start))
    return Evidence(series.since(name, lambda value: value > bound), name,
                    f"{middle(recent):.0%} of the runs of four tokens in a completion were in it before",
                    "the policy goes round in circles: what repeats earns, or the policy has left the language that it "
                    "knew",
                    f"nodes.{series.update_node}.with.kl=0.01 , and a reward that does not pay for what repeats",
                    {"repetition": middle(recent)})


@detector(symptom=True, origin=Origin.POLICY)
def kl_runs_off(series: Series) -> Evidence | None:
    """The policy is far from the reference and moves on."""
    name = "policy/kl_reference"
    recent, before = series.last(name, RECENT), series.before(name, RECENT, 8, 4)
    if not recent or not before or middle(recent) < 0.3 or middle(recent) < 1.5 * middle(before):
        return None
    if middle(recent) < 1.0 and series.earned > 0.1:
        return None
    node = series.update_node
    return Evidence(series.since(name, lambda value: value > 0.1), name,
                    f"KL to the reference runs off: {middle(before):.3g} → {middle(recent):.3g} nats a token",
                    "updates are too large for the model, or the KL term too weak to hold it, or of the wrong sign",
                    f"{series.lower_rate} , or  nodes.{node}.with.kl=0.01", {"kl": middle(recent)})


@detector(symptom=True)
def ratio_clipped(series: Series) -> Evidence | None:
    """The loss's bound is active on many tokens."""
    name, node = "policy/clip_ratio", series.update_node
    recent, bounded = series.last(name, 8), series.settings.get(f"nodes.{node}.with.loss", "ppo")
    low, high = (series.number(f"nodes.{node}.with.{key}", 0.2) for key in ("clip", "clip_high"))
    tight = high < low / 2 and middle(series.last(f"{name}_high", 8)) > 0.02
    if not recent or bounded not in ("ppo", "reinforce") or middle(recent) < 0.15 and not tight:  # others bound most
        return None
    return Evidence(series.since(name, lambda value: value > (0.02 if tight else 0.1)), name,
                    f"The bound of the loss is active on {middle(recent):.0%} of the tokens, which then teach nothing",
                    f"`clip_high` ({high:g}) is far below `clip` ({low:g}): good answers may hardly become likelier, "
                    "while bad ones become unlikely" if tight else
                    "the policy moves far within one batch: too many updates of it, or too large ones",
                    f"nodes.{node}.with.clip_high={low:g}" if tight else
                    f"nodes.{node}.with.epochs=1 , or  {series.lower_rate}", {"clipped": middle(recent)})


@detector()
def mismatch(series: Series) -> Evidence | None:
    """Trainer and rollout disagree about the probability of the same tokens."""
    name, late = "mismatch/logprob_mean", "mismatch/logprob_late"
    recent, start = series.last(name, 3), series.before(name, 3, 10, 5)
    grew = bool(start and recent) and min(recent) > 3 * middle(start)  # deep models in half precision begin at 0.08
    if not recent or min(recent) < (0.02 if grew else 0.25) or max(series.last("staleness/max", 3) or [0.0]) > 0:
        return None
    tail = middle(series.last(late, 3))
    grows = tail > 1.3 * middle(recent)
    return Evidence(series.since(name, lambda value: value > 0.05), name,
                    f"Trainer and rollout differ by {middle(recent):.2g} nats a token"
                    f"{f', before by {middle(start):.2g}' if start else ''}{', most late in a row' if grows else ''}",
                    "the engine that samples does not hold the weights that are trained, or computes them otherwise "
                    "(precision, kernels, positions, temperature), a node has changed `responses` after they were "
                    "sampled, or the trainer is not deterministic (dropout)",
                    f"roles.{series.trained_role}.rollout=hf  shows whether it is the engine; until then a node "
                    "`truncated_importance` corrects for it", {"mean": middle(recent), "late": tail})


# Updates


@detector(symptom=True, origin=Origin.OUTCOME)
def loss_spike(series: Series) -> Evidence | None:
    """A loss or a gradient norm leaps, or is no number."""
    for name in series.names(""):
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


@detector()
def gradient_of_one_layer(series: Series) -> Evidence | None:
    """Nearly all of the gradient is that of one layer."""
    for name in (each for each in series.names("gradient/share_of_layer/") if each.rpartition("/")[2].isdigit()):
        recent, always, known = series.last(name, RECENT), series.last(name, 8), dict(series.known(name))
        usual = middle([known.get(step, 0.0) for step in series.steps[:-RECENT]][:10])
        leapt = len(series.steps) >= 2 * RECENT and bool(recent) and min(recent) > 0.9 and usual < 0.75
        if leapt or always and min(always) > 0.999:
            layer = name.rpartition("/")[2]
            return Evidence(series.since(name, lambda share: share > 0.9), name,
                            f"{middle(recent):.1%} of the gradient's square is of layer `{layer}`"
                            f"{f', before {usual:.0%}' if leapt and usual else ''}",
                            "this layer's numbers overflow or are scaled wrongly, or all others are cut off from the "
                            "loss (frozen, detached)", "compare the gradients of this layer's parameters with those of "
                            "another engine:  engine: fsdp , dtype: float32", {"share": middle(recent)})
    return None


_LEAST_RATE = 1e-7
_NEAR, _HELD = 0.02, 0.05  # nats that a policy which is held stays within, and least loss by the KL term


@detector()
def policy_stuck(series: Series) -> Evidence | None:
    """A model that is trained does not change, though its samples tell better from worse."""
    kl, role, node = "policy/kl_reference", series.trained_role, series.update_node
    silent = middle(series.last(f"{series.reward.partition('/')[0]}/zero_std_groups", 8))
    far = series.last(kl, 8) if silent < 0.8 else []
    still = bool(far) and max(far) < 1e-7 and not series.copies_policy
    if slow := _low_rate(series, still):
        return slow
    still = still and series.steps[-1] >= series.setting_of_role("warmup_steps", 0.0)
    weight = series.number(f"nodes.{node}.with.kl", 0.0)
    if far and series.earned < 0.05 and middle(far) < _NEAR and weight * middle(far) > _HELD:
        return Evidence(series.steps[-8], kl, f"The policy does not move: it stays {middle(far):.2g} nats a token from "
                        "the reference, and earns no more", f"the KL term ({weight:g} times the distance) outweighs "
                        "the advantages", f"nodes.{node}.with.kl=0.001", {"kl": middle(far), "weight": weight})
    norms = {each: series.last(each, 8) for each in series.names("") if each.rpartition("/")[2] == "grad_norm"}
    name = kl if still else next((each for each, values in norms.items() if values and max(values) == 0), "")
    if not name or silent >= 0.8:  # then `no_signal` says why
        return None
    bound, norm = series.setting_of_role("max_grad_norm", 1.0), middle(norms.get("grad_norm", []))
    small = bound < 1e-6 * norm
    return Evidence(series.since(name, lambda value: value < 1e-7), name, f"The model is as it was: `{name}` stays 0",
                    f"gradients (norm {norm:.2g}) are scaled down to {bound:g}" if small else
                    "all parameters are frozen, the optimizer has others than the model's, or the loss does not depend "
                    "on them",
                    f"roles.{role}.max_grad_norm=1.0" if small else
                    f"roles.{role}.freeze=[] ; a loss of your own must not detach the log-probabilities",
                    {"norm": norm})


def _low_rate(series: Series, still: bool) -> Evidence | None:
    """Return that the learning rate of the policy or the critic is why it does not move."""
    for name in ("learning_rate", *series.names("value/learning_rate")):
        rates, policy = series.last(name, 8), name == "learning_rate"
        role = f"roles.{series.trained_role if policy else 'critic'}"
        full, warmup = (series.number(f"{role}.{key}", 0.0) for key in ("learning_rate", "warmup_steps"))
        if not rates or max(rates) > 1e-8 and not (still and policy and max(rates) < max(full / 10, _LEAST_RATE)):
            continue
        warms, falls = warmup > series.steps[-1], series.settings.get(f"{role}.schedule", "constant") != "constant"
        if full > 1e-8 and (warmup < series.number("steps", 0.0) if warms else falls):
            continue  # the run gets out of it, or its schedule is at its end
        return Evidence(series.steps[-8], name, f"The {'policy' if policy else 'critic'} does not move: its learning "
                        f"rate is {max(rates):.1g}",
                        f"it is in a warm-up of {warmup:.0f} steps, on the way to {full:g}" if warms else
                        "that is far below what models take (1e-7 to 1e-5, adapters 1e-5 to 1e-4)",
                        f"{role}.warmup_steps={min(20, int(warmup))}" if warms else f"{role}.learning_rate=1e-6",
                        {"rate": max(rates)})
    return None


@detector()
def learning_rate(series: Series) -> Evidence | None:
    """The policy leaves the model that it was within a few steps."""
    name, kl = "learning_rate", "policy/kl_reference"
    now, entropy, start = series.last(kl, 1), series.last("policy/entropy", 2), series.first("policy/entropy", 2)
    early = len(series.steps) <= 12
    leapt = bool(now) and now[0] > 0.5
    broke = bool(entropy and start) and min(entropy) > max(4 * min(start), min(start) + 0.3) and \
        middle(series.last(series.reward, 2)) < 0.5 * middle(series.first(series.reward, 2))
    if not early or not (leapt or broke) or reference_differs(series):
        return None
    epochs = series.settings.get(f"nodes.{series.update_node}.with.epochs", "1")
    rate = series.last(name, 1)
    return Evidence(series.steps[0], kl if leapt else "policy/entropy",
                    f"The policy left the model that it was within {len(series.steps)} steps"
                    f"{f' ({now[0]:.2g} nats a token from the reference)' if leapt else ''}",
                    f"the learning rate{f' ({rate[0]:.1g})' if rate else ''} is far above what such a model takes"
                    f"{f', or {epochs} updates of each batch are too many' if epochs != '1' else ''}",
                    f"{series.lower_rate}{f' , or  nodes.{series.update_node}.with.epochs=1' if epochs != '1' else ''}",
                    {"kl": now[0] if now else 0.0, "learning_rate": rate[0] if rate else 0.0})


@detector(rows="high", origin=Origin.ADVANTAGE)
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


@detector(origin=Origin.ADVANTAGE)
def advantage_baseline(series: Series) -> Evidence | None:
    """Advantages of a prompt's samples do not add up to 0, though their baseline is the prompt's."""
    name = "advantages/of_prompts"
    recent = series.last(name, RECENT)
    if not recent or min(recent) < 0.1 or max(recent) > 0.999 or series.functions & _OTHER_BASELINES:
        return None
    return Evidence(series.since(name, lambda share: share > 0.05), name,
                    f"{middle(recent):.0%} of the advantages' square is common to all samples of a prompt",
                    "the baseline is not the mean of the prompt's own samples, as where rewards are normalised over "
                    "the batch, or rows are grouped wrongly: easy prompts are reinforced, hard ones unlearnt",
                    "a node `group_advantage` or `leave_one_out_advantage` in place of what writes `advantages`",
                    {"share": middle(recent)})


_OTHER_BASELINES = {"gae", "baseline_advantage", "discounted_advantage", "distillation_advantage", "rank_filter"}


@detector(origin=Origin.ADVANTAGE)
def advantage_scale(series: Series) -> Evidence | None:
    """Advantages are of another size than losses expect, or have no baseline."""
    size, center = series.last("advantages/std", 3), series.last("advantages/mean", 3)
    if "distillation_advantage" in series.functions:  # which are divergences
        return None
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
                    f"nodes.{series.update_node}.with.normalize=batch , or a node `group_advantage`",
                    {"std": middle(size), "mean": middle(center)})


@detector()
def reference_differs(series: Series) -> Evidence | None:
    """The reference is not the policy before it is trained."""
    node = f"nodes.{series.update_node}.with"
    updates = series.number(f"{node}.epochs", 1) * series.number(f"{node}.mini_batches", 1)
    copied = any(key.endswith(".copy_of") and value == series.trained_role for key, value in series.settings.items())
    lengths = dict(series.known("response/length")[:1])
    for name in ("policy/kl_reference", "reward/kl"):  # of a token, and of a row before any update
        step, far = (series.known(name)[:1] or [(0, 0.0)])[0]
        far = abs(far) / max(lengths.get(step, 1.0), 1.0) if name == "reward/kl" else far if updates == 1 else 0.0
        if step == 1 and far >= 0.05 and copied and len(series.steps) <= 3:
            return Evidence(1, name, f"KL to the reference is {far:.2g} nats a token before anything is trained",
                            "the reference is not the model that is trained, or is asked otherwise: another "
                            "temperature, template or position, or other weights", "roles.reference={copy_of: "
                            f"{series.trained_role}}} , and no temperature of its own at its node", {"kl": far})
    return None


@detector()
def optimizer_forgets(series: Series) -> Evidence | None:
    """The optimizer has lost its moments since the last step."""
    for name in ("gradient/remembered", "value/gradient/remembered"):
        before, now = (series.known(name)[-2:] + [(0, 0.0)] * 2)[:2]
        if now[1] and now[1] <= before[1]:
            return Evidence(now[0], name, f"The optimizer remembers {now[1]:.0f} updates, and {before[1]:.0f} in the "
                            "step before", "its state is cleared or made anew (each step, or by a resume without it): "
                            "every update is as large as the first and follows one batch alone",
                            "make the optimizer once, and save its state with the model; distflow resume  restores it",
                            {"before": before[1], "now": now[1]})
    return None


@detector()
def reference_moves(series: Series) -> Evidence | None:
    """KL to the reference drops to nothing while the policy is trained, or never is anything else."""
    name = "policy/kl_reference"
    recent, before = series.last(name, 2), series.before(name, 2, 6, 4)
    if series.copies_policy and max(series.last(name, 8) or [1.0]) == 0:
        return Evidence(series.steps[0], name, "KL to the reference is always 0",
                        "the reference takes the policy's weights in each step (follow), so that it holds nothing",
                        "roles.reference.follow=null , or a mix below 1 and a larger  every", {})
    if not recent or not before or middle(before) < 0.003 or max(recent) > 0.25 * min(before):
        return None
    return Evidence(series.steps[-2], name,
                    f"KL to the reference dropped from {middle(before):.2g} to {middle(recent):.2g} in one step",
                    "the reference has become the policy: its weights were replaced, or it follows the policy",
                    "roles.reference.follow=null , or a mix below 1", {"before": middle(before), "now": middle(recent)})
