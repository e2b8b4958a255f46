# Each target sets itself up; the second time that costs nothing and needs no network.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := -m pip install --quiet --disable-pip-version-check --require-hashes
PIP := $(PY) $(INSTALL)
NPM := $(VENV)/bin/npm ci --ignore-scripts --no-audit --no-fund --silent
# The tracer's packages stand apart: PyTorch, which nothing else here needs.
TRACE := $(VENV)/trace

# What Python compiles is kept: a build and the tests start many processes, and each would compile all of calc again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: site engines release publish ids readable lint test fuzz look mutate trace trace-check serve check-catalog diff lock audit versions browser clean

site: $(VENV)/.site node_modules/.site
	@$(PY) -m calc.site build site $(if $(ENGINE),--engine $(ENGINE))

# Builds the site with each engine, and compares every table cell, id and link.
engines: $(VENV)/.site node_modules/.site
	@$(PY) -m calc.site build build/engines/mkdocs
	@$(PY) -m calc.site build build/engines/properdocs --engine properdocs
	@$(PY) -m calc.site same build/engines/mkdocs build/engines/properdocs && echo "The engines agree."

serve: $(VENV)/.site node_modules/.site
	@$(PY) -m calc.site serve

# Lists the tables that the last build published for the first time: from then on a build without one of them fails.
ids: $(VENV)/.site
	@$(PY) -m calc.site ids

# Long and passive sentences of the pages, and their first ones: a list to look at. ONLY=method takes pages with that in
# their path.
readable: $(VENV)/.site
	@$(PY) -m calc.site readable $(ONLY)

check-catalog: $(VENV)/.site
	@$(PY) -m calc check

# Which published numbers and verdicts change between a revision and the working tree.
diff: $(VENV)/.site node_modules/.site
	@test -n "$(REV)" || { echo "make diff needs a revision: make diff REV=HEAD~1" >&2; exit 2; }
	@$(PY) -m calc.site diff "$(REV)"

# Writes a new version into the tree, with what changed since the last one's tag.
release: $(VENV)/.site node_modules/.site
	@test -n "$(VERSION)" || { echo "make release needs a version: make release VERSION=1.2" >&2; exit 2; }
	@$(PY) -m calc.site release "$(VERSION)"

# Puts the tagged version on the branch gh-pages, beside the others; pushes nothing.
publish: $(VENV)/.site node_modules/.site
	@$(PY) -m calc.site publish

# Layout, style, types, and contracts between packages: in seconds, before each commit.
lint: $(VENV)/.test
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo

test: lint node_modules/.test browser
	@$(PY) -m pytest

# Opens every page of the built site in a browser, as `make test` does with one of each kind; then, with nothing else
# running, asks Lighthouse how quick some are on a phone.
look: $(VENV)/.test node_modules/.test browser
	@test -f site/index.html || { echo "make look needs a built site: make site" >&2; exit 2; }
	@WHOLE_SITE="$(CURDIR)/site" $(PY) -m pytest tests/site/test_browser.py -k test_page
	@WHOLE_SITE="$(CURDIR)/site" $(PY) -m pytest tests/site/test_lighthouse.py -k performance -n 0 -rP

# Hostile input for every door of calc: SECONDS=3600 for an hour, SEED=7 for other input, DOOR=recommend for one door.
fuzz: $(VENV)/.test
	@$(PY) -m tests.fuzz --seconds $(or $(SECONDS),300) --seed $(or $(SEED),1) $(if $(DOOR),--door $(DOOR))

# Tries every small fault in the formulas against the tests, and prints those that none finds and nobody has judged.
# ONLY=runtime,loss takes files with that in their path, SAMPLE=150 draws so many faults (SEED=1), FRESH=1 forgets.
mutate: $(VENV)/.mutate
	@$(PY) tests/mutate.py --only '$(ONLY)' $(if $(SAMPLE),--sample $(SAMPLE) --seed $(or $(SEED),1)) $(if $(FRESH),--fresh)

# Traces the stored records again, or those whose id has ONLY in it, and says which changed; ADD names new scenarios.
trace: $(TRACE)/.ready
	@$(TRACE)/bin/python -m measurements.trace.stored $(if $(ONLY),--only '$(ONLY)') $(if $(ADD),--add '$(ADD)')

# What needs PyTorch: the tracer against hand counts, real runs and its own records, and the measuring harness on the CPU.
trace-check: $(TRACE)/.ready $(VENV)/.test
	@TORCH_PYTHON="$(CURDIR)/$(TRACE)/bin/python" OMP_NUM_THREADS=1 $(PY) -m pytest tests/trace tests/bench/test_bench_cpu.py -n 2

$(TRACE)/.ready: requirements/trace.txt requirements/megatron.txt | $(PY)
	@.ci/trace $(PYTHON) $(TRACE)

browser: $(VENV)/.test
	@.ci/chromium $(PY) >/dev/null

# Pins every package by version and hash, from the .in files and package.json; no address of any index goes in.
lock: $(VENV)/.site $(VENV)/lock/.ready
	@export UV_FIND_LINKS="$${PIP_FIND_LINKS-$$($(PY) -m pip config get global.find-links 2>/dev/null)}"; \
	pin="$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links"; \
	for name in site test trace mutate audit lock; do $$pin requirements/$$name.in --output-file requirements/$$name.txt; done; \
	$$pin --no-deps requirements/megatron.in --output-file requirements/megatron.txt
	@$(VENV)/bin/npm install --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --no-audit --no-fund --silent

# What is known against the packages that are pinned, where a database of vulnerabilities is reached.
audit: $(VENV)/.site $(VENV)/audit/.ready
	@$(PY) .ci/audit.py $(VENV)/audit/bin/pip-audit $(VENV)/bin/npm

# Releases of the frameworks and libraries that the package index has and calc does not know.
versions: $(VENV)/.site
	@PYTHONPATH="$(CURDIR)" $(PY) .ci/versions.py $(PY) -m pip

clean:
	@rm -rf $(VENV) node_modules site build docs/assets/calculator docs/hardware/gpus; find docs/models -name "*.md" ! -name index.md -delete

$(PY):
	@$(PYTHON) -m venv $(VENV) || { echo "A virtual environment could not be made: Python 3.11 or newer with its venv module is needed (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 2; }

$(VENV)/.site: requirements/site.txt | $(PY)
	@$(PIP) -r requirements/site.txt
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.site | $(PY)
	@$(PIP) -r requirements/test.txt
	@touch $@

# What pages run in a reader's browser, and what judges them there.
node_modules/.site: package-lock.json | $(VENV)/.site
	@$(NPM) --omit=dev
	@touch $@

node_modules/.test: package-lock.json | $(VENV)/.site
	@$(NPM)
	@touch node_modules/.site $@

# Tools that stand apart, so that what they need changes nothing else.
$(VENV)/lock/.ready $(VENV)/audit/.ready: $(VENV)/%/.ready: requirements/%.txt | $(PY)
	@$(PY) -m venv --clear $(@D) && $(@D)/bin/python $(INSTALL) -r $<
	@touch $@

$(VENV)/.mutate: requirements/mutate.txt $(VENV)/.test | $(PY)
	@$(PIP) -r requirements/mutate.txt
	@touch $@
