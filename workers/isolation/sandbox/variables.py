"""Environment variables for processes that run users' code: all but those that look like secrets. The run's own secret
is never among them.

This keeps secrets out of what a reward or an environment logs, reports or passes on; code of the same user could still
read them from /proc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from distflow.rpc.run_token import TOKEN

PASSED = "DISTFLOW_PASS_ENV"  # comma-separated names of variables that are passed on regardless
_SECRET = re.compile(r"(^|_)(TOKEN|SECRETS?|PASSWORD|PASSWD|PASS|API_?KEY|KEY|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)


def without_secrets() -> dict[str, str]:
    passed = {*os.environ.get(PASSED, "").split(",")} - {TOKEN}
    return {name: value for name, value in os.environ.items() if name in passed or not _SECRET.search(name)}


def named_secrets(settings: Any) -> dict[str, str]:
    """Return the secret variables that settings name, as `key_variable: JUDGE_KEY` does."""
    return {name: os.environ[name] for name in _texts(settings)
            if name in os.environ and _SECRET.search(name) and name != TOKEN}


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, dict | list | tuple):
        for each in settings.values() if isinstance(settings, dict) else settings:
            yield from _texts(each)
