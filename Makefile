# make demo   trains a classifier with SGD and with SPFB, and draws both
# make test   everything that must hold: lint, types, doctests, tests, and the wheel in a clean environment
# make test-oldest   the same with the lowest versions that pyproject.toml allows
# make test-newest   the same on the newest Python found
# make bench  every method against every peer, in hours; QUICK=1 for a look in minutes
# make costs  what the bound and steps cost, as ratios in one run
# make soak   a million bounds, and every transform, on hostile data, in minutes; fails if one does not hold
# make reproduce   the experiments of the paper, and more, from raw data to figures; QUICK=1 for a look in 5 minutes
#
# Needs Python >= 3.11, make and a package index. The first run creates .venv, with python3 or PYTHON=...; later ones
# start at once. Where PYTHON names another Python than that of .venv, .venv is made anew.

PYTHON ?= python3
ENV := .venv
EXTRAS := dev
BIN := $(ENV)/bin
INSTALLED := $(ENV)/.installed
ENV_OF_WHEEL := $(ENV)-wheel
WHEEL_INSTALLED := $(ENV_OF_WHEEL)/.installed
WHEEL := build/wheel$(ENV:.venv%=%)
# Modules are compiled when they are imported, not all of them at once.
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile
DOCTEST := $(BIN)/python -m pytest --override-ini=addopts= --doctest-glob='*.md'

# Flags that the installed compiler needs to be right, and with `quick` those that make it quick, too.
FLAGS = $$($(BIN)/python -m tests.processes)
QUICK_FLAGS = $$($(BIN)/python -m tests.processes quick)

# LOWEST=1: the lowest versions allowed.
CONSTRAINTS := $(if $(LOWEST),--constraint $(ENV)/lowest.txt)

# Which Python is it? Empty where there is none.
identity = $(shell $(1) -I -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null)
THIS := $(call identity,$(BIN)/python)
ASKED := $(if $(filter file,$(origin PYTHON)),$(THIS),$(call identity,$(PYTHON)))
NEW := $(if $(and $(THIS),$(findstring <$(THIS)>,<$(ASKED)>)),,yes)

# More OpenBLAS threads than free cores make eigendecompositions many times slower.
export OPENBLAS_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-oldest test-newest test-newest-part default-mode lint types doctest unit wheel \
	bench costs soak reproduce format clean force

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(if $(NEW),force)
	$(if $(NEW),$(PYTHON) -m venv --clear $(ENV))
	$(if $(LOWEST),$(BIN)/python tests/lowest.py > $(ENV)/lowest.txt)
	$(BIN)/python $(PIP_INSTALL) --upgrade --upgrade-strategy=eager $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

force:

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

# Two at a time: some wait for a package index or have one thread, while the tests have one for every core.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target unit lint types doctest wheel
	@$(BIN)/python -c 'import jax, platform as p; print(f"make test: all passed, Python {p.python_version()}, jax {jax.__version__}")'

# A Python found on this machine, unless PYTHON names one.
found = $(if $(filter file,$(origin PYTHON)),$(shell $(PYTHON) tests/interpreters.py $(1)),$(PYTHON))

test-oldest:
	@$(MAKE) --no-print-directory test ENV=.venv-oldest LOWEST=1 PYTHON='$(or $(call found,oldest),$(error no such Python))'

test-newest:
	@$(MAKE) --no-print-directory test ENV=.venv-newest PYTHON='$(or $(call found,newest),$(error no such Python))'

# In minutes, with what the package needs alone; and only on a newer Python than that of `make test`.
test-newest-part:
	@newer='$(call found,newer)'; test -z "$$newer" || \
	$(MAKE) --no-print-directory default-mode ENV=.venv-newest-part EXTRAS=sklearn PYTHON="$$newer"

# As users have it: in float32, with programs compiled in full, without flags and with those that the compiler needs.
default-mode: $(INSTALLED)
	$(BIN)/python -m tests.default_mode
	XLA_FLAGS="$(FLAGS)" $(BIN)/python -m tests.default_mode

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# As users run them: without float64, and without the type checks of the tests. Those of the README are compiled as users
# have them, too; the others quickly.
doctest: $(INSTALLED)
	XLA_FLAGS="$(FLAGS)" $(DOCTEST) README.md
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$(QUICK_FLAGS)" $(DOCTEST) --numprocesses=auto --doctest-modules qbound docs

# OPTIMIZED=1: with programs compiled as users have them, in twice the time.
unit: export OPTIMIZED := $(OPTIMIZED)
unit: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --durations=10

# The environment of the wheel holds what the package declares and no more. It is made anew together with the other one;
# the wheel itself is built and installed every time.
wheel: $(INSTALLED) $(WHEEL_INSTALLED)
	rm -rf $(WHEEL)
	$(BIN)/python -m build --wheel --no-isolation --outdir $(WHEEL) .
	$(ENV_OF_WHEEL)/bin/python $(PIP_INSTALL) --quiet --force-reinstall --no-deps $(WHEEL)/*.whl
	cd build && ../$(ENV_OF_WHEEL)/bin/python ../tests/check_wheel.py

$(WHEEL_INSTALLED): $(INSTALLED)
	$(BIN)/python -m venv --clear $(ENV_OF_WHEEL)
	$(ENV_OF_WHEEL)/bin/python $(PIP_INSTALL) $(CONSTRAINTS) .
	touch $@

# It goes on where it was interrupted. Peers with packages of their own get environments, .venv-bench-NAME.
bench: $(INSTALLED)
	$(BIN)/python -m experiments.benchmarks.suite $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python -m experiments.benchmarks.suite.growth)

costs: $(INSTALLED)
	$(BIN)/python -m experiments.benchmarks.bound
	$(BIN)/python -m experiments.benchmarks.spfb
	$(BIN)/python -m experiments.benchmarks.mm
	$(BIN)/python -m experiments.benchmarks.low_rank
	$(BIN)/python -m experiments.benchmarks.kspfb
	$(BIN)/python -m experiments.benchmarks.networks

soak: $(INSTALLED)
	$(BIN)/python -m experiments.soak

# QBOUND_DATA_DIR names a folder with the raw data; without it they are downloaded. It goes on where it was interrupted.
reproduce: $(INSTALLED)
	$(BIN)/python -m experiments.reproduce $(if $(QUICK),--quick)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What took long to run, in results/, stays.
clean:
	rm -rf .venv .venv-* build dist
