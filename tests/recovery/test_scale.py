"""Target number of rollouts in `scale.json`; a whole run is scaled in tests/test_running_jobs.py."""

from __future__ import annotations

from distflow.recovery import scale


def test_scale_is_forgotten_by_a_new_job(tmp_path):
    scale.write(tmp_path, 1)
    assert scale.read(tmp_path, 3) == 1
    scale.forget(tmp_path)
    scale.forget(tmp_path / "nowhere")
    assert scale.read(tmp_path, 3) == 3


def test_scale_moves_a_resting_rollout_up_when_another_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "_POLL_FILE", -1.0)
    left_out: list[int] = []
    rollouts = [scale.RolloutScale(tmp_path, place, lambda: left_out) for place in range(3)]
    scale.write(tmp_path, 1)
    assert [each.should_run() for each in rollouts] == [True, False, False]
    left_out.append(0)
    assert [each.should_run() for each in rollouts[1:]] == [True, False]
    left_out.append(1)
    assert rollouts[2].should_run()
