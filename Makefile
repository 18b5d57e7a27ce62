# make demo: the main job, from a bare machine.   make test: the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
SEED ?= 0

.PHONY: install demo test lint gpu sglang-env clean

install: $(VENV)/installed

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e .[test]
	touch $@

demo: install
	$(BIN)/distflow demo --seed $(SEED)

test: install
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

gpu: install
	$(BIN)/python -m pytest -m gpu

SGLANG := .venv-sglang
sglang-env: $(SGLANG)/installed

$(SGLANG)/installed: tests/engines/sglang_on_cpu/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 xgrammar==0.2.8
	echo $(CURDIR)/$(<D) > `$(SGLANG)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"`/on_cpu.pth
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) build *.egg-info
