# One target for each habit. Every target sets up the environment first if that is due.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter of a supported version.
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $$name && break; done)

.DEFAULT_GOAL := help
# Of `test-lowest`. Wheels of torch for Linux on PyPI bring gigabytes of CUDA, so its lowest version is
# asked for by name: TORCH=2.4.0.
LOWEST_PYTHON ?= $(BIN)/python
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
QUICK := tests/unit tests/golden tests/integration/test_psserver_cli.py \
	tests/integration/test_launch.py tests/integration/test_training.py
# What one change breaks most often; `test` has the rest, kernels, journals, pipelines and commands among it.
FAST := tests/house tests/unit/psserver/decisions tests/unit/psserver/engine tests/unit/psserver/access \
	tests/unit/psworker/replica tests/unit/psworker/gossip tests/unit/psworker/job tests/golden \
	tests/paper/test_asgd.py tests/paper/test_od.py \
	tests/paper/test_diloco.py --ignore tests/house/test_site.py --ignore tests/house/test_dependencies.py

.PHONY: .cupy simulate speed-against help setup run test test-fast test-slow test-lowest format check check-deploy docs proto bench results bench-peers soak fuzz test-gpu test-ray test-recipes clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

setup: $(STAMP) ## make .venv with everything in it, if that is due
	@echo "$(VENV) is up to date with pyproject.toml and constraints.txt"

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; set PYTHON=" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version), the versions of constraints.txt, and Paceline as it is here"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing: torch alone is hundreds of megabytes, so this may take minutes and says nothing meanwhile"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "done: $(BIN)/psserver and $(BIN)/psworker are there; next: make run, make test"

run: $(STAMP) ## train a small model on two shards and two workers
	$(BIN)/psworker demo --json

# Byte code is kept whatever the machine's variables say: hundreds of processes import the same files.
# Alone, a folder or file runs whole; a single file needs no four processes.
test: $(STAMP) ## the test suite, but for the tests that take about half a second of CPU or more each; T= one file or folder
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(or $(T),-n 4 --dist worksteal -m "not slow")

test-fast: $(STAMP) ## under a minute: formulas of the rules, state machines, the house rules
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(FAST)

test-slow: $(STAMP) ## those: kill loops, whole examples and scripts, sharded models
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist worksteal -m slow

test-lowest: $(STAMP) ## the quick tests on the lowest version of everything (LOWEST_PYTHON=, TORCH=)
	rm -rf .venv-lowest && $(LOWEST_PYTHON) -m venv .venv-lowest
	$(BIN)/python scripts/lowest.py --replace torch==$(TORCH) --python "$$(.venv-lowest/bin/python \
		-c 'import sys; print("%d.%d" % sys.version_info[:2])')" > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet --only-binary :all: \
		--constraint .venv-lowest/lowest.txt --editable '.[dev]'
	.venv-lowest/bin/python -m pytest -n 2 -W ignore::DeprecationWarning $(QUICK)

format: $(STAMP) ## format the code, and repair what the linter can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format .

check: $(STAMP) ## lint, format, types, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/gen_proto.py --check

# Most of its tests wait for leases, starts of processes and downloads, so four files run at a time.
# CHECK_DEPLOY=write keeps the summary at its end for the pages.
check-deploy: $(STAMP) ## deploy/ on Docker, Kubernetes, Slurm, Ray, Prometheus, etcd, the dashboard in Chromium, the wheel; as root
	-$(MAKE) .venv-ray/ready
	CHECK_DEPLOY=$(or $(CHECK_DEPLOY),1) $(BIN)/python -m pytest -q -rfEs -n 4 --dist loadfile @tests/deploy/tests.txt

docs: $(STAMP) ## the documentation as a site, built and served at http://127.0.0.1:8000: its search needs a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "http://127.0.0.1:8000 shows the site until Ctrl-C; its files are in build/site"
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

proto: $(STAMP) ## regenerate pscore/pb from proto/
	$(BIN)/python scripts/gen_proto.py

bench: $(STAMP) ## the benchmarks, with tables and plots
	$(BIN)/python -m benchmarks

results: $(STAMP) ## claims of papers through the product, on one page in bench-out/claims; an hour, as root
	$(BIN)/python -m benchmarks.claims

bench-peers: $(STAMP) ## Paceline beside torch RPC, Gloo, MXNet, TensorFlow and Ray
	$(BIN)/python -m benchmarks.peers --json

speed-against: $(STAMP) ## rounds of this checkout and of another by turns: make speed-against REF=v0.1
	rm -rf .speed-against && git worktree prune
	git worktree add --quiet --detach .speed-against $(REF)
	$(BIN)/python -m benchmarks.versions .speed-against; git worktree remove --force .speed-against

soak: $(STAMP) ## half an hour of workers that join and leave: nothing may grow
	$(BIN)/python -m benchmarks.soak --seconds 1800 --json

simulate: $(STAMP) ## 21,000 seeds of the simulator: every rule, with faults and with workers that come and go
	$(BIN)/python -m tests.sim sweep 500
	$(BIN)/python -m tests.sim peers 0 10000

fuzz: $(STAMP) ## a million mutated frames, guided by coverage
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(BIN)/python -m tests.attacks.fuzz_frames -runs=1000000

test-recipes: ## the recipes of docs/recipes.md that need Lightning, Hugging Face or a compiler
	@test -x .venv-recipes/bin/python || $(PYTHON) -m venv .venv-recipes
	.venv-recipes/bin/python -m pip install --quiet --constraint constraints-recipes.txt \
		--editable '.[lightning,transformers]' hypothesis pytest pytest-timeout
	.venv-recipes/bin/python -c 'import accelerate, lightning, transformers'
	.venv-recipes/bin/python -m pytest -m recipes tests/integration/test_heavy_recipes.py

.venv-ray/ready: pyproject.toml constraints-ray.txt
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --constraint constraints-ray.txt --editable '.[ray]'
	@touch $@

test-ray: $(STAMP) .venv-ray/ready ## examples/ray_train.py on a real Ray, with kills, in an environment of its own
	CHECK_DEPLOY=1 $(BIN)/python -m pytest -rs tests/deploy/test_ray.py

.cupy: $(STAMP)
	cuda=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "").split(".")[0])') && \
	{ test -z "$$cuda" || $(BIN)/python -c 'import cupy' 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cuda$$cuda]"; }

test-gpu: $(if $(GPU_PYTHON),,.cupy) ## what needs a CUDA device, and the figures of docs/gpu.md; GPU_PYTHON= an interpreter with all installed
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -n 4 --dist worksteal -W default -m gpu tests/gpu
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu --json --results docs/results/gpu.json
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.pages

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) .venv-lowest .venv-recipes .venv-ray build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
