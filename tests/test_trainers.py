"""Whole runs with a critic on ranks of its own (`first` of `layouts`), of which two are killed: the same bits.

That losses are those of one rank in other modes and splits:  `test_equal_runs.py`.
"""

from harness import events_of, require_equal
from test_equal_runs import ASYNC, PPO, pays, steps_of


def test_layouts_let_a_critic_train_on_ranks_of_its_own(launch, workspace, run_once):
    """In mode async. Its ranks are killed: one when the actor has trained and may have published, then one before it
    trains. The weights are those of a run without kills, bit for bit, as no row is computed with others. Mode sync:
    `test_rank_invariance.py`."""
    file, dag = pays("ppo", "brevity")
    (workspace / file).write_text(dag)
    on_its_own = (*PPO, *ASYNC, "groups.rollout=1", "layouts={critic: {first: 1}}", "checkpoint.every=2",
                  "roles.actor.generation.batch_rows=1")
    launch(4, *on_its_own, "--name", "apart")
    launch(4, *on_its_own, "--name", "killed", "faults=[{kind: kill, group: trainer, rank: 1, phase: saving, step: 1}, "
           "{kind: kill, group: trainer, rank: 2, phase: training, step: 2}]")
    for run in ("apart", "killed"):
        require_equal(steps_of(workspace / f"runs/{run}"), steps_of(run_once(1, *PPO, files=((file, dag),))))
    for role in ("actor", "critic"):
        calm, killed = ((workspace / f"runs/{run}/model-{role}/model.safetensors").read_bytes()
                        for run in ("apart", "killed"))
        assert calm == killed, role
    faults, failures, started = (events_of(workspace / "runs/killed", kind)
                                 for kind in ("fault_injected", "failure", "worker_started"))
    assert [(fault["rank"], fault["at_step"]) for fault in faults] == [(1, 1), (2, 2)]
    assert [(failure["group"], failure["verdict"]) for failure in failures] == [("trainer", "starts again")] * 2
    assert {event["rank"] for event in started if event["attempt"]} == {0, 1, 2}
