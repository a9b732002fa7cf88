# fedpriv: `make run` reproduces a paper's column, `make test` checks the code, `make test-all` at full strength.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The package as an installation has it, with server/ and clients/ inside, for tools that read files.
INSTALLED := build/installed/fedpriv

# A process for each core; what took longest, and what was skipped and why, are printed.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist worksteal --durations=25 -rfEs

.PHONY: run test test-core test-slow test-long test-all release-check gameday scenarios e2e e2e-tools lint lock docs docs-version dist bench bench-gpu bench-peers compare clean

run: $(READY)  ## install, fetch MNIST, run the quickstart, print the table, draw the plots
	$(BIN)/fedpriv data fetch mnist
	$(BIN)/fedpriv run scenarios/quickstart.toml --out runs/quickstart --resume
	$(BIN)/fedpriv plot runs/quickstart

test: $(READY)  ## what a change must pass: five to eight minutes on two cores
	$(PYTEST)

test-slow: $(READY)  ## what `make test` leaves out: whole audits and grids, attacks at full strength, paper tables
	$(PYTEST) -m "slow and not deployment and not containers"

test-core: $(READY)  ## the core's tests, in a copy without fedpriv/addons
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.core -n logical --dist worksteal -q

MINUTES := 10
SEED := 0
gameday: $(READY)  ## a federation of three sites, and faults at random: what broke, who was told, when all was well
	FEDPRIV_ALLOW_ROOT=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.gameday --minutes $(MINUTES) --seed $(SEED)

test-long: $(READY)  ## what takes minutes for one test: audits of whole companies, curves of hard chains, MNIST alone
	$(PYTEST) -m long

test-all: test test-slow test-long gameday  ## every test but those of `make e2e`

release-check: $(READY)  ## what a release must pass beyond `make test-all`: federations that are killed, containers, ten minutes of game day
	$(MAKE) gameday MINUTES=10
	$(MAKE) e2e

scenarios: $(READY)  ## every scenario at reduced size: one seed, a few rounds
	$(BIN)/python -m benchmarks.reduced

e2e: $(READY)  ## real federations: processes that are killed, slow, wrong or full, and containers
	$(BIN)/python -m pytest -m "deployment or containers" -s -rfEs tests/e2e tests/attacks

e2e-tools:  ## what containers need, on Debian, as root
	apt-get install --yes --no-install-recommends docker.io docker-compose debootstrap

lint: $(READY)  ## style, types, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf $(INSTALLED) && mkdir -p $(INSTALLED)
	ln -s $(CURDIR)/fedpriv/* $(CURDIR)/server $(CURDIR)/clients $(INSTALLED)
	cd $(INSTALLED)/.. && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml
	cd $(INSTALLED)/.. && $(CURDIR)/$(BIN)/lint-imports --no-logo --config $(CURDIR)/pyproject.toml

lock: $(READY)  ## deploy/requirements.txt: what the image installs, by hash, for every platform; torch and torchvision not
	$(BIN)/python deploy/lock.py

docs: $(READY)  ## the documentation as a site, in site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-version: $(READY)  ## the site of this version, beside those of others, in site-versions/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/versions.py site-versions

dist: $(READY)  ## the wheel, in dist/
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

bench: $(READY)  ## speed, against Flower's Ray engine and against the limit
	$(BIN)/python -m benchmarks

# The last release: its tag or, in a clone without tags, the commit that gave it its version.
BASE = $(shell git describe --tags --abbrev=0 2>/dev/null || git log -1 --format=%h -G'^version = ' -- pyproject.toml)
PAIRS := 10
compare: $(READY)  ## this commit beside the last release, or beside BASE=COMMIT, in turns: ratios of PAIRS=10 pairs
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.compare $(BASE) HEAD --pairs $(PAIRS)

bench-gpu: $(READY)  ## rounds per second on this machine's GPU, beside Opacus and pfl (make bench-peers)
	$(BIN)/python -m benchmarks.gpu

bench-peers:  ## an environment for each peer that `make bench` compares with: .venv-pfl, .venv-opacus
	sh benchmarks/peer_environments.sh $(PYTHON)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ray,dev,docs,fast,checks]'
	touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-* build dist site site-versions runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
