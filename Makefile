# Everything sets up what it needs by itself; nothing has to be done before.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Two environments for all checkouts on this machine that need the same: the versions of constraints.txt, without
# the project itself, which .venv is a copy of; and the lowest that pyproject.toml allows, for the unit tests.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/elastic-ps
hash = $(shell { $(PYTHON) -VV; $(PYTHON) tools/requirements.py $(1); cat $(2); } | grep -v '^--' | sha256sum | cut -c 1-12)
NEWEST := $(CACHE)/newest-$(call hash,newest,constraints.txt)
LOWEST := $(CACHE)/lowest-$(call hash,lowest,/dev/null)
LINT := $(CACHE)/lint-$(call hash,lint,/dev/null)
TIER ?= not nightly
UNIT ?= $(LOWEST)
INTEGRATION ?= $(VENV)
# A test that hangs fails after 10 minutes. Its process prints where the threads are, and another one goes on.
PYTEST = -m pytest -m '$(TIER)' --durations=50 --durations-min=1 -o faulthandler_timeout=600 \
  -o faulthandler_exit_on_timeout=true
PARALLEL := --dist=worksteal --max-worker-restart=2
# 0 for the nightly tests, one of which brings up a cluster of its own.
CLUSTER_PROCESSES ?= 2
SCALE ?= --scale 100:4 --scale 1700:2
MINUTES ?= 30
# The tests start hundreds of processes, which are not to compile the project again each.
unexport PYTHONDONTWRITEBYTECODE
SIMULATOR_SECONDS ?= 3600

.PHONY: run test test-all test-here test-unit test-integration test-docs test-cluster check lint-project docs mutants bench soak jitter proto manifests format cluster cluster-down install uninstall clean

run: $(VENV)/ready  ## Train on real data: 2 workers, then 4, then 2 again
	$(BIN)/elastic-ps run examples/digits/job.yaml $(SCALE) --report runs/digits

# Half of the time tests wait, those on the cluster most of all. Each part is printed when it is over.
test:  ## The tests for a change
	$(MAKE) --jobs=3 --keep-going --output-sync=target test-unit test-integration test-cluster

test-all:  ## Every test, with the versions swapped: unit tests the newest, integration tests the lowest
	$(MAKE) test TIER='nightly or not nightly' UNIT=$(VENV) INTEGRATION=$(LOWEST) CLUSTER_PROCESSES=0

test-here:  ## The tests that need no cluster
	$(MAKE) --jobs=2 --keep-going --output-sync=target test-unit test-integration

# The tests on the cluster wait most, for images too: the others leave them the processors, this one most of all.
test-unit: $(UNIT)/ready
	PYTHONPATH=$(CURDIR):$(CURDIR)/operator nice -n 8 $(UNIT)/bin/python $(PYTEST) $(PARALLEL) --numprocesses=logical --maxprocesses=4 tests/unit

test-integration: $(INTEGRATION)/ready
	PYTHONPATH=$(CURDIR):$(CURDIR)/operator nice -n 3 $(INTEGRATION)/bin/python $(PYTEST) $(PARALLEL) --numprocesses=3 tests/integration

test-docs: $(VENV)/ready  ## The tests that read documentation
	$(BIN)/python $(PYTEST) $(PARALLEL) --numprocesses=2 $(shell grep -rl --include='test_*.py' '/ "docs" /' tests)

# No process is replaced: the new one may wait for tests forever, while another has the cluster to itself.
test-cluster: $(VENV)/ready  ## The tests on a real Kubernetes, see `make cluster`
	$(BIN)/python $(PYTEST) -v --numprocesses=$(CLUSTER_PROCESSES) --max-worker-restart=0 \
	  --dist=loadscope --no-loadscope-reorder tests/e2e

check: $(VENV)/ready  ## Format, lint, types, layers, generated files, sizes, the site, the workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --cache-dir $(CACHE)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protobuf.py --check
	PYTHONPATH=.:operator $(BIN)/python -m elastic_operator.crd --check
	PYTHONPATH=. $(BIN)/python tools/render_install.py --check
	PYTHONPATH=.:operator $(BIN)/python tools/reference.py --check
	PYTHONPATH=.:operator $(BIN)/python tools/version.py --check
	PYTHONPATH=operator $(BIN)/python tools/chart_values.py --check
	$(BIN)/python tools/links.py
	$(BIN)/python tools/sizes.py
	$(MAKE) --no-print-directory docs lint-project

