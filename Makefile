# Two commands matter: `make demo` and `make test`. Everything is installed into .venv beside this file.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV := .venv
# SGLang pins other versions of what we use, so it has an environment of its own, as on a cluster.
SGLANG_VENV := .venv-sglang
# So has OpenEnv, whose servers are only spoken to: 66 packages that nothing else here needs.
OPENENV_VENV := .venv-openenv
# And what tests of FP8 compare with, beside .venv: in it every process would import accelerate with transformers.
QUANTIZERS := build/quantizers
# And verifiers, in whose environment one test file runs; it sees the packages of .venv too.
VERIFIERS_VENV := .venv-verifiers
BIN := $(VENV)/bin
# Where CUDA is absent a CPU build of torch is enough; pass e.g. TORCH="torch==2.13.0 --index-url ..." to choose one.
TORCH ?= torch==2.13.0
# The demo: another SEED gives another random model, other demonstrations and other rollouts.
SEED ?= 0
RUN ?= laptop-$(SEED)-$(shell date +%Y%m%d-%H%M%S)
DEMO_MODEL := build/laptop_model-$(SEED)

.PHONY: setup setup-sglang setup-openenv setup-quantizers setup-verifiers sandbox slurm extras chat-templates demo demo-reasoning demo-code test test-full lint clean

setup: $(VENV)/.ready

# The compiled operators need torch at build time, hence no build isolation; without a compiler they are left out.
$(VENV)/.ready: pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet 'setuptools>=77' $(TORCH)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test]'
	touch $@

setup-sglang: $(SGLANG_VENV)/.ready

# sglang and xgrammar without their dependencies: those are CUDA packages, and the pinned ones below run on a CPU.
$(SGLANG_VENV)/.ready: tools/sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install --quiet $(TORCH) numpy
	$(SGLANG_VENV)/bin/python -m pip install --quiet -r tools/sglang-cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7
	@$(SGLANG_VENV)/bin/python -m pip install --quiet sglang-router==0.3.2 \
		|| echo "note: sglang-router was not installed; its test is skipped"
	@$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps prometheus_client==0.26.0 \
		mooncake-transfer-engine-non-cuda==0.3.13.post1 \
		|| echo "note: mooncake was not installed; the test with prefill and decoding apart is skipped"
	touch $@

setup-openenv: $(OPENENV_VENV)/.ready

# openenv-core without its dependencies: a server needs these few of them, and neither gradio nor a client of OpenAI.
$(OPENENV_VENV)/.ready:
	$(PYTHON) -m venv $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/python -m pip install --quiet fastapi==0.165.0 fastmcp==4.2.3 uvicorn==0.54.0
	$(OPENENV_VENV)/bin/python -m pip install --quiet --no-deps openenv-core==0.3.0
	touch $@

setup-quantizers: $(QUANTIZERS)/.ready

$(QUANTIZERS)/.ready: tools/quantizers.txt | setup
	rm -rf $(QUANTIZERS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(QUANTIZERS) -r tools/quantizers.txt
	touch $@

setup-verifiers: $(VERIFIERS_VENV)/.ready

$(VERIFIERS_VENV)/.ready: tools/verifiers.txt | setup
	$(BIN)/python -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python -m pip install --quiet --no-deps -r tools/verifiers.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		| (cd $(VERIFIERS_VENV)/lib/python*/site-packages && cat > beside.pth)
	touch $@

$(DEMO_MODEL)/config.json: | setup
	$(BIN)/python tools/make_laptop_model.py $(DEMO_MODEL) --seed $(SEED)

demo: setup $(DEMO_MODEL)/config.json
	$(BIN)/megasao train configs/laptop.yaml model.path=$(DEMO_MODEL) run.name=$(RUN) run.seed=$(SEED) $(ARGS)

# The same with other tasks: two of reasoning-gym, and small repositories to be mended in the sandbox.
demo-reasoning: TASK = reasoning_gym
demo-code: TASK = code_agent
demo-code: TOKENS = --spaces-apart
demo-reasoning demo-code: setup sandbox extras
	$(BIN)/python tools/make_task_model.py configs/laptop_$(TASK).yaml \
		model.path=build/$(TASK)_model-$(SEED) --seed $(SEED) $(TOKENS)
	$(BIN)/megasao train configs/laptop_$(TASK).yaml model.path=build/$(TASK)_model-$(SEED) \
		run.name=$(TASK)-$(SEED)-$(shell date +%Y%m%d-%H%M%S) run.seed=$(SEED) $(ARGS)

# A real Slurm and shellcheck for the tests, where root on Debian can install them; else those tests are skipped and say so.
slurm:
	@PATH="$$PATH:/usr/sbin"; for name in slurmctld slurmd srun munged shellcheck; do \
	    command -v $$name >/dev/null || { sh tools/install_slurm.sh; break; }; done

lint: setup slurm
	$(BIN)/ruff check setup.py csrc megasao tests tools benchmarks
	$(BIN)/ruff format --check setup.py csrc megasao tests tools benchmarks
	$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck -x slurm/*.sh tools/*.sh .ci/run .ci/missing; \
	else echo 'shellcheck is not installed: shell scripts were not checked'; fi

# Untrusted code runs in bubblewrap, or in containers. Where they are missing and cannot be installed, their tests are
# skipped with the reason.
sandbox:
	@PATH="$$PATH:/usr/sbin"; for name in bwrap podman runc; do \
	    command -v $$name >/dev/null || { sh tools/install_sandbox.sh; break; }; done

# Optional packages with tests; one of reasoning-gym's own dependencies needs a C compiler.
# Of trl only the chat templates are read, as models ship them: it is not imported, and needs nothing that it depends on.
TEMPLATES = trl==1.16.0
EXTRAS = import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	print(*extras["reasoning-gym"], *extras["gymnasium"])
extras: setup
	@$(BIN)/python -c '$(EXTRAS)' | xargs -n 1 $(BIN)/python -m pip install --quiet \
		|| echo "note: reasoning-gym or gymnasium was not installed; its tests are skipped"
	@$(BIN)/python -m pip install --quiet --no-deps $(TEMPLATES) \
		|| echo "note: trl was not installed; no published chat templates are tested"
	@$(MAKE) --no-print-directory chat-templates \
		|| echo "note: the wheel of xinference was not fetched; GLM's later chat templates are not tested"

# GLM-4.6 to GLM-5.3, out of the wheel of xinference: a few JSON files of it are read, and nothing is installed.
chat-templates: build/chat_templates/.ready

build/chat_templates/.ready: tools/chat_templates.py | setup
	$(BIN)/python -m pip download --quiet --no-deps --dest build/chat_templates xinference==4.1.0
	$(BIN)/python tools/chat_templates.py build/chat_templates/xinference-*.whl build/chat_templates
	rm build/chat_templates/xinference-*.whl
	touch $@

# What cannot be installed has its tests skipped, and says so; continuous integration (.ci/run) insists on .ci/needed.
test: lint sandbox extras
	-$(MAKE) setup-sglang
	-$(MAKE) setup-openenv
	-$(MAKE) setup-quantizers
	-$(MAKE) setup-verifiers
	$(BIN)/python -m pytest

# With the tests marked `full`: every layout, and others that take long.
test-full: lint sandbox extras
	-$(MAKE) setup-sglang
	-$(MAKE) setup-openenv
	-$(MAKE) setup-quantizers
	-$(MAKE) setup-verifiers
	$(BIN)/python -m pytest -m ""

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(OPENENV_VENV) $(VERIFIERS_VENV) build runs
