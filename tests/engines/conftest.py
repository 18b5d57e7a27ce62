"""Engines are started once for a module: each test begins with the model's first weights."""

import copy
import functools
import gc

import pytest
import torch
from engines.rollouts import HALFWAY, TRAITS, build, engines, tiny
from torch.distributed.device_mesh import init_device_mesh

from workers.engines.devices import NAMES


@pytest.fixture
def launch(launch):
    """By torchrun: these libraries take much of their state from how a process began."""
    return functools.partial(launch, torchrun=True)


@pytest.fixture(scope="module")
def mesh(alone):
    """A layout of one rank."""
    return init_device_mesh("cpu", (1,) * len(NAMES), mesh_dim_names=NAMES)


@pytest.fixture(scope="module", params=engines())
def name(request):
    return request.param


@pytest.fixture(scope="module")
def started(name, mesh):
    model = tiny()
    engine = build(name, mesh, model)
    yield engine, model
    engine.close()


@pytest.fixture
def model(started):
    """The model of the engine's weights; a copy, so that a test may change it."""
    return copy.deepcopy(started[1])


@pytest.fixture
def engine(started, name, request):
    """A running engine, with the first weights as version 0 and nothing under way."""
    reason = TRAITS[name].exempt.get(request.function.__name__)
    if reason:
        pytest.skip(f"{name}: {reason}")
    engine, model = started
    engine.load(((each, parameter.data) for each, parameter in model.named_parameters()), version=0)
    settings, slow = engine.generation, TRAITS[name].slow if request.function.__name__ in HALFWAY else None
    if slow:
        slow(engine, 0.2)
    yield engine
    if slow:
        slow(engine, 0.0)
    engine.generation, engine.paused, engine.stop = settings, False, None
    if name != "hf":  # sessions of the others end their requests when they are collected
        gc.collect()


@pytest.fixture
def prompts():
    from distflow.data.batch import Ragged

    generator = torch.Generator().manual_seed(5)
    return Ragged.from_rows([torch.randint(5, 260, (length,), generator=generator) for length in (6, 2, 50, 19, 4, 11)])
