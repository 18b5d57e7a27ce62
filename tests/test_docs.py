"""docs/run_file.md is what the schema says, and the schema says something about each key."""

import importlib.util
import os
import subprocess
import sys

import pytest
from harness import ROOT

SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)

DOCUMENTS = list(generate.documents(generate.Run, ""))


def test_the_page_is_made_from_the_schema_as_it_is():
    assert generate.PAGE.read_text() == generate.page(), "docs/run_file.md is stale. Make it again:  make docs"


def test_the_pages_of_algorithms_are_made_from_the_dags_as_they_are():
    made = {file.name: file.read_text() for file in generate.ALGORITHMS.iterdir()}
    assert made == generate.algorithm_pages(), "docs/algorithms/ is stale. Make it again:  make docs"
    assert {f"{file.stem}.md" for file in (ROOT / "dags").glob("*.yaml")} <= made.keys()


def test_the_picture_of_healthy_metrics_is_made_from_the_recorded_runs():
    assert generate.HEALTH.read_text() == generate.health_picture(), "it is stale. Make it again:  make docs"


@pytest.mark.parametrize(("place", "kind"), DOCUMENTS, ids=[place or "run" for place, _ in DOCUMENTS])
def test_each_key_is_described_below_its_field(place, kind):
    assert [name for name in kind.model_fields if not generate.descriptions(kind).get(name, "").strip()] == []


def test_the_page_shows_kinds_bounds_and_defaults():
    page = generate.page()
    assert [line for line in ("steps`**: integer > 0 (required)", "learning_rate`**: number > 0 (`1e-06`)",
                              "engine`**: `fsdp`, `megatron` (`fsdp`)", "faults`**: list of below",
                              "betas`**: list of number ≥ 0, < 1 (`[0.9, 0.95]`)", "validation`**: below")
            if f"\n- **`{line}. " not in page] == []


@pytest.mark.run
def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
                          cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {page.parent.name for page in (tmp_path / "site").glob("*/index.html")}
    assert {"tutorial", "running", "run_file", "coming_from"} <= pages
