# make demo: the main job, from a bare machine.   make test: the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
SEED ?= 0

.PHONY: install demo test lint gpu clean

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

clean:
	rm -rf $(VENV) build *.egg-info
