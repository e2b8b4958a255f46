# Each target sets itself up; the second time that costs nothing and needs no network.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --require-hashes
UV := 0.13.8

.PHONY: site test torch-check serve check-catalog diff lock browser clean

site: $(VENV)/.site
	@$(PY) -m calc.site build site

serve: $(VENV)/.site
	@$(PY) -m calc.site serve

check-catalog: $(VENV)/.site
	@$(PY) -m calc check

# Which published numbers and verdicts change between a revision and the working tree.
diff: $(VENV)/.site
	@test -n "$(REV)" || { echo "make diff needs a revision: make diff REV=HEAD~1" >&2; exit 2; }
	@$(PY) -m calc.site diff "$(REV)"

test: $(VENV)/.test browser
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) -m pytest

# What needs PyTorch, Transformers and PEFT: the measuring harness on the CPU, and the tracer against its own records.
torch-check: $(VENV)/.test
	@test -n "$(TORCH)" || { echo "make torch-check needs a Python with PyTorch: make torch-check TORCH=path/to/python" >&2; exit 2; }
	@TORCH_PYTHON="$$(command -v $(TORCH))" OMP_NUM_THREADS=1 $(PY) -m pytest tests/bench tests/trace -n 0

browser: $(VENV)/.test
	@.ci/chromium $(PY) >/dev/null

# Pins every package by version and hash, from the .in files; no address of any index goes in.
lock: | $(PY)
	@$(PY) -m venv $(VENV)/lock && $(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	@for name in site test; do $(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links requirements/$$name.in --output-file requirements/$$name.txt; done

clean:
	@rm -rf $(VENV) site build docs/data docs/hardware/gpus; find docs/models -name "*.md" ! -name index.md -delete

$(PY):
	@$(PYTHON) -m venv $(VENV) || { echo "A virtual environment could not be made: Python 3.11 or newer with its venv module is needed (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 2; }

$(VENV)/.site: requirements/site.txt | $(PY)
	@$(PIP) -r requirements/site.txt
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.site | $(PY)
	@$(PIP) -r requirements/test.txt
	@touch $@
