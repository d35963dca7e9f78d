# Two commands matter: `make demo` and `make test`. Everything is installed into .venv beside this file.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Where CUDA is absent a CPU build of torch is enough; pass e.g. TORCH="torch==2.13.0 --index-url ..." to choose one.
TORCH ?= torch==2.13.0
DEMO_MODEL := build/laptop_model

.PHONY: setup demo test test-full lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(DEMO_MODEL)/config.json: | setup
	$(BIN)/python tools/make_laptop_model.py $(DEMO_MODEL)

demo: setup $(DEMO_MODEL)/config.json
	$(BIN)/megasao train configs/laptop.yaml $(ARGS)

lint: setup
	$(BIN)/ruff check megasao tests tools
	$(BIN)/ruff format --check megasao tests tools
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-full: test
	$(BIN)/python -m pytest -m full

clean:
	rm -rf $(VENV) build runs
