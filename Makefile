# Short commands. Each sets itself up: on a fresh machine with Python 3.11 or later nothing else is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUF := npx --yes @bufbuild/buf@1.75.0
ARGS ?=
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.DEFAULT_GOAL := help

.PHONY: help install quickstart test lint format protos clean compose-build compose-up compose-down test-compose

help:
	@echo "make quickstart   watch a diffusion model learn through all services (ARGS='--steps 12' …)"
	@echo "make test         all tests, fast ones first (ARGS='-m \"not slow\"' …)"
	@echo "make lint         style, types, import rules, protocol"
	@echo "make install      create $(VENV) and install the pinned requirements; the others do it too"
	@echo "make format       rewrite the code in the project's style"
	@echo "make protos       generate the protocol code again"
	@echo "make compose-up   build the images, make certificates and tokens, start the containers (docs/deploy.md)"
	@echo "make compose-down stop them; volumes stay"
	@echo "make test-compose the containers on a real Docker engine: scaled, killed, trained"
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

# Keys and tokens that containers read as another user: the folder keeps everybody else out.
deploy/secrets/ca.crt: | install
	$(BIN)/headwater certs deploy/secrets --mode 0644

deploy/secrets/%_password: | deploy/secrets/ca.crt
	umask 022; $(PYTHON) -c 'import secrets; print(secrets.token_urlsafe(32))' >$@

# A CPU build of torch that pip finds among this machine's own files saves naming an index of such builds.
compose-build:
	@ls deploy/wheels/torch-*.whl >/dev/null 2>&1 || pip download --quiet --no-index --no-deps -d deploy/wheels \
	  "$$(grep '^torch==' requirements/cpu.txt)" 2>/dev/null || true
	$(COMPOSE) -f deploy/compose.yaml build

# Compose v2 waits until every container is healthy.
compose-up: deploy/secrets/redis_password deploy/secrets/grafana_password compose-build
	$(COMPOSE) -f deploy/compose.yaml up -d $(if $(filter docker-compose,$(COMPOSE)),,--wait)

compose-down:
	$(COMPOSE) -f deploy/compose.yaml down

test-compose: install compose-build
	COMPOSE_TEST=1 COMPOSE="$(COMPOSE)" $(BIN)/python -m pytest -s tests/compose $(ARGS)

protos: install
	$(BIN)/python scripts/generate_protos.py

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
