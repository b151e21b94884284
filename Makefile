# `make demo` and `make test` need Python 3.11+ and nothing else; each installs what is missing, once.
PYTHON ?= python3
# The pinned torch is built for CUDA 13, which needs driver 580 and no GPU older than compute capability 7.5; the served
# types need 8.0. Trainer and server of the demo need about 4 GiB. A figure that the driver does not report is not checked.
GPU_REFUSED := $(shell nvidia-smi --query-gpu=driver_version,compute_cap,memory.free --format=csv,noheader,nounits \
	2>/dev/null | awk -F', *' 'NR == 1 { \
	if ($$1 ~ /^[0-9]/ && $$1 + 0 < 580) print "its driver is " $$1 ", and the pinned torch needs 580 or newer"; \
	else if ($$2 ~ /^[0-9]/ && $$2 + 0 < 8) print "its compute capability is " $$2 ", and 8.0 is needed"; \
	else if ($$3 ~ /^[0-9]/ && $$3 + 0 < 4096) print "it has " $$3 " MiB free, and 4096 are needed" }')
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
PLATFORM := $(if $(HAS_GPU),$(if $(GPU_REFUSED),cpu,gpu),cpu)
OTHER_PLATFORM = $(if $(filter cpu,$(PLATFORM)),gpu,cpu)
# The two builds of vLLM cannot be in one environment.
VENV := $(if $(wildcard .venv/.installed-$(OTHER_PLATFORM)),.venv-$(PLATFORM),.venv)
BIN := $(VENV)/bin
LOCK := requirements/$(PLATFORM).txt
INSTALLED := $(VENV)/.installed-$(PLATFORM)
INSTALLED_DEV := $(VENV)/.installed-dev
# Only asked when the configured registry has no CPU build of torch.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
INSTALL = $(BIN)/python requirements/install.py
INSTALL_cpu = $(INSTALL) --or-from $(TORCH_CPU_INDEX) --no-deps --requirement $(LOCK)
INSTALL_gpu = $(INSTALL) --requirement $(LOCK)
# The environment of the other targets where there is one, unless PYTHON names another.
GPU_PYTHON := $(if $(and $(wildcard $(BIN)/python),$(filter file,$(origin PYTHON))),$(BIN)/python,$(PYTHON))
DEMO_FLAGS ?=
# For pytest, or a selection of files: GPU_FLAGS="-k packed", GPU_FLAGS="--files test_learner.py".
GPU_FLAGS ?=
# Most tests wait for processes that they started, so two files run at a time.
TEST_FLAGS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Packages are installed as source and compiled when they are first imported. Where this variable is set, as images of Python
# often do, each process would compile torch and vLLM again: 18 s of a core for the demo.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all chaos check format bench docs gpu clean

demo: $(INSTALLED)
ifeq ($(PLATFORM),gpu)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "$(BIN)/atropos-grpo-run --config configs/demo.yaml $(DEMO_FLAGS)"; \
		$(BIN)/atropos-grpo-run --config configs/demo.yaml $(DEMO_FLAGS); \
	else $(MAKE) --no-print-directory demo PLATFORM=cpu GPU_REFUSED="the installed torch cannot use it"; fi
else
	@$(if $(and $(HAS_GPU),$(GPU_REFUSED)),echo "The GPU is left aside: $(GPU_REFUSED). The demo runs on the CPU")
	$(if $(HAS_GPU),CUDA_VISIBLE_DEVICES= )$(BIN)/atropos-grpo-run --config configs/demo.yaml $(DEMO_FLAGS)
endif

# Tests start servers in float32, several at a time, with adapters too, which vLLM's kernels for GPUs do not serve: they run
# on the CPU. `make gpu` has the checks of a GPU.
ifeq ($(PLATFORM),gpu)
test test-all chaos:
	@$(MAKE) --no-print-directory $@ PLATFORM=cpu
else
ifneq ($(HAS_GPU),)
test test-all chaos: export CUDA_VISIBLE_DEVICES :=
endif
# A test that fails is printed and run once more, alone: two landings of 6,500 tests were lost to one that met a process
# at the moment of its death. `make test-all` gives nothing a second try.
AGAIN = --last-failed --last-failed-no-failures none
test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest tests/e2e $(TEST_FLAGS) || $(BIN)/python -m pytest tests/e2e $(AGAIN)
	$(BIN)/python -m pytest --ignore tests/e2e $(TEST_FLAGS) || $(BIN)/python -m pytest --ignore tests/e2e $(AGAIN)

# Hours. TEST_ALL names stages of tests/nightly.py, all of them if it is empty. Tests that passed at this commit are not
# run again.
test-all: $(INSTALLED_DEV)
	$(BIN)/python -m tests.nightly $(TEST_ALL)

# Kills broker, environment, server, engine and trainer of real runs at random; the weights of a run over recorded groups
# must be those of an undisturbed run.
KILLS ?= 20
MODES ?= shared_vllm
chaos: $(INSTALLED_DEV)
	ATROPOS_CHAOS_KILLS=$(KILLS) ATROPOS_CHAOS_MODES=$(MODES) $(BIN)/python -m pytest tests/e2e/test_chaos.py \
		-o log_cli=true -o log_cli_level=INFO
endif

check: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in build/site.
docs: $(INSTALLED_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare_trl.py
	$(BIN)/python -m benchmarks.demo_generation
	$(BIN)/python -m benchmarks.broker
	$(BIN)/python -m benchmarks.broker.fsync
	$(BIN)/python -m benchmarks.broker.watching
	$(BIN)/python -m benchmarks.broker.soak
	$(BIN)/python benchmarks/mutated_bodies
	$(BIN)/python -m benchmarks.bf16_updates
	$(BIN)/python -m benchmarks.trl_losses
	$(BIN)/python -m benchmarks.learner_speed
	$(BIN)/python -m benchmarks.head_memory
	$(BIN)/python -m benchmarks.sandbox
	$(BIN)/python -m benchmarks.stragglers
	$(BIN)/python benchmarks/staleness.py
	$(BIN)/python benchmarks/sync/modes.py
	$(BIN)/python benchmarks/sync/publishing.py
	$(BIN)/python benchmarks/sync/lora_only.py
	$(BIN)/python benchmarks/sync/generate.py
	$(BIN)/python benchmarks/sync/copies.py

# Needs only pytest, torch, transformers and peft, so it runs where vLLM is not available; without a GPU it says what it skips.
gpu: $(if $(and $(HAS_GPU),$(filter $(BIN)/python,$(GPU_PYTHON))),$(INSTALLED_DEV))
	@$(GPU_PYTHON) tests/gpu/run.py $(GPU_FLAGS)

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(BIN)/python $(LOCK) pyproject.toml
	@echo "Installing the pinned packages (about 2 GB, once)"
	@$(INSTALL_$(PLATFORM))
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED) requirements/dev.txt
	@$(INSTALL) --no-deps --requirement requirements/dev.txt
	@touch $@
