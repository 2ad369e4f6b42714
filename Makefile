# `make demo` and `make test` are complete: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUTPUT ?= demo.png
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest format clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# One stamp per extra; a stamp is remade when what it was installed from changes.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torchgw[$*] into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-plot ## align a spiral with a Swiss roll and draw the match
	$(BIN)/torchgw demo --output $(DEMO_OUTPUT)

test: lint types pytest ## everything that CI checks

lint: $(VENV)/.installed-test ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test ## mypy, strict, on the package
	$(BIN)/mypy

pytest: $(VENV)/.installed-test ## tests and doctests (PYTEST_ARGS="-m slow" for others)
	$(BIN)/pytest -q $(PYTEST_ARGS)

format: $(VENV)/.installed-test ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
