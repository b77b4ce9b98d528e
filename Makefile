PYTHON ?= $(firstword $(foreach version,12 13 14,$(shell command -v python3.$(version))) python3)
BIN := .venv/bin
# What the demo needs is installed, and what the server and a developer need on top of it.
FOR_DEMO := .venv/.installed-demo
FOR_SERVER := .venv/.installed-serve
FOR_DEV := .venv/.installed-dev
OTHER_MEGATRONS := 0.19.0
PYTEST := pytest -p no:cacheprovider
# Two workers more than processors, because tests of servers wait; each computes anew what others know.
FORKS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 2 : 6)))
SEVERAL_AT_A_TIME := -p oracle.forked_workers --forks $(FORKS)
# Six workers a GPU. Forks cannot use one of which their parent has asked.
SEVERAL_ON_A_GPU = -n $$((6 * gpus)) --dist worksteal
# A test that hangs prints all stacks (pyproject.toml says after how long); here it ends its process as well.
HANGS_END := -o faulthandler_exit_on_timeout=true
# Workers, ranks and the processes of tests compile the package, and pytest rewrites tests, once for all of them.
unexport PYTHONDONTWRITEBYTECODE
# Tests on $$ranks ranks. Rank 0 speaks; what the others say goes to files, of which the ends are shown where the
# run fails. OMP_NUM_THREADS spares torchrun a warning.
define on_ranks
said=$$(mktemp -d) && { OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone \
  --log-dir $$said --redirects 1:3,2:3,3:3 --nproc-per-node $$ranks -m $(PYTEST) $(HANGS_END) $(1) && rm -r $$said || \
  { tail -n 60 $$said/*/*/[1-9]/std*.log; exit 1; }; }
endef
QUICK := not gpu and not long
LONG := not gpu
# Suites that run with poison in all memory that may not be read; see tests/oracle/poisoned_session.py.
POISONED := $(addprefix tests/unit/,inference models hf vllm net/transfer net/prefill_decode faults)
IMPORTS := tests/unit/test_package.py -k "import"
.PHONY: demo serve test test-processes test-ranks test-long test-poison test-fleet test-host test-gpus lint wheel house docs bench clean

demo: $(FOR_DEMO)
	@echo "A small model serves 8 conversations without the cache, and then with it: one to three minutes."
	$(BIN)/python examples/serve_conversations.py $(ARGS)

serve: $(FOR_SERVER)
	$(BIN)/mambaslots serve models/tiny-code --threads 1 $(ARGS)

test: $(FOR_DEV)
	$(MAKE) -j 2 test-processes $(if $(ARGS),,test-ranks)

# All tests but those on ranks. Beside each other both take less: one collects while ranks run.
test-processes: $(FOR_DEV)
	$(BIN)/python -m $(PYTEST) $(SEVERAL_AT_A_TIME) $(HANGS_END) -m "$(QUICK)" --durations 30 $(ARGS)

test-ranks: $(FOR_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -P tests/oracle/forked_ranks.py 2 4 -- $(HANGS_END) -m "$(QUICK)" tests/net $(ARGS)

test-long: $(FOR_DEV)
	$(if $(ARGS),,$(MAKE) test-ranks QUICK="$(LONG)")
	$(if $(ARGS),,$(MAKE) test-fleet)
	$(if $(ARGS),,$(MAKE) test-poison)
	$(BIN)/python -m $(PYTEST) $(SEVERAL_AT_A_TIME) -m "$(LONG)" --hypothesis-profile long --ignore tests/fleet $(ARGS)

test-poison: $(FOR_DEV)
	$(BIN)/python -m $(PYTEST) $(SEVERAL_AT_A_TIME) --poison -m "$(QUICK)" $(or $(ARGS),$(POISONED))

# One process after the other: Ray's own processes take what the machine has.
test-fleet: $(FOR_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m $(PYTEST) tests/fleet $(ARGS)

test-host: $(FOR_DEV)
	@test -n "$(MEGATRON)" || { \
	  echo "make test-host MEGATRON=CHECKOUT needs a checkout of NVIDIA/Megatron-LM (core_r0.19.0, main)"; exit 1; }
	$(BIN)/python tests/host/host_tests.py "$(MEGATRON)" $(if $(ARGS),-- $(ARGS))

# Of tests on ranks what is not long: the rest are 2,200 cases of the same scenarios, and take 17 minutes on two
# GPUs. ON_RANKS=gpu runs them all.
test-gpus: $(FOR_DEV)
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())') && \
	test $$gpus -ge 1 || { echo "make test-gpus needs a GPU, and torch sees none."; exit 1; }; \
	export CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-$$(seq -s, 0 $$((gpus - 1)))}; \
	(set -x; $(BIN)/python -m $(PYTEST) $(SEVERAL_ON_A_GPU) -m gpu tests/unit $(ARGS)) || exit 1; \
	$(if $(ARGS),,(set -x; $(BIN)/python -m $(PYTEST) $(SEVERAL_ON_A_GPU) --poison -m "gpu and not long" $(POISONED)) || exit 1;) \
	for ranks in $(if $(ARGS),,2 4); do \
	  if test $$gpus -lt $$ranks; then echo "tests/net was not run with $$ranks ranks: GPUs here: $$gpus"; \
	  else (set -x; $(call on_ranks,-m "$(or $(ON_RANKS),gpu and not long)" tests/net)) || exit 1; fi; done

# What could be published: dist/mambaslots-VERSION-py3-none-any.whl
wheel: $(FOR_DEMO)
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

lint: $(FOR_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tools/mypy.ini tools
	$(BIN)/python -m $(PYTEST) $(IMPORTS)

house: $(FOR_DEV)
	$(BIN)/python tools/house.py

docs: $(FOR_DEV)
	$(BIN)/python tools/docs_tables.py
	$(BIN)/python tools/api_reference.py
	$(BIN)/python tools/dashboard.py

bench: $(FOR_DEV)
	set -e; for script in benchmarks/*.py; do echo "== $$script"; PYTHONUNBUFFERED=1 $(BIN)/python $$script; done

clean:
	rm -rf .venv build dist *.egg-info

$(FOR_DEMO): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
	  echo "mambaslots needs Python 3.12 or newer, and '$(PYTHON)' is not one."; \
	  echo "Install it (Debian: apt-get install python3.12-venv; pyenv: pyenv install 3.12; or python.org),"; \
	  echo "or name yours: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up .venv, once: torch and what it needs, 5 GB on disk, some minutes on a fast line."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

$(FOR_SERVER): $(FOR_DEMO)
	@echo "Adding the server (fastapi, uvicorn, prometheus-client): 20 MB."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[serve]'
	@touch $@

$(FOR_DEV): $(FOR_DEMO)
	@echo "Adding what tests need (transformers, megatron-core, ray, ...): 2 GB on disk."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@for version in $(OTHER_MEGATRONS); do \
	  test -d .venv/megatron-$$version || \
	  $(BIN)/python -m pip install --quiet --no-deps --target .venv/megatron-$$version megatron-core==$$version || \
	  echo "megatron-core $$version could not be installed: tests/mcore/test_versions.py skips it"; done
	@touch $@
