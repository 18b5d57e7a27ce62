"""Numbers of all ranks as one: sums, maxima and means over all items, whoever has them."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distflow import metric
from distflow.data.exchange import gather
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import Metrics, current


def alone(payload: bytes) -> list[bytes]:
    return [payload]


def report() -> tuple[dict[str, float], dict[str, float]]:
    rank, metrics = dist.get_rank(), Metrics()
    metrics.mean("mean", 10.0 * rank, rank)
    metrics.mean_of("of", torch.arange(rank + 1))
    metrics.add("sum", rank)
    metrics.add("sum", torch.tensor(0.5))
    metrics.maximum("max", -rank)
    if rank == 2:
        metrics.add("rare/sum", 5)
        metrics.deviation_of("alone", torch.ones(1))
        metrics.maximum("rare/max", -5)
    metrics.mean_of("never", torch.zeros(0))
    metrics.spread_of("spread", torch.arange(rank) + 1e6)
    metrics.spread_of("empty", torch.zeros(0))
    metrics.extremes_of("length", torch.arange(3 * rank))
    first = metrics.collect(gather)
    return first, metrics.collect(gather)


def test_three_ranks_make_one_number():
    for first, second in run_ranks(3, report):
        spread = {"spread/mean": 1e6 + 1 / 3, "spread/std": pytest.approx(1 / math.sqrt(3)), "spread/min": 1e6,
                  "spread/max": 1e6 + 1}  # of 0, 0, 1
        assert first == {"length_max": 5.0, "length_min": 0.0, "max": 0.0, "mean": 10.0, "of": pytest.approx(4 / 6),
                         "rare/max": -5.0, "rare/sum": 5.0, "sum": 4.5, **spread}
        assert list(first) == sorted(first)
        assert second == {}


def conflict() -> str:
    metrics = Metrics()
    getattr(metrics, "add" if dist.get_rank() else "maximum")("speed", 1.0)
    with pytest.raises(ValueError, match="speed") as error:
        metrics.collect(gather)
    return str(error.value)


def test_one_name_for_two_kinds_is_refused_on_every_rank():
    errors = run_ranks(2, conflict)
    assert errors == ["metric `speed` is reported as max and as sum; give one of them another name"] * 2
    metrics = Metrics()
    metrics.mean("loss", 1.0)
    with pytest.raises(ValueError, match="`loss` is reported as mean and as sum"):
        metrics.add("loss", 1.0)


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan), (1.0, math.nan, 2.0)])
def test_a_maximum_does_not_hide_what_is_no_number(values):
    metrics = Metrics()
    for value in values:
        metrics.maximum("grad_norm", value)
        metrics.minimum("least", value)
    assert all(math.isnan(value) for value in metrics.collect(alone).values())


def test_nodes_that_run_one_function_are_distinguished():
    metrics = Metrics()
    for scope, value in (("first", 1.0), ("second", 3.0), ("", 5.0)):
        with metrics.attributed(scope):
            metrics.mean("reward", value)
    assert metrics.collect(lambda mine: [mine]) == {"reward": 3.0, "reward/first": 1.0, "reward/second": 3.0}


def report_own() -> dict[str, float]:
    rank = dist.get_rank()
    current().take()  # what earlier tests have left
    for value in range(rank):
        metric("my/call", 10 * value)
    metric("my/tokens", torch.arange(rank + 1, dtype=torch.int64))
    metric("my/flag", rank == 1)
    metric("my/free", torch.tensor(float(rank), requires_grad=True))
    return current().collect(gather)


def test_a_users_metric_is_the_mean_over_all_that_was_reported_on_all_ranks():
    for found in run_ranks(3, report_own):
        assert found == {"my/call": pytest.approx(10 / 3), "my/tokens": pytest.approx(4 / 6),
                         "my/flag": pytest.approx(1 / 3), "my/free": 1.0}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("", 1.0, "a metric needs a name"), (3, 1.0, "a metric needs a name"),
    ("my/name", None, "metric('my/name', None): the value is no number"), ("my/name", [1.0], "no number"),
    *((name, 1.0, f"distflow writes metrics named `{name.partition('/')[0]}` itself")
      for name in ("step", "loss", "reward/mean", "reward/my_part", "validation/x", "tokens_total")),
])
def test_what_is_no_metric_is_refused(name, value, said):
    with pytest.raises(InvalidInput) as caught:
        metric(name, value)
    assert said in str(caught.value)
