# Windlass: one command each. `make serve` needs Python 3.11 to 3.13 and, to be fast, a C++ compiler. It works without a network once all is
# installed.

PYTHON ?= python3
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?=
# What is installed beside the server: hub, plots, or both as EXTRAS=hub,plots.
EXTRAS ?=
# Processes that run the tests side by side.
TESTERS ?= 2
# Where make test-gpu computes, and which tests it runs.
DEVICE ?= cuda
MARKS  ?= not slow and not soak
BIN    := $(VENV)/bin

# Tests and servers share two cores on small machines; a spinning thread pool each would slow all of them.
export OMP_NUM_THREADS ?= 2

# What only releases take has an environment of its own.
RELEASE := build/release
TOOLS   := $(RELEASE)/bin

.PHONY: help serve test test-slow test-ray test-triton test-gpu soak check format docs bench clean lock sbom audit wheels

help:
	@echo "make serve      install if needed, get SmolLM2 135M (93 MB, once) and serve it on $(HOST):$(PORT)   (MODEL=demo: the bundled toy;"
	@echo "                PORT=, HOST=, EXTRAS=hub,plots)"
	@echo "make test       install if needed with the dev extra and run every test but the slow ones and the soaks"
	@echo "make test-slow  the slow tests; make test-ray: those on a Ray cluster, with the extra ray; make test-triton: kernels for GPUs,"
	@echo "                interpreted, with the extra gpu; make test-gpu: engines, kernels and real servers on a GPU (DEVICE=cuda:1,"
	@echo "                TESTERS=14, MARKS=slow)"
	@echo "make soak       attacks, fuzzing, simulation and load in their long form"
	@echo "make check      format, lint, types, imports; make format mends the first two"
	@echo "make docs       the documentation as a site in build/docs, its links checked"
	@echo "make bench      beside the peers in work/peers (BENCH=options)"
	@echo "make lock       requirements.lock anew; make sbom: what is installed, as CycloneDX; make audit: known holes in what is locked;"
	@echo "                make wheels: for Linux, in containers (docs/release.md)"
	@echo "make clean      away with $(VENV), the compiled kernels and what the tools keep"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install Python 3.11 to 3.13 or set PYTHON="; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: Windlass needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: set PYTHON=, for example make serve PYTHON=python3.12" % v[:2])'
	@echo "== making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not make $(VENV): on Debian or Ubuntu install python3-venv"; exit 2; }

