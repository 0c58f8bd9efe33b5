# Two commands on a fresh machine: `make demo` and `make test`. Nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: test test-slow test-fuzz test-gpu demo paper lint types typed architectures kernels docs dist clean

$(VENV)/base: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/dev: $(VENV)/base
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The doctor compiles the CPU kernels once, so that every process of the tests runs the same machine code.
test: lint types
	$(BIN)/trust-tta doctor
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/dev
	$(BIN)/python -m pytest -m slow

# Ten thousand hostile inputs, new ones each time; uncaptured, so that a hang can say where it was.
test-fuzz: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m slow tests/fuzz

test-gpu: $(VENV)/dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

# The options of the methods as editors and mypy see them, from their declarations.
typed: $(VENV)/dev
	$(BIN)/python -m tests.methods.typed_stub
	$(BIN)/python -m tests.models.typed_stub

# The names and shapes of all variants as digests, by which checkpoints are recognized.
architectures: $(VENV)/dev
	$(BIN)/python -m tests.models.architectures

# The LLVM IR of the CPU kernels that ships with the package, from their sources in ops/cpu.
kernels: $(VENV)/dev
	$(BIN)/python -W ignore -m trust_tta.ops.cpu.build

demo: $(VENV)/base
	$(BIN)/trust-tta demo

# Every table and figure of the paper at small scale, each with its page, in runs/.
paper: $(VENV)/base
	$(BIN)/trust-tta paper --run --small

$(VENV)/docs: $(VENV)/base
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The variable silences a notice of the theme that docs/develop/decisions.md speaks of.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The sdist and the wheel: checked, each installed into a new environment, and tried outside of this folder.
dist: $(VENV)/base
	rm -rf dist
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	for file in dist/*.whl dist/*.tar.gz; do \
	  rm -rf build/try && $(PYTHON) -m venv build/try && \
	  build/try/bin/pip install --quiet --disable-pip-version-check -c constraints.txt $$file && \
	  (cd build/try && bin/trust-tta doctor && bin/trust-tta demo --images 32 --seeds 1 --out demo) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
