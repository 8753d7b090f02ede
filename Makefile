# Windlass: one command each. `make serve` needs nothing but Python 3.11 to 3.13.

PYTHON ?= python3
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?=
BIN    := $(VENV)/bin

# Tests and servers share two cores on small machines; a spinning thread pool each would slow all of them.
export OMP_NUM_THREADS ?= 2

.PHONY: help serve test test-slow check format bench clean

help:
	@echo "make serve   install if needed and serve the bundled model on $(HOST):$(PORT)   (PORT=, HOST=, MODEL=)"
	@echo "make test    install if needed with the dev extra and run every test but the slow ones"
	@echo "make test-slow, make check (format, lint, types), make bench (beside the peers in work/peers; BENCH=options), make clean"

# A stamp per set of extras: pip runs only when the requirements have changed since.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 to 3.13 or set PYTHON="; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: Windlass needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: set PYTHON=, for example make serve PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not make $(VENV): on Debian or Ubuntu install python3-venv"; exit 2; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt $(wildcard setup.py kernels/cpu/*.cpp kernels/cpu/*.h)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(VENV)/.installed
	@exec $(BIN)/windlass serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(VENV)/.installed-dev
	$(BIN)/pytest -m "not slow"

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/prepare_peers.py
	$(BIN)/python benchmarks/peers.py $(BENCH)
	$(BIN)/python benchmarks/context_cost.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
