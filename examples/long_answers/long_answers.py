"""A detector of your own: warns when answers have grown, as they do before a model only talks."""

from distflow import Alert, detector


@detector(sees="steps")
def long_answers(steps, *, factor: float = 2.0, window: float = 20.0, restart: bool = False) -> Alert | None:
    """Return an alarm when the mean length has grown by `factor` within the last `window` steps."""
    lengths = [step.metrics["response/length"] for step in steps[-int(window):]]
    if lengths[-1] < factor * lengths[0]:
        return None
    return Alert(f"answers have grown from {lengths[0]:.0f} to {lengths[-1]:.0f} tokens", restart=restart)
