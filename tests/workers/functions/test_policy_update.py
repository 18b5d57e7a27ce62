"""The policy update against its definition in plain Python, and under every division of its rows.

The policy is a table of logits, the same for every token whatever stands before it: log-probabilities and their
gradients are then known in closed form.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from reported import reported

from distflow.data.batch import Ragged
from distflow.errors import InvalidInput
from workers.functions.updates import policy_update, report_ends

LOGITS = (0.3, -0.7, 1.1, 0.0)
RATE = 0.5
Row = dict[str, Any]
"""group, advantage, and by token: tokens, rollout (log-probability), reference, importance, surprise, trained."""


class Table:
    """A role whose model is a table of logits, trained by plain gradient descent; it notes what each step saw."""

    version, step, balances = 5, 2, False

    def __init__(self, rows_at_once: int):
        self.logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
        self.rows_at_once, self.steps = rows_at_once, []

    def total(self, values):
        if dist.is_initialized():
            dist.all_reduce(values)
        return values

    def update(self, batch, loss_of, temperature=None):
        value = torch.zeros((), dtype=torch.float64)
        self.logits.grad = torch.zeros_like(self.logits)
        for start in range(0, len(batch), self.rows_at_once):
            micro = batch.slice(start, min(start + self.rows_at_once, len(batch)))
            tokens = micro["responses"].values
            logprobs = torch.log_softmax(self.logits, 0)
            entropy = -(logprobs.exp() * logprobs).sum()
            loss = loss_of(logprobs[tokens], entropy.expand(len(tokens)), micro)
            loss.backward()
            value += loss.detach()
        gradient = self.total(self.logits.grad.clone())
        self.steps.append([float(self.total(value)), *gradient.tolist()])
        with torch.no_grad():
            self.logits -= RATE * gradient
        return {}


def steps_of(rows: list[Row], rows_at_once: int = 100, **options) -> list[list[float]]:
    """The loss and the gradient of each optimizer step."""
    def column(name, dtype=torch.float64):
        return Ragged.from_rows([torch.tensor(row[name], dtype=dtype) for row in rows], dtype)

    tokens, role = column("tokens", torch.int64), Table(rows_at_once)
    policy_update(role, tokens, tokens, column("rollout"),
                  torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
                  torch.tensor([row["group"] for row in rows], dtype=torch.int64),
                  column("trained", torch.bool), column("reference"), None, column("importance"),
                  actor_entropies=column("surprise", torch.float32), **options)
    reported()
    return role.steps


def surrogate(kind: str, log_ratios, logprobs, advantage, low, high):
    """(value, slope in the log-probability) of each token of a row; all are trained."""
    ratios = [math.exp(x) for x in log_ratios]
    if kind == "gspo" and ratios:
        ratios = [math.exp(sum(log_ratios) / len(log_ratios))] * len(ratios)
    for ratio, logprob in zip(ratios, logprobs):
        free, bounded = ratio * advantage, max(1 - low, min(1 + high, ratio)) * advantage
        if kind == "reinforce":
            yield -advantage * logprob, -advantage
        elif kind == "cispo":
            yield -min(ratio, 1 + high) * advantage * logprob, -min(ratio, 1 + high) * advantage
        elif kind == "dual" and advantage < 0 and min(free, bounded) < 3 * advantage:
            yield -3 * advantage, 0.0
        else:
            yield (-free, -free) if free <= bounded else (-bounded, 0.0)


def plain(rows: list[Row], loss: str, aggregate: str, low: float, high: float, kl: float, kl_kind: str,
          normalize: str, entropy: float, entropy_quantile: float) -> list[float]:
    """Loss and gradient of one step over all rows."""
    total = math.log(sum(math.exp(x) for x in LOGITS))
    probabilities = [math.exp(x - total) for x in LOGITS]
    surprise = -sum(p * math.log(p) for p in probabilities)
    kept = [[i for i, trained in enumerate(row["trained"]) if trained] for row in rows]
    tokens, filled = sum(map(len, kept)), sum(map(bool, kept))
    mean = sum(row["advantage"] * len(places) for row, places in zip(rows, kept)) / max(tokens, 1)
    square = sum((row["advantage"] - mean) ** 2 * len(places) for row, places in zip(rows, kept)) / max(tokens - 1, 1)
    ranked = sorted((row["surprise"][i] for row, places in zip(rows, kept) for i in places), reverse=True)
    least = ranked[math.ceil(round(tokens * (1 - entropy_quantile), 6)) - 1] if ranked else 0.0
    value, gradient = 0.0, [0.0] * len(LOGITS)
    for row, places in zip(rows, kept):
        new = [LOGITS[row["tokens"][i]] - total for i in places]
        gain = (row["advantage"] - mean) / math.sqrt(square + 1e-8) if normalize == "batch" else row["advantage"]
        log_ratios = [x - row["rollout"][i] for x, i in zip(new, places)]
        weight = {"token_mean": 1 / max(tokens, 1), "seq_mean_token_sum": 1 / max(filled, 1),
                  "seq_mean_token_mean": 1 / max(filled * len(places), 1),
                  "fixed_length_sum": 1 / max(filled * 7, 1)}[aggregate]
        for i, x, (part, slope) in zip(places, new, surrogate(loss, log_ratios, new, gain, low, high)):
            d = x - row["reference"][i]
            extra, steep = (math.exp(-d) - 1 + d, 1 - math.exp(-d)) if kl_kind == "k3" else (d * d / 2, d)
            used = row["importance"][i] * (row["surprise"][i] >= least)
            part, slope = (used * y + kl * z for y, z in ((part, extra), (slope, steep)))
            value += weight * (part - entropy * surprise)
            for token, p in enumerate(probabilities):
                gradient[token] += weight * slope * ((token == row["tokens"][i]) - p)
                gradient[token] += weight * entropy * p * (math.log(p) + surprise)
    return [value, *gradient]


SURPRISES = [-0.0, 0.0, 1e-7, 0.125, 0.5, 0.5000001, 0.75, 1.0, 1.5, 2.0, 2.0000002, 5.5]
"""Entropies of tokens, some equal or almost, and as rounding makes them."""


@st.composite
def any_rows(draw) -> list[Row]:
    """Rows of 0 to 5 tokens in a few groups, with holes in the mask, rows without a trained token, equal advantages."""
    def numbers(low, high, length):
        return draw(st.lists(st.floats(low, high, width=32), min_size=length, max_size=length))

    rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(0, 5))
        rows.append({"group": draw(st.integers(0, 3)), "advantage": draw(st.sampled_from([-1.5, 0.0, 0.5, 2.0])),
                     "tokens": draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)),
                     "rollout": numbers(-3, -0.0625, length), "reference": numbers(-3, -0.0625, length),
                     "importance": numbers(0, 2, length),
                     "surprise": draw(st.lists(st.sampled_from(SURPRISES), min_size=length, max_size=length)),
                     "trained": draw(st.lists(st.booleans(), min_size=length, max_size=length))})
    return sorted(rows, key=lambda row: row["group"])


LOSSES = st.sampled_from([("ppo", 0.2, 0.3), ("ppo", 0.0, 5.0), ("dual", 0.2, 0.3), ("gspo", 0.1, 0.2),
                          ("gspo", 3e-4, 4e-4), ("cispo", 0.0, 0.5), ("reinforce", 0.0, 0.0)])
AGGREGATES = st.sampled_from(["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum"])
MORE = st.fixed_dictionaries({"kl": st.sampled_from([0.0, 0.1]), "kl_kind": st.sampled_from(["k2", "k3"]),
                              "normalize": st.sampled_from(["none", "batch"]),
                              "entropy": st.sampled_from([0.0, 0.3]),
                              "entropy_quantile": st.sampled_from([0.0, 0.5, 0.8])})


def options_of(loss, aggregate, more):
    kind, low, high = loss
    bounds = {"ppo": {"clip": low, "clip_high": high}, "gspo": {"clip": low, "clip_high": high},
              "dual": {"clip": low, "clip_high": high, "dual_clip": 3.0}, "cispo": {"clip_high": high}}.get(kind, {})
    length = {"fixed_length": 7} if aggregate == "fixed_length_sum" else {}
    return {"loss": "ppo" if kind == "dual" else kind, "aggregate": aggregate, **bounds, **length, **more}


@settings(max_examples=300)
@given(rows=any_rows(), loss=LOSSES, aggregate=AGGREGATES, more=MORE)
def test_loss_and_gradient_are_those_of_the_definition(rows, loss, aggregate, more):
    (step,) = steps_of(rows, **options_of(loss, aggregate, more))
    expected = plain(rows, loss[0], aggregate, *loss[1:], **more)
    assert step == pytest.approx(expected, rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(rows=any_rows(), loss=LOSSES, aggregate=AGGREGATES, more=MORE, rows_at_once=st.integers(1, 4),
       mini_batches=st.integers(1, 3))
def test_micro_batches_change_nothing(rows, loss, aggregate, more, rows_at_once, mini_batches):
    options = {**options_of(loss, aggregate, more), "mini_batches": mini_batches, "epochs": 2}
    for step, whole in zip(steps_of(rows, rows_at_once, **options), steps_of(rows, **options), strict=True):
        assert step == pytest.approx(whole, rel=1e-9, abs=1e-12)


@settings(max_examples=6)
@given(rows=any_rows(), loss=LOSSES, aggregate=AGGREGATES, more=MORE, mini_batches=st.integers(1, 3))
def test_ranks_change_nothing(rows, loss, aggregate, more, mini_batches):
    options = {**options_of(loss, aggregate, more), "mini_batches": mini_batches}
    whole = steps_of(rows, **options)
    shares = [[row for row in rows if row["group"] % 2 == rank] for rank in range(2)]
    for steps in run_ranks(2, share_of, shares, options):
        for step, expected in zip(steps, whole, strict=True):
            assert step == pytest.approx(expected, rel=1e-9, abs=1e-12)


def share_of(shares, options):
    return steps_of(shares[dist.get_rank()], rows_at_once=2, **options)


def row(advantage: float, rollout: list[float], group: int = 0, trained: list[bool] | None = None) -> Row:
    count = len(rollout)
    return {"group": group, "advantage": advantage, "tokens": [2] * count, "rollout": rollout,
            "importance": [1.0] * count, "surprise": [0.5] * count, "reference": [-1.0] * count,
            "trained": trained or [True] * count}


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
def test_an_untrained_token_may_be_impossible(loss):
    """Log-probabilities of -inf and NaN stand where nothing is trained: no value, gradient or mean must see them."""
    clean = row(1.0, [-1.0, -1.2])
    odd = row(1.0, [-math.inf, -1.0, math.nan, -1.2], trained=[False, True, False, True])
    odd["importance"] = [math.inf, 1.0, math.nan, 1.0]
    expected, seen = steps_of([clean], loss=loss), steps_of([odd], loss=loss)
    assert seen[0] == pytest.approx(expected[0], rel=1e-12)


def test_equal_advantages_are_0_when_normalized():
    assert steps_of([row(0.1, [-1.0] * 3), row(0.1, [-1.0], group=1)], normalize="batch")[0] == [0.0] * 5


def test_recomputed_log_probabilities_are_the_old_policy_and_the_rollouts_own_show_the_mismatch():
    tokens = Ragged.from_rows([torch.tensor([0, 1, 2])])
    rollout, recomputed = (tokens.with_values(torch.full((3,), value, dtype=torch.float64)) for value in (-9.0, -1.3))
    roles = Table(100), Table(100)
    policy_update(roles[0], tokens, tokens, rollout, torch.ones(1), torch.zeros(1), actor_logprobs=recomputed)
    assert reported()["mismatch/logprob_mean"] > 7
    policy_update(roles[1], tokens, tokens, recomputed, torch.ones(1), torch.zeros(1))
    assert reported()["mismatch/logprob_mean"] < 1
    assert roles[0].steps == roles[1].steps


def test_what_the_first_step_says_of_the_mismatch():
    rollout = [-1.0, -0.5, -2.0]
    tokens = Ragged.from_rows([torch.tensor([0, 1, 2])])
    role, versions = Table(100), tokens.with_values(torch.tensor([5, 3, 4], dtype=torch.int32))
    mask = tokens.with_values(torch.tensor([True, True, False]))
    reported()
    policy_update(role, tokens, tokens, tokens.with_values(torch.tensor(rollout, dtype=torch.float64)), torch.ones(1),
                  torch.zeros(1), mask, versions=versions, epochs=3)
    seen = reported()
    total = math.log(sum(math.exp(x) for x in LOGITS))
    differences = [LOGITS[i] - total - rollout[i] for i in range(2)]
    weights = [math.exp(d) for d in differences]
    expected = {"logprob_mean": sum(map(abs, differences)) / 2, "logprob_max": max(map(abs, differences)),
                "kl": sum(w - 1 - d for w, d in zip(weights, differences)) / 2,
                "perplexity_ratio": math.exp(-sum(differences) / 2),
                "effective_samples": sum(weights) ** 2 / (2 * sum(w * w for w in weights))}
    for name, value in expected.items():
        assert seen[f"mismatch/{name}"] == pytest.approx(value, rel=1e-6), name
    assert seen["staleness/mean"] == 1.0
    assert seen["staleness/max"] == 2


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_entropy_and_clip_ratios_do_not_depend_on_the_rows_that_the_update_leaves_out(loss):
    """With a KL term no row is left out. Of the rows without advantage half would be clipped if they had any."""
    rows = [row(float(group % 4 == 3), [-9.0, -0.25 * group], group, [group < 6, True]) for group in range(12)]
    seen = []
    for kl in (0.0, 1e-9):
        reported()
        role = Table(5)
        tokens, rollout, mask = (Ragged.from_rows([torch.tensor(each[name]) for each in rows])
                                 for name in ("tokens", "rollout", "trained"))
        policy_update(role, tokens, tokens, rollout.with_values(rollout.values.double()),
                      torch.tensor([each["advantage"] for each in rows]).double(),
                      torch.tensor([each["group"] for each in rows]), mask, rollout, kl=kl, loss=loss, clip_high=0.5)
        seen.append(reported())
    assert (seen[0]["policy/rows_without_gradient"], "policy/rows_without_gradient" in seen[1]) == (0.75, False)
    names = ("policy/entropy", "policy/clip_ratio", "policy/clip_ratio_low", "policy/clip_ratio_high")
    assert [seen[0][name] for name in names] == [seen[1][name] for name in names]
    assert seen[0]["policy/entropy"] == pytest.approx((6 * 9.0 + 0.25 * 66) / 18)
    assert 0 < seen[0]["policy/clip_ratio"] < 0.25


OWN = st.sampled_from([("own_losses:clipped", {"clip": 0.3}, {"loss": "ppo", "clip": 0.3}),
                       ("own_losses:geometric", {"low": 0.1, "high": 0.2},
                        {"loss": "gspo", "clip": 0.1, "clip_high": 0.2})])


@settings(max_examples=40)
@given(rows=any_rows(), own=OWN, aggregate=AGGREGATES, more=MORE, rows_at_once=st.integers(1, 4),
       mini_batches=st.integers(1, 3))
def test_a_shipped_loss_written_by_a_user_is_that_loss(rows, own, aggregate, more, rows_at_once, mini_batches):
    name, loss_settings, shipped = own
    common = {"aggregate": aggregate, "mini_batches": mini_batches, "epochs": 2, **more,
              **({"fixed_length": 7} if aggregate == "fixed_length_sum" else {})}
    mine = steps_of(rows, rows_at_once, loss=name, loss_settings=loss_settings, **common)
    for step, expected in zip(mine, steps_of(rows, **shipped, **common), strict=True):
        assert step == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_a_users_loss_sees_rows_whose_advantage_is_0(rows_at_once):
    rows = [row(0.0, [-1.0, -2.0], group) for group in range(7)]
    (step,) = steps_of(rows, rows_at_once, loss="own_losses:unsure")
    logprobs = [x - math.log(sum(map(math.exp, LOGITS))) for x in LOGITS]
    assert step[0] == pytest.approx(logprobs[2] ** 2)
    slopes = [2 * logprobs[2] * ((token == 2) - math.exp(each)) for token, each in enumerate(logprobs)]
    assert step[1:] == pytest.approx(slopes)


@pytest.mark.parametrize(("name", "said"), [
    ("averaged", "returned a tensor of shape [] for 2 tokens.\n\n    LINE |  def averaged(…)\n\nIt returns one value"),
    ("cut_off", "returned a tensor without a gradient.\n\n    LINE |  def cut_off(…)\n\nCompute it from `logprobs`"),
    ("forgotten", "returned NoneType, not a tensor.\n"),
])
def test_a_users_loss_that_is_none_is_named_with_its_line(name, said):
    source = Path(__file__).parents[2] / "own_losses.py"
    line = next(number for number, text in enumerate(source.read_text().splitlines(), 1) if f"def {name}(" in text)
    with pytest.raises(InvalidInput) as caught:
        steps_of([row(1.0, [-1.0, -2.0])], loss=f"own_losses:{name}")
    assert f"own_losses.py:{line}: loss `{name}` {said.replace('LINE', str(line))}" in str(caught.value)


def test_rows_whose_tokens_were_certain_say_nothing_of_their_ends():
    """Such a token has the log-probability of one that the policy has not sampled."""
    mask = Ragged.from_rows([torch.tensor(row, dtype=torch.bool) for row in ([0, 1, 1], [1], [1])], torch.bool)
    report_ends(mask, torch.tensor([False, True, True, False, False]))
    assert reported()["response/end_untrained"] == 0.0


@pytest.mark.parametrize(("warmup", "updates"), [(0, 4), (2, 4), (3, 0)])
def test_while_the_critic_warms_up_there_is_no_optimizer_step(warmup, updates):
    """`Table` is in its third step."""
    rows = [row(1.0, [-1.0, -2.0], group) for group in range(4)]
    assert len(steps_of(rows, critic_warmup=warmup, mini_batches=2, epochs=2)) == updates


@pytest.mark.parametrize(("trained", "share", "end"), [
    ([1, 1, 0, 0, 1, 1], 1.0, 0.0), ([0, 0, 0, 0, 1, 1], 0.5, 0.0), ([1, 1, 0, 0, 1, 0], 0.75, 1.0),
    ([1, 1, 1, 1, 1, 1], 1.0, 0.0)])
def test_update_reports_which_of_the_tokens_that_were_sampled_are_trained(trained, share, end):
    """The two tokens in the middle are what a tool answered."""
    tokens = Ragged.from_rows([torch.tensor([0, 1, 2, 3, 1, 2])] * 2, torch.int64)
    logprobs = Ragged.from_rows([torch.tensor([-1.0, -0.5, 0.0, 0.0, -0.2, -2.0])] * 2, torch.float64)
    policy_update(Table(100), tokens, tokens, logprobs, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]),
                  Ragged.from_rows([torch.tensor(trained, dtype=torch.bool)] * 2, torch.bool))
    told = reported()
    assert (told["response/trained"], told["response/end_untrained"]) == (share, end)
