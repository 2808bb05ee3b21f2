# Short commands. Each sets itself up: on a fresh machine with Python 3.11 or later nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUF := npx --yes @bufbuild/buf@1.75.0
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format protos clean

help:
	@echo "make quickstart   watch a diffusion model learn through all services (ARGS='--steps 12' …)"
	@echo "make test         all tests, fast ones first (ARGS='-m \"not slow\"' …)"
	@echo "make lint         style, types, import rules, protocol"
	@echo "make install      create $(VENV) and install the pinned requirements; the others do it too"
	@echo "make format       rewrite the code in the project's style"
	@echo "make protos       generate the protocol code again"
	@echo "make clean        remove $(VENV), caches and run folders"

install: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt requirements/cpu-nodeps.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Headwater needs Python 3.11 or later; say which with: make PYTHON=python3.11 …" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu-nodeps.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

quickstart: install
	$(BIN)/headwater quickstart $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_protos.py --check
	@if command -v npx >/dev/null; then $(BUF) lint; else echo "no npx: buf lint is left out"; fi

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: install
	$(BIN)/python scripts/generate_protos.py

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
