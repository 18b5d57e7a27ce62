"""Write docs/run_file.md, the reference of the run file's keys, from distflow/config/run.py; dags/schema/, the JSON
schemas of what users write; docs/algorithms/, a page of each shipped DAG with its curve; docs/models.md, what becomes
of each family of models, from benchmarks/results/families.json; docs/pictures/healthy.svg, curves of recorded runs with
and without faults: `make docs`.

A key's kind, bounds and default are those of its pydantic model; what it means is the text below the field.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.charts import BLUE, RED, Axes, picture, text  # noqa: E402 - needs the path above
from distflow.cli.json_schema import KINDS, descriptions, schema  # noqa: E402 - needs the path above
from distflow.config.run import Run  # noqa: E402
from distflow.config.yaml_source import Document  # noqa: E402 - needs the path above
from workers.engines.rounding import LOOSE_SHARE, SHARE  # noqa: E402

PAGE, SCHEMAS = ROOT / "docs/run_file.md", ROOT / "dags/schema"
MODELS, FAMILIES = ROOT / "docs/models.md", ROOT / "benchmarks/results/families.json"
ALGORITHMS, CURVES = ROOT / "docs/algorithms", ROOT / "benchmarks/results/algorithms.json"
HEALTH, FAULTS = ROOT / "docs/pictures/healthy.svg", ROOT / "benchmarks/results/learning_faults.json"
HEAD = """# The run file

<!-- Made by `make docs` from distflow/config/run.py: change it there. -->

The DAG is the algorithm. A run file says what it runs on: models, data, steps, engines, and how ranks share the work.
Most runs need ten of these keys: [settings that matter](first_settings.md).

- **Use.** `distflow run DAG --run FILE` (torchrun: `--run-file FILE`). `--set roles.actor.learning_rate=1e-6` sets one.
- **Mistakes.** Unknown keys and wrong values are refused, with the line and the nearest right key.
- **Paths** are looked up in the current folder, next to the run file, and among the shipped files.
- **Examples** are in `dags/runs/`. Defaults stand in brackets.

"""
_KINDS = {"string": "text"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "minLength": "length ≥",
           "multipleOf": "a multiple of"}


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n\n".join("\n".join(_section(place, kind)) for place, kind in documents(Run, "")) + "\n"


def documents(kind: type[Document], place: str) -> Iterator[tuple[str, type[Document]]]:
    """Yield a document and all that it holds, each with its keys as in `roles.NAME.generation`."""
    yield place, kind
    for name, field in kind.model_fields.items():
        for inner in _models(field.annotation):
            plural = {dict: ".NAME", list: "[]"}.get(typing.get_origin(field.annotation), "")
            yield from documents(inner, f"{place}.{name}{plural}".lstrip("."))


def _models(annotation: Any) -> list[type[Document]]:
    """Return the documents that an annotation speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _models(part)]


def _section(place: str, kind: type[Document]) -> Iterator[str]:
    yield f"## `{place}:`" if place else "## The file itself"
    yield f"\n{_text(inspect.getdoc(kind))}\n"
    if not kind.model_fields:
        return
    schema, texts = kind.model_json_schema(), descriptions(kind)
    for name in kind.model_fields:
        value = schema["properties"][name]
        default = "required" if name in schema.get("required", ()) else _default(value)
        yield f"- **`{name}`**: {_value(value)}{f' ({default})' if default else ''}. {_text(texts.get(name, ''))}"


def _value(schema: dict[str, Any]) -> str:
    """Return which values a key takes."""
    if choices := [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]:
        return " or ".join(map(_value, choices))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(map(_code, schema["enum"]))
    if "$ref" in schema:
        return "below"
    if schema.get("type") == "array":
        return f"list of {_value(schema['items'])}"
    if schema.get("type") == "object":
        return f"map of {_value(schema['additionalProperties'])}"
    bounds = [f"{words} {schema[key]:g}" if schema[key] < 2**53 else f"{words} 2^{schema[key].bit_length() - 1}"
              for key, words in _BOUNDS.items() if key in schema]
    kind = str(schema.get("type", "any"))
    return " ".join([_KINDS.get(kind, kind), ", ".join(bounds)]).strip()


