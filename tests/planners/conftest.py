"""A DAG and a run of one's own for a plan: `plan_of(nodes)`."""

from __future__ import annotations

import pytest
import yaml
from planning import FUNCTIONS, LEARN, RUN

from distflow.config.load import load
from distflow.config.spec import Spec
from planners import plan


@pytest.fixture
def spec_of(tmp_path, monkeypatch):
    """`spec_of(nodes, dag_roles, **run)`: a node that trains the actor is added if there is none."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planned.py").write_text(FUNCTIONS)
    (tmp_path / "data.jsonl").write_text('{"question": "?", "answer": "!"}\n')

    def make(nodes: dict, dag_roles: dict | None = None, **run) -> Spec:
        dag = {"name": "mine", "imports": ["planned"], "roles": {"actor": {"trained": True}, **(dag_roles or {})},
               "nodes": {"learn": LEARN, **nodes}}
        (tmp_path / "dag.yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, **run}, sort_keys=False))
        return load(str(tmp_path / "dag.yaml"), str(tmp_path / "run.yaml"))

    return make


@pytest.fixture
def plan_of(spec_of):
    """`plan_of(nodes, dag_roles, ranks=2, **run)`."""
    return lambda nodes, dag_roles=None, ranks=2, **run: plan(spec_of(nodes, dag_roles, **run), ranks)


@pytest.fixture
def engines(monkeypatch):
    """All engines may be planned for, in a version that was tested."""
    monkeypatch.setattr("distflow.config.models.installed", lambda engine: next(iter(engine.tested), "1.0"))
