"""Settings of loggers, by which a run's metrics and samples go to other programs (`log` of a run file)."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from distflow.config.extras import pip_line
from distflow.config.yaml_source import Document

_LOGGER_MODULES = {"tensorboard": ("tensorboard", ""), "wandb": ("wandb", "loggers"), "mlflow": ("mlflow", "loggers")}
"""The module that each needs, and the extra that has it."""


_MLFLOW_SERVERS = ("http:", "https:", "databricks", "uc", "file:")


def require_logger(name: str) -> None:
    """Raise ValueError with the line that installs it if a logger's package is missing."""
    module, extra = _LOGGER_MODULES[name]
    if importlib.util.find_spec(module) is None:
        line = pip_line(extra) if extra else f"pip install {module}"
        raise ValueError(f"`{name}` needs a package that is not installed:  {line}")


def lack_of(name: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a logger lacks on this machine to send anything, and the remedy; "" and "" if nothing."""
    if name == "mlflow" and importlib.util.find_spec("sqlalchemy") is None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if "://" in uri and not uri.startswith(_MLFLOW_SERVERS):  # a bare path is a folder of files
            return f"`mlflow` needs sqlalchemy and alembic for {uri}", pip_line("loggers")
    if name == "wandb" and not _wandb_stays_here(settings, known := _wandb_settings()) and not _wandb_key(known):
        return ("`wandb` has no key to send with: neither WANDB_API_KEY nor a login of this machine",
                "Log in once:  wandb login   or keep it here:  log: [{wandb: {mode: offline}}]")
    return "", ""


def _wandb_settings() -> dict[str, str]:
    """Return what W&B's own files say: that of this user, and over it that of this folder (`wandb offline`)."""
    here = Path(os.environ.get("WANDB_DIR") or ".")
    folders = [os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", here / "wandb", here / ".wandb"]
    files = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):  # W&B says so, and ignores the file
        files.read([Path(folder).expanduser() / "settings" for folder in folders], encoding="utf-8")
    return dict(files["default"]) if files.has_section("default") else {}


def _wandb_stays_here(settings: Mapping[str, Any], known: Mapping[str, str]) -> bool:
    mode = settings.get("mode") or os.environ.get("WANDB_MODE") or known.get("mode")
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


class Wandb(Document):
    """Weights & Biases; samples are a table there."""

    project: str = "distflow"
    """Project of the run, which has the name of its folder there. WANDB_ENTITY names a team."""
    mode: Literal["online", "offline"] | None = None
    """offline: write RUN/wandb, for `wandb sync`; default: WANDB_MODE, else online."""


class NoSettings(Document):
    """A logger without settings here."""


class LoggerSettings(Document):
    """A logger: its name, or its name with settings."""

    tensorboard: NoSettings | None = None
    """TensorBoard's files in RUN/tensorboard; no settings."""
    wandb: Wandb | None = None
    """Settings of Weights & Biases."""
    mlflow: NoSettings | None = None
    """MLflow, by its own MLFLOW_TRACKING_URI (default: mlflow.db here) and MLFLOW_EXPERIMENT_NAME."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {value: {}} if isinstance(value, str) else value


def loggers_of(log: list[LoggerSettings]) -> dict[str, dict[str, Any]]:
    """Return the settings of each logger by its name."""
    return {name: settings for each in log for name, settings in each.model_dump().items() if settings is not None}
