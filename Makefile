# `make demo` and `make test` are complete: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUTPUT ?= demo.png
PYTEST_ARGS ?=
VARIANTS ?=
RUNS ?= 3
MINUTES ?= 1
JOBS ?=
START ?=
FUZZ_ARGS ?= --solves 10000 --derivatives 2000 --known 3000 --twins 2000 --enumerated 1000 --batches 2000 --files 5000

# Processes that tests start read bytecode; without it each compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest test-elsewhere fuzz docs dist format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# One stamp per extra; a stamp is remade when what it was installed from changes.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torchgw with its extra $* into $(VENV) ..."
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
	OMP_NUM_THREADS=1 $(BIN)/pytest -q --numprocesses auto $(PYTEST_ARGS)

test-elsewhere: $(VENV)/.installed-test ## tests as other processors would run them (VARIANTS=, RUNS=, PYTEST_ARGS=)
	$(BIN)/python tests/house/elsewhere.py --variants "$(VARIANTS)" --runs $(RUNS) --pytest="$(PYTEST_ARGS)"

fuzz: $(VENV)/.installed-test ## random cases for MINUTES on JOBS processes, from number START on (FUZZ_ARGS: how many)
	OMP_NUM_THREADS=1 $(BIN)/python tests/laws/fuzz_run.py --seconds $$((60 * $(MINUTES))) \
	$(if $(JOBS),--jobs $(JOBS)) $(if $(START),--start $(START)) $(FUZZ_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow tests/laws/test_state.py tests/faces/test_processes.py

docs: $(VENV)/.installed-docs ## run the gallery and build the site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.installed-dist ## build the wheel and the sdist, and try the wheel in a clean environment
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(VENV)/clean
	$(VENV)/clean/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(VENV)/clean && bin/python -m torchgw --version && bin/python -c "import time, torch; \
	start = time.perf_counter(); import torchgw; \
	print(f'import takes {time.perf_counter() - start:.2f} s beyond torch')"
	cd $(VENV)/clean && PATH=bin bin/torchgw benchmark --n 200 --m 200  # without a compiler in reach

format: $(VENV)/.installed-test ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) build dist site docs/gallery docs/made docs/changelog.md docs/optimization-log.md .mypy_cache .pytest_cache .ruff_cache .hypothesis demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
