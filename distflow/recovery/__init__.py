"""Recovery: a role that dies is restarted alone. Enter by `supervisor` (one worker), `restarts` (a group), `membership`
(machines) and `checkpoint`; what a worker restores is in `workers/train_state.py`."""