docs: $(VENV)/ready  ## The site, in build/docs; a warning is an error
	$(BIN)/python -m sphinx --builder html --fresh-env --nitpicky --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs

lint-project: $(LINT)/ready  ## The workflows, the issue forms and the citation
	$(LINT)/bin/zizmor --offline --quiet .github
	$(LINT)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(LINT)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(LINT)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(LINT)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

mutants: $(VENV)/ready  ## Small changes of the code by chance: do the unit tests notice? Takes long
	$(BIN)/python tools/mutants.py core --least 0.95
	$(BIN)/python tools/mutants.py data --least 0.85
	$(BIN)/python tools/mutants.py decisions --least 0.95
	$(BIN)/python tools/mutants.py server --least 0.85
	$(BIN)/python tools/mutants.py operator --least 0.85

bench: $(VENV)/ready  ## The benchmarks, each beside a competitor: some 15 minutes, writes a page of docs/reports
	$(BIN)/python -m benchmarks

soak: $(VENV)/ready  ## Half an hour of faults on real processes, 100,000 calls of strangers, an hour of the simulator
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)
	$(BIN)/python -m benchmarks.strangers
	$(BIN)/python -m tests.simulator --seed $$(date +%s) --seconds $(SIMULATOR_SECONDS)

jitter: $(VENV)/ready  ## The integration tests with threads that are late by chance: what fails then has a race
	ELASTIC_PS_JITTER=$${SEED:-$$(date +%s)} $(BIN)/python $(PYTEST) $(PARALLEL) --numprocesses=2 tests/integration

proto: $(VENV)/ready  ## Regenerate the protobuf modules
	$(BIN)/python tools/generate_protobuf.py

manifests: $(VENV)/ready  ## Regenerate the CRD, install.yaml and docs/reference, and repeat the version
	PYTHONPATH=.:operator $(BIN)/python tools/version.py --write
	PYTHONPATH=operator $(BIN)/python tools/chart_values.py --write
	PYTHONPATH=.:operator $(BIN)/python -m elastic_operator.crd --write
	PYTHONPATH=. $(BIN)/python tools/render_install.py --write
	PYTHONPATH=.:operator $(BIN)/python tools/reference.py --write

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

cluster: $(VENV)/ready  ## A real Kubernetes on this machine (Debian, root), with our images in it
	@$(BIN)/python -m tests.e2e.cluster up >/dev/null
	@PYTHONPATH=. $(BIN)/python tools/load_images.py
	@$(BIN)/python -m tests.e2e.cluster up

cluster-down: $(VENV)/ready
	$(BIN)/python -m tests.e2e.cluster down

install: $(VENV)/ready  ## The operator's chart on the cluster of $$KUBECONFIG, without the helm command
	@PYTHONPATH=. $(BIN)/python tools/install_chart.py install

uninstall: $(VENV)/ready
	@PYTHONPATH=. $(BIN)/python tools/install_chart.py uninstall

# Hard links where the cache is on the same disk. Its scripts name the environment that they belong to.
$(VENV)/ready: pyproject.toml constraints.txt $(NEWEST)/ready
	rm -rf $(VENV)
	cp -al $(NEWEST) $(VENV) 2>/dev/null || { rm -rf $(VENV); cp -a $(NEWEST) $(VENV); }
	grep -rlI $(NEWEST) $(BIN) | xargs sed -i 's#$(NEWEST)#$(abspath $(VENV))#g'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	rm -f $@ && touch $@

# The constraints pin torch, so that pip takes the CPU build where that is the one on offer. Two checkouts may
# come here at the same time.
$(CACHE)/%/ready:
	mkdir -p $(CACHE)
	flock $(@D).lock sh -ec '[ -e $@ ] || { \
	  $(PYTHON) -m venv --clear $(@D); \
	  $(PYTHON) tools/requirements.py $(firstword $(subst -, ,$*)) >$(@D)/requirements.txt; \
	  $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(@D)/requirements.txt; \
	  touch $@; }'

clean:
	rm -rf $(VENV) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
