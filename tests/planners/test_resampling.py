"""A filter that draws prompts again: what comes before it is what it needs, and runs once for each draw."""

import pytest
from planning import LEARN

from distflow.errors import InvalidInput
from distflow.plan import SOURCE

ROLLOUT = {"role": "actor", "type": "MODEL_INFERENCE", "function": "sample"}
FILTER = {"role": "actor", "type": "COMPUTE", "function": "sift", "dependencies": ["rollout"]}
JUDGE = {"role": "other", "type": "MODEL_INFERENCE", "function": "judge", "dependencies": ["rollout"]}
ROLES = {"other": {"copy_of": "actor"}}


def test_what_a_filter_does_not_need_runs_after_its_last_draw(plan_of):
    plan = plan_of({"rollout": ROLLOUT, "filter": {**FILTER, "with": {"draws": 4}}, "judge": JUDGE}, ROLES)
    assert [task.node for task in plan.tasks][:2] == ["rollout", "filter"]
    assert [task.draws for task in plan.tasks] == [1, 4, 1, 1]
    assert {("filter", "judge"), ("filter", "learn")} <= set(plan.added)


def test_a_filter_that_draws_once_adds_nothing(plan_of):
    plan = plan_of({"rollout": ROLLOUT, "filter": {**FILTER, "with": {"draws": 1}}, "judge": JUDGE}, ROLES)
    assert [task.node for task in plan.tasks][0] == "learn"
    assert ("filter", "learn") not in plan.added
    assert {task.draws for task in plan.tasks} == {1}


def test_a_filter_whose_column_has_another_name_only_writes_it(plan_of):
    plan = plan_of({"rollout": ROLLOUT, "filter": {**FILTER, "writes": {"keep": "good"}}})
    assert {task.draws for task in plan.tasks} == {1}
    assert next(task for task in plan.tasks if task.node == "filter").writes == ("good",)


def test_filters_of_one_depth_need_no_order(plan_of):
    plan = plan_of({"rollout": ROLLOUT, "one": FILTER, "two": {**FILTER, "with": {"draws": 1}}})
    assert [task.node for task in plan.tasks][:2] == ["rollout", "one"]


def test_an_edge_that_the_planner_added_gives_no_columns(plan_of):
    """`judge` waits for the filter, but does not read what the filter's own inputs wrote without saying so."""
    with pytest.raises(InvalidInput, match="reads column `samples`, which node `rollout` writes, but does not wait"):
        plan_of({"rollout": ROLLOUT, "filter": FILTER, "judge": {**JUDGE, "dependencies": []}}, ROLES)


@pytest.mark.parametrize(("nodes", "expected"), [
    ({"filter": FILTER, "again": {**FILTER, "dependencies": ["filter"]}},
     "nodes `filter` and `again` both draw prompts again"),
    ({"teach": {**LEARN, "dependencies": ["rollout"]}, "filter": {**FILTER, "dependencies": ["teach"]}},
     "node `filter` draws prompts again and waits for node `teach`, which trains role `actor`"),
])
def test_what_cannot_be_is_refused(plan_of, nodes, expected):
    with pytest.raises(InvalidInput, match=expected):
        plan_of({"rollout": ROLLOUT, **nodes})


def test_the_source_is_where_the_first_reader_is(plan_of):
    plan = plan_of({"rollout": ROLLOUT, "filter": FILTER}, layouts={"filter": {"dp": 1}})
    assert plan.source == plan.tasks[0].layout
    assert plan.tasks[0].reads[0].producer == SOURCE
