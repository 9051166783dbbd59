# make demo   install, then train and compare policies in the built-in world
# make test   install, then every check and every test that is not slow
# make bench  install, then measure against the peers side by side (needs `make peers` once)
# Only `setup`, `smollm2` and `peers` use the network.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/installed
PEERS_PIP := $(PEERS)/bin/python -m pip install --disable-pip-version-check -q

REWARDEN_SHARED ?= ../shared
REWARDEN_SMOLLM2 ?= models/smollm2
# pytest runs in the repository root, but a test may change folder: it gets absolute paths.
TEST_ENV := REWARDEN_SHARED=$(abspath $(REWARDEN_SHARED)) REWARDEN_SMOLLM2=$(abspath $(REWARDEN_SMOLLM2)) OMP_NUM_THREADS=1
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow check format smollm2 peers bench clean

help: ## show the targets
	@awk -F':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install (skipped while pyproject.toml and constraints.txt are unchanged)

# torch goes first and alone: nothing that depends on it can then pull in another build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) --version); Rewarden needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup: creating $(VENV) and installing (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) -e ".[dev,trackers]"
	@touch $@
	@echo "setup: done"

demo: setup ## supervised fine-tuning, a reward model and PPO in the built-in world, with a report
	@$(BIN)/rewarden demo

check: setup ## formatting, lint, import contracts, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

test: setup check ## the checks, then all tests that are not slow (one file stays on one worker, so module fixtures run once)
	$(TEST_ENV) $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

slow: setup ## the long tests: one line per promised point, numbers in slow/results.json
	$(TEST_ENV) PYTHONPATH=tools $(BIN)/python -m pytest -m slow -n 0 -p slow_report

format: setup ## rewrite files as ruff likes them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smollm2: setup ## put the real model SmolLM2-135M-Instruct into models/smollm2
	@test -f "$(REWARDEN_SMOLLM2)/model.safetensors" || test -f "$(REWARDEN_SHARED)/tools/get_smollm2.py" \
	  || { echo "no $(REWARDEN_SHARED)/tools/get_smollm2.py: set REWARDEN_SHARED to the folder that holds tools/ and data/"; exit 1; }
	@test -f "$(REWARDEN_SMOLLM2)/model.safetensors" || $(BIN)/python "$(REWARDEN_SHARED)/tools/get_smollm2.py" "$(REWARDEN_SMOLLM2)"

# The peers live in an environment of their own: nothing of theirs may reach ours. torch goes first and alone here too.
peers: $(PEERS_STAMP) ## put the libraries that `make bench` compares with into .venv-peers

$(PEERS_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) --version); the peers need Python 3.11 or newer: make peers PYTHON=/path/to/python3.11"; exit 1; }
	@echo "peers: creating $(PEERS) and installing (a few minutes the first time)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS_PIP) torch==2.13.0
	@$(PEERS_PIP) torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 peft==0.21.2 "numpy>=2" trl==1.16.0
	@$(PEERS_PIP) --no-deps --target $(PEERS)/trl12 trl==1.12.0
	@touch $@
	@echo "peers: done"

bench: setup ## ours and the peers A B A B on the same work; BENCH_ONLY=name,... BENCH_PAIRS=5
	REWARDEN_SHARED=$(abspath $(REWARDEN_SHARED)) REWARDEN_PEERS=$(abspath $(PEERS)) $(BIN)/python -m bench

clean: ## remove .venv, .venv-peers, caches and build output; runs/ and models/ stay
	rm -rf $(VENV) $(PEERS) build dist slow *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
