# Two commands matter: `make demo` and `make test`. Everything is installed into .venv beside this file.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
# Where CUDA is absent a CPU build of torch is enough; pass e.g. TORCH="torch==2.13.0 --index-url ..." to choose one.
TORCH ?= torch==2.13.0
# The demo: another SEED gives another random model, other demonstrations and other rollouts.
SEED ?= 0
RUN ?= laptop-$(SEED)-$(shell date +%Y%m%d-%H%M%S)
DEMO_MODEL := build/laptop_model-$(SEED)

.PHONY: setup sandbox extras demo test test-full lint clean

setup: $(VENV)/.ready

# The compiled operators need torch at build time, hence no build isolation; without a compiler they are left out.
$(VENV)/.ready: pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'setuptools>=77' $(TORCH)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test]'
	touch $@

$(DEMO_MODEL)/config.json: | setup
	$(BIN)/python tools/make_laptop_model.py $(DEMO_MODEL) --seed $(SEED)

demo: setup $(DEMO_MODEL)/config.json
	$(BIN)/megasao train configs/laptop.yaml model.path=$(DEMO_MODEL) run.name=$(RUN) run.seed=$(SEED) $(ARGS)

lint: setup
	$(BIN)/ruff check setup.py csrc megasao tests tools benchmarks
	$(BIN)/ruff format --check setup.py csrc megasao tests tools benchmarks
	$(BIN)/mypy

# Untrusted code runs in bubblewrap. Where it is missing and cannot be installed, its tests are skipped with the reason.
sandbox:
	@command -v bwrap >/dev/null || (test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& apt-get install -y -qq bubblewrap >/dev/null) || echo "note: bubblewrap is missing and was not installed"

# Optional packages with tests; one of reasoning-gym's own dependencies needs a C compiler.
EXTRAS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["reasoning-gym"])
extras: setup
	@$(BIN)/python -c '$(EXTRAS)' | xargs $(BIN)/python -m pip install --quiet \
		|| echo "note: reasoning-gym was not installed; its tests are skipped"

test: lint sandbox extras
	$(BIN)/python -m pytest

# With the tests marked `full`: every layout, and others that take long.
test-full: lint sandbox extras
	$(BIN)/python -m pytest -m ""

clean:
	rm -rf $(VENV) build runs
