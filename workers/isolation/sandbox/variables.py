"""Environment variables for processes that run others' code: all but those that look like secrets.

Whoever owns the run can still read them where they are; this keeps them out of what a reward or an environment logs,
reports or passes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

PASSED = "DISTFLOW_PASS_ENV"
"""Names, with commas between them, of variables that are passed on all the same."""
_SECRET = re.compile(r"(^|_)(TOKEN|SECRETS?|PASSWORD|PASSWD|PASS|API_?KEY|KEY|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)


def without_secrets() -> dict[str, str]:
    """The variables of this process but the secret ones."""
    passed = set(os.environ.get(PASSED, "").split(","))
    return {name: value for name, value in os.environ.items() if name in passed or not _SECRET.search(name)}


def named_secrets(settings: Any) -> dict[str, str]:
    """The secret variables that settings name, as `key_variable: JUDGE_KEY` does."""
    return {name: os.environ[name] for name in _texts(settings) if name in os.environ and _SECRET.search(name)}


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, dict | list | tuple):
        for each in settings.values() if isinstance(settings, dict) else settings:
            yield from _texts(each)
