# The commands of the project. `make demo` and `make test` need only git, make and Python 3.11 or newer.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?=
SEED   ?= 1

.PHONY: demo test check format clean

demo: $(VENV)/train.stamp  ## train an agent and watch it learn
	@$(BIN)/agentfly demo --seed $(SEED) $(if $(MODEL),--model $(MODEL))

test: $(VENV)/dev.stamp  ## every test, slow ones included
	@$(BIN)/python -m pytest

check: $(VENV)/dev.stamp  ## format, lint, types, import contracts and the fast tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -m "not slow" -q

format: $(VENV)/dev.stamp  ## bring the code into its format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# A CPU build of torch is a tenth of the size of a CUDA build; where pip knows one, the first line takes it.
TORCH ?= torch==2.13.0

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AgentFly needs Python 3.11 or newer; make PYTHON=python3.12 says which one to use.")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: pyproject.toml | $(VENV)/bin/python
	@echo "Installing AgentFly and PyTorch into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/train.stamp
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:  ## remove what was built and installed here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
