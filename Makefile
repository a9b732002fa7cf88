# fedpriv: `make run` reproduces a paper's column, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test e2e lint docs bench clean

run: $(READY)  ## install, fetch MNIST, run the quickstart, print the table, draw the plots
	$(BIN)/fedpriv data fetch mnist
	$(BIN)/fedpriv run scenarios/quickstart.toml --out runs/quickstart --resume
	$(BIN)/fedpriv plot runs/quickstart

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest

e2e: $(READY)  ## faults of real federations: processes that are killed, slow, wrong or full
	$(BIN)/python -m pytest -m deployment -s tests/e2e

lint: $(READY)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)  ## speed, against Flower's Ray engine and against the limit
	$(BIN)/python -m benchmarks

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ray,dev,docs]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
