# SPDX-License-Identifier: Apache-2.0
# Every target brings its environment up to date first; nothing else needs doing before any of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := bus native consumers engine_hooks cli
CHECKED := $(ROOMS) tests bench tools examples docker
export OMP_WAIT_POLICY := passive
# LMCache's builtin chain begins at a hash that depends on it: the tests compute the chains that an engine computes.
export PYTHONHASHSEED := 0

.PHONY: demo test test-vllm018 test-lmcache044 lint typecheck bench drill format clean
.PHONY: environment environment-vllm018 environment-lmcache044 typecheck-links

demo: environment ## the main job, end to end, on a real engine
	@$(BIN)/semkv demo $(DEMO_ARGS)

test: environment ## the whole suite
	@$(BIN)/python -m pytest $(TEST_ARGS)

test-vllm018: environment-vllm018 ## the end-to-end tests on the pair that production uses, vLLM 0.18.0 and LMCache 0.4.3
	@.venv-vllm018/bin/python -m pytest tests/end_to_end tests/engine_hooks $(TEST_ARGS)

test-lmcache044: environment-lmcache044 ## the hooks' and the storage's tests with LMCache 0.4.4
	@.venv-lmcache044/bin/python -m pytest tests/engine_hooks tests/consumers/storage tests/end_to_end $(TEST_ARGS)

.PHONY: test-taken-out
test-taken-out: environment ## the end-to-end tests without the hooks, the subscriber, the registration: they must fail
	@$(BIN)/python -m tests.taken_out

lint: environment ## ruff, import-linter, clang-format, codespell, SPDX headers
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/lint-imports
	@git ls-files '*.cpp' '*.h' | xargs -r $(BIN)/clang-format --dry-run --Werror
	@$(BIN)/codespell
	@$(BIN)/python tools/check_headers.py
	@$(BIN)/python -m semkv.native.kv_format.idioms $(ROOMS)

typecheck: environment typecheck-links ## mypy, strict
	@MYPYPATH=.typecheck $(BIN)/mypy $(foreach room,$(ROOMS),-p semkv.$(room))

typecheck-links:
	@mkdir -p .typecheck/semkv && cd .typecheck/semkv && for room in $(ROOMS); do ln -sfn ../../$$room $$room; done

bench: environment ## the figures of docs/performance.md, measured on this machine
	@$(BIN)/python -m bench $(BENCH_ARGS)

format: environment ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix $(CHECKED); $(BIN)/ruff format $(CHECKED)
	@git ls-files '*.cpp' '*.h' | xargs -r $(BIN)/clang-format -i

drill: environment ## live requests, prefetches, evicts, pressure and faults at once, for minutes
	@$(BIN)/python -m bench.drill --seconds 300 --faults $(DRILL_ARGS)
	@$(BIN)/python -m bench.drill_vllm --seconds 120

environment:
	@$(PYTHON) tools/environment.py default

environment-vllm018:
	@$(PYTHON) tools/environment.py vllm018

environment-lmcache044:
	@$(PYTHON) tools/environment.py lmcache044

clean: ## remove the environments and everything built
	rm -rf .venv .venv-vllm018 .venv-lmcache044 .typecheck build .cache

.PHONY: test-compose
test-compose: environment ## the stack of docker-compose.yml in real containers, with a Docker daemon of its own (root)
	@$(BIN)/python docker/try_stack.py $(COMPOSE_ARGS)
