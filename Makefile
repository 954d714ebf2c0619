# Everything sets itself up in .venv; nothing is fetched again while pyproject.toml stays as it is.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
TYPING := $(VENV)/typing
# The first of these that is Python 3.11 or newer and has venv; or say `make setup PYTHON=/path/to/python`.
# The system's comes first: distributions build it with profile-guided optimisation, which saves a fifth of the time.
PYTHON := $(shell for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.14; do \
  $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# One thread a test process: more threads than cores make torch slower, not faster.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format parity soak clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(STAMP)  ## Make .venv with everything that Shipway needs

$(STAMP): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "Shipway needs Python 3.11 or newer; found: $$(python3 --version 2>&1). \
	Install one with its venv module (on Debian and Ubuntu, apt-get install python3-venv), \
	or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "setuptools>=80" wheel
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  set -x; $(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev,gpu]'; \
	else \
	  set -x; $(BIN)/python -m pip install --quiet torch==2.13.0 && \
	  $(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev]'; \
	fi
	@mkdir -p $(TYPING)/shipway
	@for folder in schemas compiler templates blueprints runtime; do \
	  ln -sfn ../../../$$folder $(TYPING)/shipway/$$folder; done
	@touch $@

demo: $(STAMP)  ## Plan, build and train the tiny blueprint on this machine
	$(BIN)/shipway plan tiny
	$(BIN)/shipway build tiny
	$(BIN)/shipway launch build/tiny
	$(BIN)/shipway status

test: lint  ## Lint, types, layering contracts, and all tests, three at a time: many wait for other processes
	@# Once: under PYTHONDONTWRITEBYTECODE every process that a test starts would compile them anew.
	$(BIN)/python -m compileall -q -j 2 schemas compiler templates runtime bench
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## Style, types and layering contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p shipway.schemas -p shipway.compiler -p shipway.runtime.kernels
	$(BIN)/lint-imports --no-logo

format: $(STAMP)  ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(STAMP)  ## Kill, stop and reshard a run at 30 random moments (SEED=7: other ones)
	$(BIN)/python -W ignore -m bench.soak $(if $(SEED),--seed $(SEED))

parity: $(STAMP)  ## Train every layout against one process and print the table (DEVICE=cuda, DTYPE=bf16 or fp8)
	$(BIN)/python -W ignore -m shipway.runtime.parity --device $(or $(DEVICE),cpu) --dtype $(or $(DTYPE),fp32)

clean:  ## Remove .venv and the caches; builds and runs stay
	rm -rf $(VENV) dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
