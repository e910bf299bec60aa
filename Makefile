# Zero-Layer: everything that a newcomer or CI runs. `make help` lists it.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# What you may set: make serve ENGINES=3 PORT=9000 MODEL=/models/mine ARGS="-- --max-model-len 4096"
ENGINES      ?= 2
PORT         ?= 8000
MODEL        ?=
SOAK_MINUTES ?= 20
ARGS         ?=
PYTHON       ?= $(firstword $(shell command -v python3.11 python3 2>/dev/null))
# Where torch's CPU wheel is when the configured package index has none (PyPI itself does not).
TORCH_INDEX  ?= https://download.pytorch.org/whl/cpu

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCK   := requirements/cpu.lock
LOCKED := $(VENV)/.from-lock
READY  := $(VENV)/.ready

UNIT_TESTS   := $(wildcard tests/unit tests/house)
ENGINE_TESTS := $(wildcard tests/engine tests/process)

# Targets measure time on the cores they share, so `make -j` runs them one after the other too.
.NOTPARALLEL:
.PHONY: help demo serve test test-unit test-engine check format soak bench venv clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo
	@echo "  variables: ENGINES=$(ENGINES) PORT=$(PORT) MODEL=<path or name> SOAK_MINUTES=$(SOAK_MINUTES) ARGS=\"...\""

demo: venv ## two engines, one killed and one frozen in mid-sentence, and what it cost
	@$(BIN)/zerolayer demo --engines $(ENGINES) $(ARGS)

serve: venv ## an OpenAI server on ENGINES engines at PORT; MODEL defaults to the packaged one
	@exec $(BIN)/zerolayer serve $(MODEL) --engines $(ENGINES) --port $(PORT) $(ARGS)

test: test-unit test-engine ## unit tests first, then tests on real engines

test-unit: venv ## tests that need no engine (seconds)
	@$(BIN)/python -m pytest -n auto $(UNIT_TESTS) $(ARGS)

test-engine: venv ## tests that start, kill and stop real vLLM engines (minutes)
	@$(if $(ENGINE_TESTS),$(BIN)/python -m pytest -m "not soak" $(ENGINE_TESTS) $(ARGS),echo "no engine tests yet")

check: venv ## formatting, lint, types, import layers, house rules
	@echo "== ruff format";  $(BIN)/ruff format --check .
	@echo "== ruff check";   $(BIN)/ruff check .
	@echo "== mypy";         $(BIN)/mypy
	@echo "== import layers"; $(BIN)/lint-imports --no-cache --no-logo
	@echo "== house rules";  $(BIN)/python -m pytest -q tests/house

format: venv ## apply ruff's formatting and its safe fixes
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

soak: venv ## SOAK_MINUTES of random kills, freezes and disconnects under load
	@$(BIN)/python -m pytest -s -m soak --soak-minutes $(SOAK_MINUTES) tests/process $(ARGS)

bench: venv ## dispatch, snapshot, failover and overhead, each measured here and now
	@$(BIN)/zerolayer bench dispatch --engines 8,64,256
	@$(BIN)/zerolayer bench snapshot
	@$(BIN)/zerolayer bench failover
	@$(BIN)/zerolayer bench overhead

venv: $(READY) ## .venv from the lock file (about two minutes, once)

$(READY): $(LOCKED) pyproject.toml
	@echo "== installing zerolayer itself into $(VENV)"
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

$(LOCKED): $(LOCK)
	@if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	  echo "zerolayer: Python 3.11 is needed, found: $$("$(PYTHON)" --version 2>/dev/null || echo none)" >&2; \
	  echo "  fix: apt-get install python3.11 python3.11-venv, or make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@echo "== 1/3 creating $(VENV) with $$("$(PYTHON)" --version)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  "$(PYTHON)" -m venv --without-pip $(VENV) && \
	  "$(PYTHON)" -m pip --python $(BIN)/python install -qq --no-input pip; }
	@echo "== 2/3 downloading and installing $$(grep -c == $(LOCK)) pinned packages, 2 to 3 minutes"
	@torch="$$(grep '^torch==' $(LOCK))"; \
	  $(PIP) install -qq --no-compile --no-deps "$$torch" 2>/dev/null || { \
	    echo "   $$torch is not on the configured index, taking it from $(TORCH_INDEX)"; \
	    $(PIP) install -qq --no-compile --no-deps --index-url $(TORCH_INDEX) "$$torch"; }
	@$(PIP) install -qq --no-compile --no-deps -r $(LOCK)
	@echo "== 3/3 compiling them to bytecode on all cores"
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/(?!llama|auto)' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

clean: ## remove .venv, caches and build leftovers (the converted model stays in your cache folder)
	@rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
