# The two commands of the README: `make demo` and `make test`. Each sets up all it needs in .venv first.
# Needs only git, make and python3 (with venv). Where python3 is older than 3.11, uv brings one.

VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
LINT     := $(VENV)/.lint-installed
TORCH    := .venv-torch
CRASH    := $(or $(N),100)
# Two workers, a file on one of them: tests of one file share locks and ports on purpose.
PARALLEL := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-pythons test-torch test-systemd test-container test-gpu crash lint bench clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(STAMP): pyproject.toml
	@sh tools/make-venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

$(LINT): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@touch $@

$(TORCH)/.installed: pyproject.toml
	@sh tools/make-venv $(TORCH)
	@$(TORCH)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy -e '.[test]'
	@touch $@

setup: $(STAMP)  ## only set up .venv

demo: $(STAMP)   ## a simulated pod whose inference engine dies silently, and what podwatch does about it
	@$(BIN)/podwatch demo $(ARGS)

test: $(STAMP)   ## the default test suite
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-pythons: $(STAMP)  ## the default suite under every other supported Python found here
	@for python in $$(sh tools/other-pythons $(BIN)/python); do \
	    venv=.venv-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "== $$($$python -V)"; \
	    PYTHON=$$python sh tools/make-venv $$venv && \
	    $$venv/bin/pip install --quiet --disable-pip-version-check -e '.[test]' && \
	    $$venv/bin/python -m pytest -q $(PARALLEL) $(ARGS) || exit 1; \
	done

test-torch: $(TORCH)/.installed  ## a real torch run, interrupted and uninterrupted, compared bit by bit
	@$(TORCH)/bin/python -m pytest tests/suites/torch $(ARGS)

test-systemd: $(STAMP)  ## under a real systemd, booted in a container (root, systemd-container)
	@$(BIN)/python -m pytest tests/suites/systemd $(ARGS)

test-container: $(STAMP)  ## the Dockerfile really built, and podwatch as PID 1 (root, buildah, debootstrap)
	@$(BIN)/python -m pytest tests/suites/container $(ARGS)

test-gpu: $(STAMP)  ## the GPU sensor and detector on real NVML
	@$(BIN)/python -m pytest tests/suites/gpu $(ARGS)

crash: $(STAMP)  ## kill -9 at N random points (default 100): make crash N=1000
	@PODWATCH_CRASH_ROUNDS=$(CRASH) $(BIN)/python -m pytest tests -k crash --timeout 3600 $(ARGS)

lint: $(LINT)    ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: $(STAMP)  ## every benchmark, as ratios (benchmarks/README.md); ARGS=--quick
	@missed=; for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b $(ARGS) || missed="$$missed $$b"; done; \
	test -z "$$missed" || { echo "missed a figure:$$missed"; exit 1; }

clean:           ## remove the virtual environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
