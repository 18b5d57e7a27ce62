"""`distflow set`: other settings for a run that is going on; only the group that they concern starts again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from distflow.config.live_changes import groups_of, refusal
from distflow.config.load import Spec
from distflow.errors import Diagnostic, InvalidInput, Location, listing
from distflow.launch import reopened
from distflow.recovery import live_config
from distflow.telemetry.run_folder import SUMMARY, RunFolder, read_plan
from planners import plan

HELP = "change settings of a running job, as the size of micro-batches; only the group that they concern starts again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="+", help="as roles.actor.micro_batch_tokens=512")


def main(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    before, after = reopened(folder), reopened(folder, options.settings)
    _require_unfinished(folder, options.settings)
    planned = plan(after, read_plan(folder)["ranks"])
    paths = {text: tuple(part.strip() for part in text.partition("=")[0].split(".")) for text in options.settings}
    _require_own_settings(before, paths)
    concerned = {text: groups_of(path, after.run.mode) for text, path in paths.items()}
    if refused := [refusal(paths[text], text) for text, groups in concerned.items() if not groups]:
        raise InvalidInput(refused)
    settings = {".".join(path): [_value(before, path), _value(after, path)] for path in paths.values()}
    settings = {key: values for key, values in settings.items() if values[0] != values[1]}
    if not settings:
        print("these are the settings in force already")
        return 0
    RunFolder.describe(folder, after, planned)
    groups = sorted({group for text, each in concerned.items() for group in each
                     if ".".join(paths[text]) in settings})
    live_config.write(folder, groups, settings)
    for key, (old, new) in settings.items():
        print(f"{key}: {old} → {new}")
    print(f"from the next step on; what starts again: {', '.join(groups)}. events.jsonl says when")
    return 0


def _require_unfinished(folder: Path, settings: list[str]) -> None:
    """
    Raises:
        InvalidInput: the run has come to its end, so that no process is left to read its settings.
    """
    if (folder / SUMMARY).is_file():
        wanted = " ".join(f"--set {text}" for text in settings)
        raise InvalidInput(f"{folder} has come to its end ({SUMMARY} is there), so that nothing would read these "
                           f"settings. To go on with it under them:  distflow resume {folder} --set steps=N {wanted}")


def _require_own_settings(spec: Spec, paths: dict[str, tuple[str, ...]]) -> None:
    """
    Raises:
        InvalidInput: a role has none in the run file, so that one for it would be all it has.
    """
    without = {text: path[1] for text, path in paths.items()
               if path[0] == "roles" and len(path) > 1 and path[1] not in spec.run.roles}
    if without:
        hint = listing(spec.run.roles, "Roles with settings")
        raise InvalidInput([Diagnostic(f"role `{role}` has no settings of its own, but those of the role it copies",
                                       Location(f"--set {text}"), hint) for text, role in without.items()])


def _value(spec: Spec, path: tuple[str, ...]) -> Any:
    value: Any = spec.run.model_dump(mode="json")
    for part in path:
        value = value[part]
    return value
