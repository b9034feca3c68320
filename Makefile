# Needs only `python3`. `PYTHON=python3.13 make test` picks another interpreter; each gets its own environment.
# `EXTRAS=dev,cuda` also installs the GPU compiler (no GPU needed; Linux x86-64), so that its tests run: CI does.
PYTHON  ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV    := .venv/$(VERSION)
BIN     := $(VENV)/bin
EXTRAS  ?= dev
STAMP   := $(VENV)/.installed-$(EXTRAS)
PYTEST_ARGS ?=

.PHONY: help test check bench demo docs clean install
help:
	@echo "make test | check | bench | demo | docs | clean      (PYTHON=$(PYTHON), environment $(VENV))"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing shardax into $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
	  --constraint constraints.txt --editable '.[$(EXTRAS)]' 2>&1 | (grep -v "^WARNING: Location" || true)
	@$(BIN)/python -c 'import shardax, pytest'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_house.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

demo: $(STAMP)
	@$(BIN)/shardax demo

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]' 2>&1 | (grep -v "^WARNING: Location" || true)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache .hypothesis
