# make demo | test | lint | test-gpu | bench | lock | clean
#
# Each target creates what it needs: a virtual environment .venv with the packages of requirements.lock, and the native
# libraries. With PYTHON=/path/to/python it uses that interpreter's packages instead, and downloads nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BASE_PYTHON ?= python3
CC_COMMAND := $(if $(filter default,$(origin CC)),gcc,$(CC))
TESTS ?= tests
PYTEST_ARGS ?=
DEMO_ARGS ?=
GPU_ARGS ?=
BENCH_ARGS ?=

# The tests start thousands of Python processes; each would compile the tree anew where nothing may be kept.
unexport PYTHONDONTWRITEBYTECODE

ifdef PYTHON
PY := $(PYTHON)
PACKAGES := given-packages
else
PY := .venv/bin/python
PACKAGES := .venv/.made
endif

# Where pytest-xdist is there, one worker more than processors, since tests also wait; they share nothing but those.
# Files in the order of their names: sorted by how many tests they have, the longest would come last.
WORKERS = $$($(PY) -c 'import xdist' 2>/dev/null && \
	echo "-n $$(($$(nproc) < 4 ? $$(nproc) + 1 : 4)) --dist loadfile --no-loadscope-reorder" || true)

.PHONY: help demo test lint test-gpu bench bench-shim bench-store bench-gpu native lock clean system given-packages

help:
	@echo 'make demo      build everything and show two ranks suspended and resumed, on GPUs or on the simulated driver'
	@echo 'make test      build and run the tests that need no GPU'
	@echo 'make lint      ruff, mypy, cython-lint, docstring coverage'
	@echo 'make test-gpu  run the conformance suite and tests/gpu; a missing GPU is a failure'
	@echo 'make bench     measure what the shim costs and how fast the store is (bench-shim, bench-store)'
	@echo 'make bench-gpu measure suspend and resume on GPUs, and what the shim costs there; minutes'
	@echo 'make lock      resolve requirements.lock anew'
	@echo 'make clean     remove what the other targets made'
	@echo 'PYTHON=...     with any of them: use that interpreter and its packages, download nothing'

demo: native
	@$(PY) -m gpususpend.demo $(DEMO_ARGS)

test: native
	@$(PY) -m pytest $(WORKERS) $(PYTEST_ARGS) $(TESTS)

test-gpu: native
	@$(PY) -m tests.gpu.run_all --driver real --out build/test-gpu $(GPU_ARGS)

bench: bench-shim bench-store

bench-shim: native
	@$(PY) -m tests.bench.shim $(BENCH_ARGS)

bench-gpu: native
	@$(PY) -m tests.bench.gpu $(BENCH_ARGS)

bench-store: $(PACKAGES)
	@$(PY) -m tests.bench.store $(BENCH_ARGS)

lint: $(PACKAGES)
	@$(PY) -m ruff check .
	@$(PY) -m mypy --strict gpususpend chunkstore shim setup.py
	@PATH="$$(dirname $(PY)):$$PATH" $(PY) -m cython_lint.cython_lint shim  # it starts pycodestyle by name
	@$(PY) -m interrogate --quiet gpususpend chunkstore shim setup.py docs
	@$(PY) -m shim.lint

native: system $(PACKAGES)
	@test -e gpususpend/libnvsnap_gpushare.so || echo 'building the shim and the simulated driver' >&2
	@CC='$(CC_COMMAND)' $(PY) setup.py build_native

lock:
	@command -v uv >/dev/null || { echo 'missing: uv (pip install uv)' >&2; exit 1; }
	uv pip compile --quiet --universal --python-version 3.10 --extra dev --generate-hashes \
		--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
		--output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f gpususpend/libnvsnap_gpushare.so gpususpend/simcuda/libcuda.so.1

# One line for each missing system package, with its Debian name.
system:
	@missing=0; need() { echo "missing: $$1 (Debian package: $$2)" >&2; missing=1; }; \
	command -v '$(firstword $(CC_COMMAND))' >/dev/null || need '$(firstword $(CC_COMMAND))' gcc; \
	python='$(or $(PYTHON),$(BASE_PYTHON))'; \
	if ! command -v "$$python" >/dev/null; then need "$$python" python3; else \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || need 'Python 3.10 or newer' python3; \
		"$$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || need Python.h python3-dev; \
		$(if $(PYTHON),true,"$$python" -c 'import ensurepip, venv' 2>/dev/null) || need 'the module venv' python3-venv; \
	fi; \
	exit $$missing

# Named by what is imported, since the interpreter may have got them from anywhere.
given-packages:
	@$(PY) -c 'import importlib.util as u, sys; \
	names = "click cuda.bindings Cython numpy pytest pynvml rich xxhash".split(); \
	find = lambda n: all(u.find_spec(".".join(n.split(".")[:i + 1])) for i in range(n.count(".") + 1)); \
	missing = [n for n in names if not find(n)]; \
	[print("missing in", sys.executable + ": the module", n, file=sys.stderr) for n in missing]; sys.exit(bool(missing))'

.venv/.made: requirements.lock | system
	@echo "making .venv: $$(grep -c '^[a-z].*==' $<) packages are downloaded and installed, half a minute or more" >&2
	@rm -rf .venv
	@$(BASE_PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@touch $@
