# Every target does its own set-up: a virtual environment in .venv, made again when pyproject.toml or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
PACKAGING := pyproject.toml constraints.txt .ci/make-venv

.PHONY: demo test lint bench clean

demo: $(VENV)/run.stamp ## A bootstrap node and two clusters on this machine train a small model. Leaves runs/demo.
	$(BIN)/dilocox-peer demo --out runs/demo

test: $(VENV)/dev.stamp ## All tests. Some: .venv/bin/pytest tests/unit
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests

lint: $(VENV)/dev.stamp ## What a change must pass before it is tested.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

bench: $(VENV)/run.stamp ## The measurements that the README quotes.
	@set -e; for script in benchmarks/*.py; do \
		name=benchmarks.$$(basename $$script .py); echo "== $$name"; $(BIN)/python -m $$name; done

clean: ## Everything that the other targets made, the virtual environment included.
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/run.stamp: $(PACKAGING)
	.ci/make-venv $(VENV) .
	@touch $@

$(VENV)/dev.stamp: $(PACKAGING)
	.ci/make-venv $(VENV) '.[dev]'
	@touch $@ $(VENV)/run.stamp
