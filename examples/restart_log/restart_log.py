"""A hook of your own: a line in a file when a worker fails, and when its successor is ready."""

from distflow import hook


def note(line: str) -> None:
    with open("restarts.log", "a") as file:
        file.write(f"{line}\n")


@hook(when="on_failure")
def failed(moment) -> None:
    note(f"rank {moment.rank} failed in step {moment.failure.step}: {moment.failure.what.splitlines()[0]}")


@hook(when="after_restart", role="trainer")
def ready(moment) -> None:
    note(f"rank {moment.rank} trains again")
