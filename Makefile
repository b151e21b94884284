# `make demo` and `make test` need Python 3.11+ and nothing else; each sets up what it misses, once.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PLATFORM := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK := requirements/$(PLATFORM).txt
INSTALLED := $(VENV)/.installed-$(PLATFORM)
INSTALLED_DEV := $(VENV)/.installed-dev
# Only asked when the configured registry has no CPU build of torch.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
INSTALL_cpu = $(BIN)/pip install --quiet --no-deps --requirement $(LOCK) || \
	$(BIN)/pip install --quiet --no-deps --requirement $(LOCK) --extra-index-url $(TORCH_CPU_INDEX)
INSTALL_gpu = $(BIN)/pip install --quiet --requirement $(LOCK)
INSTALL_LOCK = $(INSTALL_$(PLATFORM))
# The environment of the other targets where there is one, unless PYTHON names another.
GPU_PYTHON = $(if $(and $(wildcard $(BIN)/python),$(filter file,$(origin PYTHON))),$(BIN)/python,$(PYTHON))
DEMO_FLAGS ?=
# Most tests wait for processes that they started, so two files run at a time; whole runs have the machine to themselves.
TEST_FLAGS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all check format bench gpu clean

demo: $(INSTALLED)
	$(BIN)/atropos-grpo-run --config configs/demo.yaml $(DEMO_FLAGS)

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest tests/e2e
	$(BIN)/python -m pytest --ignore tests/e2e $(TEST_FLAGS)

# Hours. TEST_ALL names stages of tests/nightly.py, all of them if it is empty.
test-all: $(INSTALLED_DEV)
	$(BIN)/python tests/nightly.py $(TEST_ALL)

check: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare_trl.py
	$(BIN)/python -m benchmarks.broker
	$(BIN)/python -m benchmarks.trl_losses
	$(BIN)/python -m benchmarks.learner_speed
	$(BIN)/python -m benchmarks.head_memory
	$(BIN)/python -m benchmarks.sandbox
	$(BIN)/python benchmarks/sync/modes.py
	$(BIN)/python benchmarks/sync/publishing.py
	$(BIN)/python benchmarks/sync/hotswap.py
	$(BIN)/python benchmarks/sync/generate.py
	$(BIN)/python benchmarks/sync/copies.py

# Needs pytest, torch, transformers and peft alone, so it runs where vLLM cannot be had; skips, with the reason, without a GPU.
gpu:
	@if $(GPU_PYTHON) -c 'import peft, pytest, torch, transformers' 2>/dev/null; then \
		$(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . tests/gpu; \
	elif [ $(PLATFORM) = cpu ]; then echo "make gpu: skipped, nvidia-smi finds no NVIDIA GPU here"; \
	else echo "make gpu needs pytest, torch, transformers and peft; $(GPU_PYTHON) lacks one. Try: make gpu PYTHON=..." >&2; exit 2; fi

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(BIN)/python $(LOCK) pyproject.toml
	@echo "Installing the pinned packages (a few minutes, about 2 GB, once)"
	@$(INSTALL_LOCK)
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED) requirements/dev.txt
	@$(BIN)/pip install --quiet --no-deps --requirement requirements/dev.txt
	@touch $@
