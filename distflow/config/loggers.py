"""What loggers need on this machine, by which a run's metrics and samples go to other programs (`log`)."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distflow.config.extras import pip_line

_LOGGER_MODULES = {"tensorboard": ("tensorboard", ""), "wandb": ("wandb", "loggers"), "mlflow": ("mlflow", "loggers")}
"""The module that each needs, and the extra that has it."""


_MLFLOW_SERVERS = ("http:", "https:", "databricks", "uc", "file:")


def require_logger(name: str) -> None:
    """Raise ValueError with the line that installs it if a logger's package is missing."""
    module, extra = _LOGGER_MODULES[name]
    if importlib.util.find_spec(module) is None:
        line = pip_line(extra) if extra else f"pip install {module}"
        raise ValueError(f"`{name}` needs a package that is not installed:  {line}")


def lack_of(name: str) -> tuple[str, str]:
    """Return what a logger lacks on this machine to send anything, and the remedy; "" and "" if nothing."""
    if name == "mlflow" and importlib.util.find_spec("sqlalchemy") is None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if "://" in uri and not uri.startswith(_MLFLOW_SERVERS):  # a bare path is a folder of files
            return f"`mlflow` needs sqlalchemy and alembic for {uri}", pip_line("loggers")
    if name == "wandb" and not _wandb_stays_here(known := _wandb_settings()) and not _wandb_key(known):
        return ("`wandb` has no key to send with: neither WANDB_API_KEY nor a login of this machine",
                "Log in once:  wandb login   or keep it here:  export WANDB_MODE=offline")
    return "", ""


def _wandb_settings() -> dict[str, str]:
    """Return what W&B's own files say: that of this user, and over it that of this folder (`wandb offline`)."""
    here = Path(os.environ.get("WANDB_DIR") or ".")
    folders = [os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", here / "wandb", here / ".wandb"]
    files = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):  # W&B says so, and ignores the file
        files.read([Path(folder).expanduser() / "settings" for folder in folders], encoding="utf-8")
    return dict(files["default"]) if files.has_section("default") else {}


def _wandb_stays_here(known: Mapping[str, str]) -> bool:
    mode = os.environ.get("WANDB_MODE") or known.get("mode")
    return mode in ("offline", "disabled", "dryrun")


def _wandb_key(known: Mapping[str, str]) -> bool:
    """Return whether W&B finds a key where its login leaves one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or known.get("base_url") or "https://api.wandb.ai")
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        keys = netrc.netrc(file) if file.is_file() else None
        return bool(keys) and any(keys.authenticators(name) for name in (server.netloc, server.hostname or ""))
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return True  # W&B itself says what is wrong with it


def logger_names(value: Any) -> Any:
    """Return the names of loggers, also of those that an older version has written as mappings without a setting."""
    if not isinstance(value, list):
        return value
    named = [each if isinstance(each, dict) else {each: None} for each in value]
    for settings in (settings for each in named for settings in each.values()):
        if isinstance(settings, dict) and any(value not in (None, "distflow", []) for value in settings.values()):
            raise ValueError("loggers have no settings here: their libraries read them from the environment. Instead:  "
                             "export WANDB_PROJECT=… WANDB_ENTITY=… WANDB_MODE=offline MLFLOW_TRACKING_URI=… "
                             "MLFLOW_EXPERIMENT_NAME=…")
    return [name for each in named for name, settings in each.items() if len(each) == 1 or settings is not None]
