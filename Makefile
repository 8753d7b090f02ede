# Targets for daily work; `make help` lists them. Python 3.11 to 3.13 is required, and a C++ compiler for speed.
# Once everything is installed and downloaded, no target but lock needs a network.

PYTHON  ?= python3
VENV    ?= .venv
HOST    ?= 127.0.0.1
PORT    ?= 8000
MODEL   ?=
# Further extras of pyproject.toml for serve, for example EXTRAS=hub,plots.
EXTRAS  ?=
# Number of test processes.
TESTERS ?= 2
DEVICE  ?= cuda
BIN     := $(VENV)/bin

# Small machines have two cores: a spinning thread pool per server or test process would slow all of them.
export OMP_NUM_THREADS ?= 2

.PHONY: kernels model
.PHONY: help serve test test-all test-real test-gpu check format docs bench lock clean

help:
	@echo "make serve     install, download Qwen2.5-Coder 1.5B once (1.1 GB; on slow links 0.5B, 490 MB), serve http://$(HOST):$(PORT)"
	@echo "               (MODEL=path, PORT=, HOST=, EXTRAS=hub,plots, PYTHON=python3.12; MODEL=demo: the bundled model)"
	@echo "make test      quick tests: unit, kernels, engine and API (TESTERS=processes)"
	@echo "make test-all  all tests but the soaks, with Ray and Triton (MARKS=soak TESTERS=0: the soaks, which take hours)"
	@echo "make test-real  download two Qwen2.5-Coder models once (1.5 GB) and test tool calls and answers with them"
	@echo "make test-gpu  tests of kernels, engines and servers on a GPU (DEVICE=cuda:1, TESTERS=14, MARKS=slow)"
	@echo "make check     formatter, linter, types, import contracts and style of texts"
	@echo "make format    apply the formatter and the fixes of the linter"
	@echo "make docs      build the documentation site in build/docs and check its links"
	@echo "make bench     compare the default model with the programs in work/peers (BENCH=options of benchmarks/peers.py)"
	@echo "make lock      resolve requirements.lock again"
	@echo "make clean     remove $(VENV), compiled kernels and the caches of all tools"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 to 3.13 or set PYTHON="; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: Windlass needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: set PYTHON=, for example make serve PYTHON=python3.12" % v[:2])'
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not create $(VENV): on Debian or Ubuntu install python3-venv"; exit 2; }

# pip decides which packages are missing. A marker per set of extras saves the ten seconds that it takes where nothing has changed.
# Python compiles the modules that it imports: pip would compile all modules of torch, which takes a third of the installation.
SOURCES := pyproject.toml setup.py constraints.txt clients/pyproject.toml
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Jobs of make, unlike those of a shell, all end with ctrl-C.
PARALLEL := $(MAKE) --no-print-directory -j3

$(VENV)/.installed-%: $(BIN)/python $(SOURCES)
	@echo "== installing packages into $(VENV)"
	@WINDLASS_ISAS=none $(INSTALL) --no-compile -e '.$(if $(filter-out server,$*),[$*])'
	@touch $@ $(VENV)/.installed-server

# Compiles the kernels for this processor unless that is done. Without a compiler everything works, several times slower.
kernels: $(BIN)/python
	@$(BIN)/python kernels/cpu/build.py || true

# Downloads a known model without any installed package. The server reports a failure, and continues the download.
model: $(BIN)/python
	@PYTHONPATH=src $(BIN)/python -m windlass.server.startup.default_model $(or $(MODEL),$(WINDLASS_MODEL)) || true

serve: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-$(or $(EXTRAS),server) kernels model
	@exec $(BIN)/windlass serve $(MODEL) --host $(HOST) --port $(PORT)

# Without cached bytecode every process would compile all modules again; the tests start hundreds of them.
serve test test-all test-real test-gpu: export PYTHONDONTWRITEBYTECODE :=
test test-all test-real test-gpu: export OMP_NUM_THREADS = 1

# tests/conftest.py marks the quick tests. A file stays in one process, because its tests share servers.
PYTEST := $(BIN)/pytest -n $(TESTERS) --dist loadfile

test: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-dev kernels
	$(PYTEST) -m quick tests/unit tests/kernels tests/engine tests/api

# Long tests are collected first. The Ray cluster needs all cores, so it runs alone; 5: none of its tests has such a mark.
test-all: MARKS ?= not soak
test-all: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-dev,e2e kernels
	@$(BIN)/python -c 'import ray, triton' 2>/dev/null || $(INSTALL) -e '.[gpu,ray]' \
	|| { ! $(BIN)/python -m pip index versions pip >/dev/null 2>&1 && echo "note: no package index: tests of Ray and Triton skip"; }
	$(PYTEST) --no-loadscope-reorder -m "$(MARKS)" --ignore tests/e2e/test_ray.py
	$(BIN)/pytest -m "$(MARKS)" tests/e2e/test_ray.py || [ $$? = 5 ]

test-real: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-dev kernels
	$(BIN)/windlass pull qwen2.5-coder-1.5b
	$(BIN)/windlass pull qwen2.5-coder-0.5b
	$(BIN)/pytest -s -m real_model tests/e2e/test_qwen_coder.py

# Tests of a scope share engines; slow ones are too long for one process. The servers are tested even if engines fail.
test-gpu: MARKS ?= not slow and not soak
test-gpu: export CUBLAS_WORKSPACE_CONFIG = :4096:8
test-gpu: export WINDLASS_TEST_DEVICE = $(DEVICE)
test-gpu: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-dev,e2e kernels
	$(PYTEST) -m "$(MARKS)" --dist $(if $(findstring not slow,$(MARKS)),loadscope,load) tests/kernels/triton_programs tests/engine; engines=$$?; \
	$(PYTEST) -m "$(MARKS)" tests/api/startup tests/api/cli tests/e2e/test_end_to_end.py tests/e2e/test_*_over_http.py && exit $$engines

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/docs/style.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "== open build/docs/index.html"

bench: $(BIN)/python
	+@$(PARALLEL) $(VENV)/.installed-dev kernels
	$(BIN)/windlass pull qwen2.5-coder-1.5b
	$(BIN)/python benchmarks/peers.py speed $(BENCH)
	$(BIN)/python benchmarks/peers.py server

lock: $(BIN)/python
	$(INSTALL) --quiet uv
	$(BIN)/python deploy/make_lock.py $(BIN)/uv

clean:
	rm -rf $(VENV) build dist kernels/cpu/*.so src/*.egg-info clients/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
