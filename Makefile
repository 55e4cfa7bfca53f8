# Every verb of the house. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATA ?=
export PATH := $(CURDIR)/$(BIN):$(CURDIR)/.cache/tools:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install proto lint test demo up charts bench clean

help: ## List the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Create the virtual environment and install everything from the lock
$(STAMP): requirements.lock pyproject.toml stubs/fbgemm-gpu/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gem needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ./stubs/fbgemm-gpu -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

proto: $(STAMP) ## Generate Python from proto/ into proto/gen
	$(BIN)/python proto/generate.py

lint: $(STAMP) ## Check style, types, import directions and protos
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && buf lint && buf format -d --exit-code

test: $(STAMP) ## Set up and run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

demo: $(STAMP) ## Run the whole loop on one machine; DATA=DIR runs it on real logs
	$(BIN)/gemctl demo $(if $(DATA),--data $(DATA))

up: $(STAMP) ## Start the six services on this machine
	$(BIN)/gemctl up

charts: $(STAMP) ## Lint, render and package the Helm charts
	charts/tools.sh .cache/tools
	charts/check.sh

bench: $(STAMP) ## Run every benchmark at its quick size
	$(BIN)/python -m benchmarks --quick

clean: ## Remove what the verbs above made
	rm -rf $(VENV) .cache .demo build dist
