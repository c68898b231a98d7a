# make demo   trains a classifier with SGD and with SPFB, and draws both
# make test   everything that must hold: lint, types, doctests, tests, and the wheel in a clean environment
# make bench  every method against every peer, in hours; QUICK=1 for a look in minutes
# make costs  what the bound and steps cost, as ratios in one run
# make soak   a million bounds, and every transform, on hostile data, in minutes; fails if one does not hold
# make reproduce   the experiments of the paper, and more, from raw data to figures; QUICK=1 for a look in 5 minutes
#
# Needs Python >= 3.11, make and a package index. The first run creates .venv; later ones start at once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
WHEEL_INSTALLED := .venv-wheel/.installed
DOCTEST := $(BIN)/python -m pytest --override-ini=addopts= --doctest-glob='*.md'

# More OpenBLAS threads than free cores make eigendecompositions many times slower.
export OPENBLAS_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types doctest unit wheel bench costs soak reproduce format clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m experiments.demo

# Two at a time: some wait for a package index or have one thread, while the tests have one for every core.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target unit lint types doctest wheel
	@echo 'make test: all passed'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/basedpyright

# As users run them: without float64, and without the type checks of the tests. Those of the README are compiled as users
# have them, too; the others quickly.
doctest: $(INSTALLED)
	$(DOCTEST) README.md
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=--xla_cpu_use_fusion_emitters=false $(DOCTEST) --numprocesses=auto --doctest-modules qbound docs

# OPTIMIZED=1: with programs compiled as users have them, in twice the time.
unit: export OPTIMIZED := $(OPTIMIZED)
unit: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses=auto --durations=10

# The environment of the wheel holds what the package declares and no more. It is made anew when pyproject.toml changes;
# the wheel itself is built and installed every time.
wheel: $(INSTALLED) $(WHEEL_INSTALLED)
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	.venv-wheel/bin/python -m pip install --disable-pip-version-check --quiet --force-reinstall --no-deps build/wheel/*.whl
	cd build && ../.venv-wheel/bin/python ../tests/check_wheel.py

$(WHEEL_INSTALLED): pyproject.toml
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip install --disable-pip-version-check .
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
