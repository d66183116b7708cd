# make test                            installs into .venv on first use, then runs the tests
# make test PYTHON=python3.12 VENV=v   makes the virtual environment v with another Python
# make test-gpu PY=python3             uses an interpreter as it is, with the packages that it has

PYTHON ?= python3
VENV ?= .venv
ECOSYSTEM_VENV ?= .venv-ecosystem
TOOLS ?= $(patsubst tests/ecosystem/%.txt,%,$(wildcard tests/ecosystem/*.txt))
PIP_ARGS ?=
WORKERS ?= 2
FAST = arch base convert kernels layers losses
ARGS ?=

# OpenMP's threads wait for each other in a busy loop; a long one starves them where other processes want the cores.
export GOMP_SPINCOUNT ?= 2000
# Tests start many processes, which would each compile the sources.
unexport PYTHONDONTWRITEBYTECODE

ifdef PY
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
ECOSYSTEM_PY = $(ECOSYSTEM_VENV)/$*/bin/python
ECOSYSTEM := $(ECOSYSTEM_VENV)/%/.installed
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
BENCH := $(VENV)/.installed-bench
endif

.DEFAULT_GOAL := help
.PHONY: help demo tutorial test test-fast test-matrix test-gpu test-ecosystem check format bench recipes docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(DEV) ## train a small Llama on the CPU or the GPU, save, reload, generate; under 3 minutes (ARGS="--steps 50")
	$(PY) examples/demo.py $(ARGS)

tutorial: $(DEV) ## run docs/tutorial.md on a tiny model on the CPU: LoRA, generate, merge, generate
	$(PY) examples/tutorial.py $(ARGS)

test: $(DEV) ## run the tests that need no GPU, in 12 minutes on two cores (WORKERS=2, ARGS="-k rope")
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-matrix: $(DEV) ## as test, and what costs most for every family: once for each kind of layer is enough for test
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m "not gpu" $(ARGS)

test-fast: $(DEV) ## run every family against transformers and every op against fp64, in 2 minutes
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(FAST:%=tests/%) \
		-m "not (compile or distributed or gpu or interpreter or matrix or slow)" $(ARGS)

test-gpu: $(DEV) ## run the tests that need a GPU
	$(PY) -m pytest -m gpu $(ARGS)

test-ecosystem: $(TOOLS:%=test-ecosystem-%) ## run the tests with other tools, each in a virtual environment of its own (TOOLS="ray verl")

test-ecosystem-%: $(ECOSYSTEM)
	$(or $(ECOSYSTEM_PY),$(PY)) -m pytest -W default tests/ecosystem/test_$*.py $(ARGS)

check: $(DEV) ## lint, formatting, types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(DEV) ## format the code, fix what the linter can fix
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(BENCH) ## run the benchmarks (ARGS="train --model llama-3-8b")
	$(PY) -m benchmarks $(or $(ARGS),--help)

recipes: $(DEV) ## write liger_models/recipes and the table in docs/recipes.md again, in minutes
	$(PY) -m benchmarks.recipes

docs: $(DOCS) ## build the documentation into build/docs
	@# No --quiet: --strict would then not see the warnings.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "build/docs/index.html"

clean: ## remove .venv, caches and everything built
	rm -rf .venv .venv-ecosystem build dist *.egg-info custom_output demo_output tutorial_output vision_output .pytest_cache .mypy_cache .ruff_cache

# $(call install,ARGUMENTS OF PIP): makes the virtual environment in the target's folder, if there is none, and installs into it.
define install
	@$(PYTHON) -c "" || { \
	    echo "make: no Python at PYTHON=$(PYTHON). Install Python 3.10 or newer, or give another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
	    echo "make: Python must be 3.10 or newer, $(PYTHON) is `$(PYTHON) --version 2>&1`. Give another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || { \
	    echo "make: $(PYTHON) -m venv $(@D) failed, see above. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing the packages into $(@D) (minutes, the first time)"
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-compile --quiet $(PIP_ARGS) $(1) || { \
	    echo "make: pip could not install the packages, see above. Behind a proxy or without a network set PIP_ARGS; to begin anew: make clean" >&2; exit 1; }
	@# pip would compile on one core.
	@$(@D)/bin/python -W ignore -m compileall -qq -j 0 $(@D)/lib || true
	@touch $@
endef

# One stamp per set of extras: pip runs again only when the project's dependencies change.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(call install,-c constraints.txt -e '.[dev]' -e '.[$*]')

# The tools pin versions of each other's packages, so that no two of them fit into one environment.
.PRECIOUS: $(ECOSYSTEM_VENV)/%/.installed
$(ECOSYSTEM_VENV)/%/.installed: pyproject.toml tests/ecosystem/%.txt
	$(call install,--no-deps -e . -r tests/ecosystem/$*.txt)