# A stamp per set of extras: pip runs only when requirements or kernels have changed since, and setup.py compiles only kernels
# that have.
SOURCES := pyproject.toml setup.py constraints.txt clients/pyproject.toml kernels/cpu/sources.py kernels/cpu/src $(wildcard kernels/cpu/src/*.cpp kernels/cpu/src/*.h)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Where another compiler has come since, the kernels are to be compiled that were not.
KERNELS := $(wildcard kernels/cpu/_windlass_cpu*.so)
COMPILER := $(if $(KERNELS),,$(shell p=$$(command -v $(firstword $(CXX))) && echo $$p-$$($$p -dumpfullversion 2>/dev/null)))
# Which one could not compile them; nothing where it could.
NOTE_COMPILER = ls kernels/cpu/_windlass_cpu*.so > /dev/null 2>&1 && rm -f $(VENV)/.compiler || echo '$(COMPILER)' > $(VENV)/.compiler
LATE    := $(if $(COMPILER),$(if $(filter $(COMPILER),$(shell cat $(VENV)/.compiler 2>/dev/null)),,late-compiler))

.PHONY: late-compiler

$(VENV)/.installed: $(BIN)/python $(SOURCES) $(LATE)
	@echo "== installing into $(VENV): what Windlass needs; kernels that have changed are compiled (all: two minutes on two cores)"
	$(INSTALL) -e .
	@$(NOTE_COMPILER)
	@touch $@

$(VENV)/.installed-%: $(BIN)/python $(SOURCES) $(LATE)
	@echo "== installing into $(VENV): what Windlass needs, and $*; kernels that have changed are compiled (all: two minutes on two cores)"
	$(INSTALL) -e '.[$*]'
	@$(NOTE_COMPILER)
	@touch $@ $(VENV)/.installed

serve: $(VENV)/.installed$(if $(EXTRAS),-$(EXTRAS))
	@exec $(BIN)/windlass serve $(MODEL) --host $(HOST) --port $(PORT)

# The tests start hundreds of processes: where the environment forbids to keep compiled modules, each would compile them all anew.
test test-slow test-ray test-triton test-gpu soak: export PYTHONDONTWRITEBYTECODE :=

# The tests of a file stay in one process, so that they share its servers; a thread a process, or they would fight for cores.
test: $(VENV)/.installed-dev
	@echo "== testing"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist loadfile -m "not slow and not soak"

# In the order in which they are collected, long ones first. Those on a Ray cluster have a target of their own: they need both cores.
test-slow: $(VENV)/.installed-dev
	@echo "== testing: the slow ones"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder -m "slow" --ignore tests/e2e/test_ray.py

# The extra goes into the same environment, without another torch: constraints.txt names that.
test-ray: $(VENV)/.installed-dev $(VENV)/.installed-ray
	@echo "== testing on a Ray cluster"
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/e2e/test_ray.py tests/unit/ray tests/e2e/deploy/test_kubernetes.py

# Programs for GPUs by themselves, in Triton's interpreter; the extra is Triton itself.
test-triton: $(VENV)/.installed-dev $(VENV)/.installed-gpu
	@echo "== testing programs for GPUs, interpreted"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TESTERS) -m "$(MARKS)" tests/kernels/triton

# Those of engines and of Triton's programs, on a GPU that all processes share, and those of real servers, a GiB and more each.
# cuBLAS is as torch's own determinism asks for.
GPU_TEST := OMP_NUM_THREADS=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 WINDLASS_TEST_DEVICE=$(DEVICE) $(BIN)/pytest -n $(TESTERS) -m "$(MARKS)"
# Tests of a scope share engines; slow ones are too long for that.
GPU_DIST := $(if $(findstring not slow,$(MARKS)),loadscope,load)
SERVER_TESTS := tests/api/startup tests/api/cli $(wildcard tests/engine/lab/test_rope_*.py tests/api/lab/test_rope_*.py) tests/e2e/test_end_to_end.py $(wildcard tests/e2e/test_*_over_http.py)

test-gpu: $(VENV)/.installed-dev
	@echo "== testing on $(DEVICE): engines and kernels, and then real servers whatever comes of them"
	$(GPU_TEST) --dist $(GPU_DIST) tests/kernels/triton tests/engine; engines=$$?; \
	$(GPU_TEST) --dist loadfile $(SERVER_TESTS) && exit $$engines

soak: $(VENV)/.installed-dev
	@echo "== attacking, fuzzing, simulating and loading, in the long form"
	$(BIN)/pytest -m "soak"

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.installed-docs
	@echo "== making the site"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "== open build/docs/index.html"

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/prepare_peers.py
	$(BIN)/python benchmarks/peers.py $(BENCH)
	$(BIN)/python benchmarks/context_cost.py
	$(BIN)/python benchmarks/experts_and_latent.py
	$(BIN)/python benchmarks/http_cost.py --model work/bench-1b/model --quantization int8

$(TOOLS)/%: | $(BIN)/python
	@test -x $(TOOLS)/python || $(PYTHON) -m venv $(RELEASE)
	$(TOOLS)/python -m pip install --disable-pip-version-check --quiet uv cyclonedx-bom pip-audit build cibuildwheel
	@test -x $@

lock: $(TOOLS)/uv
	$(TOOLS)/python deploy/make_lock.py $(TOOLS)/uv

sbom: $(TOOLS)/cyclonedx-py $(VENV)/.installed
	$(TOOLS)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.cdx.json
	@echo "== see build/sbom.cdx.json"

audit: $(TOOLS)/pip-audit
	$(TOOLS)/pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock

wheels: $(TOOLS)/cibuildwheel
	$(TOOLS)/python -m build --sdist --outdir build/source .
	$(TOOLS)/cibuildwheel --platform linux --output-dir dist build/source/windlass_llm-*.tar.gz
	$(TOOLS)/python -m build --wheel --outdir dist clients

clean:
	rm -rf $(VENV) build dist kernels/cpu/*.so src/*.egg-info clients/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
