PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: chat test lint types layers bench clean

chat: $(VENV)/.runtime
	@$(BIN)/edge-chat

# pytest options, e.g. make test ARGS="-k state"
test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python -m edge.apps.bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml
	@echo "installing the runtime (about a minute)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing what the exporter and the tests need (a few minutes)"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.runtime
