# Every target does its own set-up: on a fresh machine with Python 3.11, one command is enough.

PYTHON := .venv/bin/python
ARGS ?=
SECONDS ?= 30

.DEFAULT_GOAL := help
.PHONY: help setup setup-quick test test-quick check audit fuzz generated docs demo advise faults soak bench bench-peers accelerator gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with everything: vLLM's CPU build, a redis-server, the development tools
	@tools/setup.sh full

setup-quick: ## .venv with the project and its development tools only
	@tools/setup.sh quick

test: setup ## the whole suite, with real servers and real engines (ARGS=... goes to pytest)
	@$(PYTHON) -m pytest -n 3 --dist loadfile $(ARGS)

test-quick: setup-quick ## what needs neither engines nor servers: under two minutes
	@$(PYTHON) -m pytest -n 2 --dist loadfile -m "not engine and not servers and not gpu and not slow" $(ARGS)

check: setup-quick ## lint, format, types, layers, generated files, how much there is: reads only
	@failed=0; for tool in "ruff check ." "ruff format --check ." "mypy --strict" lint-imports "python -m tools.chart --check" "python -m tools.size --check"; do \
	  echo "check: $$tool"; .venv/bin/$$tool || failed=1; \
	done; exit $$failed

audit: ## known vulnerabilities of what the image and the wheels install; asks the index of advisories
	@python3 -m venv .cache/audit && .cache/audit/bin/python -m pip install --quiet pip-audit==2.10.1
	@.cache/audit/bin/pip-audit --disable-pip --require-hashes -r docker/requirements.lock -r docker/wheels.lock

generated: setup-quick ## write again what is made from code: references, the chart's schema and tables
	@.venv/bin/python -m tools.reference.commands >docs/cache-admin.md
	@.venv/bin/python -m tools.reference.settings >docs/settings.md
	@.venv/bin/python -m tools.reference.settings --schema >docs/settings.schema.json
	@.venv/bin/python -m tools.dashboards
	@.venv/bin/python -m tools.chart
	@.venv/bin/python -m tests.helm.golden

docs: setup-quick ## the documentation site, in build/site (ARGS=serve: on this machine, as you write)
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs $(if $(ARGS),$(ARGS),build --strict --site-dir build/site)

demo: setup ## two real engines share one cache, on the CPU (ARGS="--index redis://...")
	@$(PYTHON) -m tools.demo $(ARGS)

advise: setup-quick ## would a shared cache pay? On an invented day, or ARGS="RECORDING --price gpu-hour=2.5 ..."
	@$(if $(ARGS),,$(PYTHON) -m tools.recording .cache/recording)
	@.venv/bin/cache-admin advise $(or $(ARGS),.cache/recording --html .cache/advice.html)

faults: setup ## the fault matrix: an hour, writes docs/faults.md (ARGS="--rows PATTERN --quick")
	@$(PYTHON) -m trials.faults $(or $(ARGS),--write)

soak: setup ## five minutes of arrivals, aborts, preemptions and evictions on one engine
	@STORM_SECONDS=150 $(PYTHON) -m pytest tests/e2e/test_storm.py -s $(ARGS)

fuzz: setup-quick ## coverage-guided, each target for SECONDS=30, or 3600 by hand (ARGS="headers urls --json")
	@.venv/bin/python -c 'import atheris' 2>/dev/null || .venv/bin/uv pip install --quiet --python $(PYTHON) --editable '.[fuzz]'
	@$(PYTHON) -m trials.fuzz.run --seconds $(SECONDS) $(ARGS)

bench: setup ## costs of match, load and save as ratios to bare calls
	@$(PYTHON) -m trials.benchmarks.run $(ARGS)

bench-peers: setup ## beside vLLM's tiers, LMCache and Mooncake: half an hour (ARGS="--rounds 1 --variants Mooncake")
	@$(PYTHON) -m trials.benchmarks.peers.install
	@.cache/peers/venv/bin/python -m trials.benchmarks.peers --json .benchmarks/peers.json --svg .benchmarks/peers.svg $(ARGS)

accelerator: setup ## streams in any legal order on a fake accelerator: 15 minutes (ARGS="--seeds 5 --layouts items")
	@$(PYTHON) -m trials.accelerator $(ARGS)

gpu: ## the copies on a CUDA device, by this machine's own torch and triton; without one ARGS=--fake
	@python3 -m trials.gpu $(ARGS)

clean: ## remove .venv, .cache and everything built
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
