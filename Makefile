PYTHON ?= python3.12
BIN := .venv/bin
INSTALLED := .venv/.installed
OTHER_MEGATRONS := 0.18.2 0.19.0
PYTEST := pytest -p no:cacheprovider
# Ranks on the CPU, of which rank 0 speaks; OMP_NUM_THREADS spares torchrun a warning.
RANKS := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --local-ranks-filter 0
WITHOUT_GPU := not gpu and not long

.PHONY: demo test test-ranks test-long lint bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/serve_conversations.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m $(PYTEST) -n 2 -m "$(WITHOUT_GPU)" $(ARGS)
	$(if $(ARGS),,$(MAKE) test-ranks)

test-ranks: $(INSTALLED)
	for ranks in 2 4; do \
	  $(RANKS) --nproc-per-node $$ranks -m $(PYTEST) -m "$(WITHOUT_GPU)" tests/distributed $(ARGS) || exit 1; done

test-long: $(INSTALLED)
	$(BIN)/python -m $(PYTEST) -n 2 -m "not gpu" $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf .venv build *.egg-info

$(INSTALLED): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { \
	  echo "mambaslots needs Python 3.12, and '$(PYTHON)' is not one."; \
	  echo "Install it (Debian: apt-get install python3.12-venv; pyenv: pyenv install 3.12; or python.org),"; \
	  echo "or name yours: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@for version in $(OTHER_MEGATRONS); do \
	  test -d .venv/megatron-$$version || \
	  $(BIN)/python -m pip install --quiet --no-deps --target .venv/megatron-$$version megatron-core==$$version || \
	  echo "megatron-core $$version could not be installed: tests/mcore/test_versions.py skips it"; done
	@touch $@
