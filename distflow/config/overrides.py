"""Applies `--set KEY=VALUE` to the DAG or the run file, and says where a key belongs that stands in neither."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distflow.config.dag import Dag, Node, Role
from distflow.config.run import RoleRun, Run
from distflow.config.yaml_source import Document, YamlSource, parse_value, type_at
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, listing, nearest

_OF_DAG = ("nodes", "imports")
_WIDTH = 120  # of an override in messages, which may be a whole file's content
_MOST_NESTED = 16  # names in a key; the longest of ours has seven
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_OF_NODE = [field.alias or name for name, field in Node.model_fields.items()]


def joined(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with overrides that the shell has split in one, `--set KEY = VALUE`, and with
    a `--set` before each of several: `--set KEY=VALUE KEY=VALUE`."""
    found, left = [], list(words)
    while left:
        found.append(left.pop(0))
        if len(found) > 1 and found[-2] == "--set" and "=" not in found[-1] and left and left[0].startswith("="):
            found[-1] += left.pop(0)
            if found[-1].endswith("=") and left and not left[0].startswith("--"):
                found[-1] += left.pop(0)
        if len(found) > 1 and found[-2] == "--set" and "=" in found[-1] and left and _OVERRIDE.match(left[0]):
            left.insert(0, "--set")
    return found


def override(dag: YamlSource, run: YamlSource, text: str) -> None:
    """Set one value of the DAG or the run file. Raises InvalidInput: it is no KEY=VALUE, or the key is in neither."""
    key, separator, value = text.partition("=")
    given, text = text, text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
    path = tuple(part.strip() for part in key.split("."))
    if not separator or not all(path):
        raise InvalidInput(f"--set {text}: expected KEY=VALUE, as in  --set roles.actor.learning_rate=1e-6")
    if len(path) > _MOST_NESTED:
        raise InvalidInput(f"--set {text}: a key with {len(path)} names is none of a DAG or a run file")
    if wrong := _misplaced(dag.data, path, given):
        raise InvalidInput(wrong)
    in_dag = path[0] in _OF_DAG or (path[0] == "roles" and len(path) > 2 and path[2] in Role.model_fields)
    value = value.removeprefix(" ") if key.endswith(" ") else value
    (dag if in_dag else run).override(path, given_value(Dag if in_dag else Run, path, value, f"--set {text}"), text)


def given_value(kind: type[Document], path: tuple[str, ...], text: str, shown: str) -> Any:
    """Return the value of a key of a document, as written after the `=` of `--set`. For a key that takes text it is
    this text with its blanks, unless it stands in quotes; for any other it is YAML without comments."""
    expected, optional = type_at(kind, path)
    bare = text.strip()
    if _QUOTED.fullmatch(bare) or (optional or expected is not str) and text in ("", "null", "~"):
        return parse_value(text, shown)
    if expected is str or (expected == list[str] and not bare.startswith(("[", "- "))):
        return text
    value = parse_value(text, shown) if not bare.startswith("#") else bare
    return bare if isinstance(value, str) else value


def _misplaced(dag: dict[str, Any], path: Sequence[str], text: str) -> Diagnostic | None:
    """Return the mistake of a key that is of another place than the one where it was set, with that place."""
    nodes = dag.get("nodes")
    nodes = {name: node for name, node in nodes.items() if isinstance(node, dict)} if isinstance(nodes, dict) else {}
    where = Location(f"--set {text[:_WIDTH]}")
    if path[0] == "nodes" and len(path) > 2 and nodes:
        if path[1] not in nodes:
            return Diagnostic(f"there is no node `{path[1]}`", where, did_you_mean(path[1], nodes, "Nodes"))
        if path[2] not in _OF_NODE and nearest(path[2], _OF_NODE) is None:
            hint = f"Settings of a node's function stand below `with`. {_instead(path[:2], ('with', *path[2:]), text)}"
            return Diagnostic(f"unknown key `{path[2]}`", where, f"{hint}\n{listing(_OF_NODE)}")
    if path[0] in _OF_DAG or path[0] in Run.model_fields:
        return None
    place = _place(dag, nodes, path)
    return Diagnostic(f"unknown key `{path[0]}`", where, _instead(place, (), text)) if place else None


def _place(dag: dict[str, Any], nodes: dict[str, Any], path: Sequence[str]) -> tuple[str, ...]:
    """Return the whole path of a key of which only the end was given; () if there is none."""
    first, *_ = path
    if first in nodes and len(path) > 1:
        return ("nodes", *path) if path[1] in _OF_NODE else ("nodes", first, "with", *path[1:])
    roles = [*dag["roles"]] if isinstance(dag.get("roles"), dict) else []
    if first in roles and len(path) > 1:
        return ("roles", *path)
    if nearest(first, [*Run.model_fields, *Dag.model_fields]) in _OF_DAG:
        return (nearest(first, _OF_DAG) or "", *path[1:])
    owners = [name for name, node in nodes.items() if isinstance(node.get("with"), dict) and first in node["with"]]
    if owners:
        return ("nodes", owners[0], "with", *path)
    own = first if first in RoleRun.model_fields else nearest(first, RoleRun.model_fields)
    if own and roles and nearest(first, Run.model_fields) is None:
        return ("roles", roles[0], own, *path[1:])
    return ()


def _instead(above: Sequence[str], below: Sequence[str], text: str) -> str:
    return f"Instead:  --set {'.'.join((*above, *below))}={text.partition('=')[2]}"