def _default(schema: dict[str, Any]) -> str:
    """Return the default that a line shows: none where a key may be left out, or where its own table has defaults."""
    value = schema.get("default")
    if value in (None, "", []) or isinstance(value, dict):
        return ""
    return _code(value)


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`"


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def algorithm_pages() -> dict[str, str]:
    """Return the page of each shipped DAG, and its curve where it has one, by file name."""
    curves, pages = json.loads(CURVES.read_text()), {}
    for file in sorted((ROOT / "dags").glob("*.yaml")):
        lines = file.read_text().splitlines()
        comment = [line.removeprefix("#").strip() for line in lines if line.startswith("#") and "$schema=" not in line]
        dag = "\n".join(line for line in lines if not line.startswith("#")).strip()
        curve = ""
        if file.stem in curves:
            pages[f"{file.stem}.svg"] = curve_picture(curves[file.stem])
            curve = _PICTURE.format(name=file.stem, seeds=", ".join(curves[file.stem]),
                                      steps=max(map(int, next(iter(curves[file.stem].values())))))
        pages[f"{file.stem}.md"] = _ALGORITHM.format(name=file.stem, about=" ".join(comment), dag=dag, picture=curve)
    return pages


_PICTURE = """
![Held-out accuracy]({name}.svg)

Held-out accuracy on the embedded arithmetic task, {steps} steps from the demonstration's weak model (`python -m
benchmarks.algorithms --curves FILE`). A line is a seed ({seeds}), a dot a validation over 240 problems.
"""
_ALGORITHM = """# `{name}`

<!-- Made by `make docs` from dags/{name}.yaml: change it there. -->

{about}

```yaml
{dag}
```

Run it on the embedded task: `distflow run {name}`. Columns and settings of a function: `distflow nodes FUNCTION`.
{picture}"""


def curve_picture(curves: dict[str, dict[str, float]]) -> str:
    """Return an SVG with a line for each seed. curves: accuracy by step, by seed."""
    last = max(int(step) for curve in curves.values() for step in curve)
    axes = Axes(46, 14, 582, 212, last)
    parts = [*axes.grid(range(0, last + 1, max(last // 5, 1)), (0, 0.25, 0.5, 0.75, 1)), text(628, 259, "step", "end")]
    for curve in curves.values():
        points = [(int(step), value) for step, value in curve.items()]
        parts += [axes.curve(points, BLUE), *axes.dots(points, BLUE)]
    return picture(640, 260, parts)


_PANELS = (("reward/mean", "rate_too_high", "a rate far too high"),
           ("policy/entropy", "entropy_explosion", "entropy grows"),
           ("reward/zero_std_groups", "no_signal", "problems too hard"),
           ("response/truncated", "truncation", "max_new_tokens too short"),
           ("policy/kl_reference", "kl_runs_off", "no KL, a high rate"),
           ("mismatch/logprob_mean", "mismatch", "the rollout is another policy"))


def health_picture() -> str:
    """Return an SVG of a healthy run's metrics, each next to those of a run with a fault."""
    runs, parts = json.loads(FAULTS.read_text()), []
    for place, (metric, fault, words) in enumerate(_PANELS):
        left, top = place % 3 * 300 + 40, place // 3 * 170 + 40
        curves = {color: runs[run]["series"][metric][:32] for color, run in
                  ((BLUE, "healthy/grpo-1"), (RED, f"grpo/{fault}"))}
        axes = Axes(left, top, 240, 100, 31, max(value for curve in curves.values() for value in curve))
        parts += [text(left, top - 24, metric), text(left, top - 9, words, more=f'fill="{RED}"'),
                  text(left - 5, top + 5, f"{axes.highest:.2g}", "end"), text(left - 5, top + 104, "0", "end"),
                  axes.frame(), text(left + 240, top + 115, "step 32", "end")]
        parts += [axes.curve(enumerate(curve), color) for color, curve in curves.items()]
    return picture(900, 340, parts)


_ASKED = "--set roles.actor.model=FOLDER: role `actor`: "  # how a message of planning begins
_COUNT = 0.01  # by which planning may be wrong
_LIBRARIES = {"vllm": "vLLM", "sglang": "SGLang"}  # engines that sample in their own environments
_CHECKS = ("trained", "sampled", "merged", "planned", "proved")
_MODELS = """# Models

<!-- Made by `make docs` from benchmarks/results/families.json; `python -m benchmarks.families` measures it again. -->

{right} of the {language} decoder-only language models of transformers {transformers} train and sample right: look for
your `model_type` below. A family that cannot is refused when it is planned, by the proofs of a run's start, or when
its model is saved and read back.

| way | why | families |
|---|---|---|
{ways}

- **`own`** is distflow's attention: packed rows, prompts that are read once, slots of keys and values. A model gets it
  where its code shows that nothing else happens in it. Its name does not matter.
- **`plain`** is the model's own code on whole rows: slower, and right.

All of these train, sample (`rollout: hf`), merge adapters and are counted by planning within {count:.0%}, except:

| family | trains | samples | adapters | planned | why |
|---|---|---|---|---|---|
{exceptions}

Each family was built tiny with random weights and compared with its own eager attention in float32, one row alone:
log-probabilities before and after an update, gradients, and the saved model. Differences are at most {bound:g} of the
largest value, and {loose:g} for gradients and the plain way.

## vLLM and SGLang

Each engine sampled from a tiny model in float32 on a CPU, before and after an update in place. The log-probabilities
were compared with those of the saved model. Many refusals are of the builds for CPUs (the reasons are in
`benchmarks/results/families.json`). An engine without a class for a family takes the class of transformers. Measured
with {engines}.

| engine | has a class | samples | families |
|---|---|---|---|
{sampled}

Other families were not asked yet. Differences of what is right are at most {loose:g} of the largest value. The proofs
of a run's start make this comparison with the run's own model.

- vLLM on a CPU: its rotary kernel is wrong for queries with an axis of heads (DeepSeek-V2, V3, GLM-4-MoE-Lite, LFM2).
  distflow sets `custom_ops: ["-rotary_embedding"]` there, and vLLM computes these embeddings in PyTorch.
- `mistral` in SGLang: its class is that of Llama, without a sliding window. The tiny model has one. Mistral's files
  since version 0.2 have none.
- `gemma2` in SGLang: `torch_native`, its attention for any CPU, leaves out soft caps.

## What is no decoder-only language model

Transformers registers these as causal language models, too.

| kind | result | families |
|---|---|---|
{others}
"""


def models_page() -> str:
    """Return the page of model families."""
    data = json.loads(FAMILIES.read_text())
    families: dict[str, dict[str, Any]] = data["families"]
    language = {name: each for name, each in families.items() if each["kind"] == "language model"}
    verdicts = [verdict(each) for each in language.values()]
    others = {name: each for name, each in families.items() if name not in language}
    measured = [name for name in _LIBRARIES if name in data]
    return _MODELS.format(
        right=verdicts.count("right"), language=len(language), transformers=data["transformers"], bound=SHARE,
        loose=LOOSE_SHARE, count=_COUNT,
        ways=_grouped({name: each for name, each in language.items() if "way" in each["trained"]}, _way),
        exceptions=_exceptions(language),
        engines=" and ".join(f"{_LIBRARIES[name]} {data[name]}" for name in measured),
        sampled="\n".join(_grouped({name: each for name, each in language.items() if engine in each},
                                   functools.partial(_sampled, engine)) for engine in measured),
        others=_grouped(others, lambda each: (each["kind"], verdict(each))))


def _grouped(families: dict[str, dict[str, Any]], cells: Callable[[dict[str, Any]], tuple[str, ...]]) -> str:
    """Return a line for each group of families with the same cells."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, each in families.items():
        groups.setdefault(cells(each), []).append(f"`{name}`")
    return "\n".join(f"| {' | '.join(group)} | {', '.join(names)} |" for group, names in sorted(groups.items()))


def _way(family: dict[str, Any]) -> tuple[str, str]:
    """Return the way in which a family is computed, and why, without the names of its own classes."""
    way = family["trained"]["way"]
    if way == "own":
        return way, ""
    reason = re.sub(r" by `\w+`, which is no attention that can be replaced", " otherwise than by attention", way)
    return "plain", reason


def _sampled(engine: str, family: dict[str, Any]) -> tuple[str, ...]:
    """Return whether an engine of another library has a class for a family, and what came of sampling with it."""
    found = family[engine]
    result = judged(family, engine).replace("fails", "refused")
    by = "" if result == "right" else " by the proofs of a start" if "first weights" in found else " by the engine"
    return _LIBRARIES[engine], "yes" if found["knows"] else "no", result + by


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 160, placeholder=" …").replace("|", "/")


def _exceptions(families: dict[str, dict[str, Any]]) -> str:
    """Return a line for each family of which not all checks are right, with what was said."""
    lines = []
    for name, each in families.items():
        late = judged(each, "proved") == "refused"  # by the proofs of a run's start
        found = ["refused" if late and judged(each, check) in ("wrong", "fails") else
                 judged(each, check).replace("right", "yes") for check in _CHECKS[:4]]
        said = (each.get(check, {}).get(key, "").removeprefix(_ASKED).partition(". ")[0] for check in _CHECKS
                for key in ("refused", "failed"))
        if set(found) != {"yes"}:
            why = _shortened("; ".join(dict.fromkeys(filter(None, said))))
            lines.append(f"| `{name}` | {' | '.join(found)} | {why} |")
    return "\n".join(lines)


def verdict(family: dict[str, Any]) -> str:
    """Return whether a family trains and samples: right, refused (when it is planned, or by the proofs of a run's
    start), fails, wrong, or not built."""
    if "built" in family:
        return "not built"
    found = {judged(family, check) for check in ("trained", "sampled")}
    if found != {"right"} and judged(family, "proved") == "refused":
        return "refused"
    return next(worst for worst in ("wrong", "fails", "refused", "right") if worst in found)


def judged(family: dict[str, Any], check: str) -> str:
    """Return what a check found: right, refused, fails or wrong; unknown where planning counts no parameters."""
    found = family.get(check, {})
    if "refused" in found or "failed" in found:
        return "refused" if "refused" in found else "fails"
    if "parameters" in found:
        known, counted = found["parameters"], found["counted"]
        return "unknown" if counted is None else "right" if abs(counted - known) <= _COUNT * known else "wrong"
    bound = SHARE if family.get("trained", {}).get("way") == "own" and check not in _LIBRARIES else LOOSE_SHARE
    wrong = any(value > (LOOSE_SHARE if name == "gradients" else bound) for name, value in found.items()
                if isinstance(value, float))
    return "wrong" if wrong or "lost" in found else "right"


if __name__ == "__main__":
    PAGE.write_text(page())
    MODELS.write_text(models_page())
    HEALTH.write_text(health_picture())
    ALGORITHMS.mkdir(exist_ok=True)
    for name, text in algorithm_pages().items():
        (ALGORITHMS / name).write_text(text)
    SCHEMAS.mkdir(exist_ok=True)
    for name in KINDS:
        (SCHEMAS / f"{name}.json").write_text(json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n")
    print(PAGE, MODELS, SCHEMAS, ALGORITHMS)
