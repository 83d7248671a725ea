# make quickstart   an agent learns ALFWorld households, from nothing, on a CPU
# make test         every test
# make verl         the tests that need verl, which is installed without its pins
# make lint         ruff and pyright
# make docs         the documentation site, in site/
# make bench        every benchmark's table
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
EXTRAS := alfworld,textworld,reasoning-gym,lora,tensorboard,parquet

.PHONY: quickstart test verl lint docs bench clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed
	$(BIN)/gleanrl train quickstart --run.name "quickstart-$$(date +%Y%m%d-%H%M%S)" $(ARGS)

test: $(VENV)/.tested
	$(BIN)/python -m pytest $(ARGS)

# verl asks for older transformers and tensordict than run here, but works with these
verl: $(VENV)/.tested
	$(PIP) install -c constraints.txt ray tensordict hydra-core codetiming torchdata orjson
	$(PIP) install -c constraints.txt --no-deps verl
	$(BIN)/python -m pytest tests/examples tests/experience/test_verl.py $(ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(VENV)/.tested
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.tested
	$(PIP) install -c constraints.txt -e '.[benchmarks]'
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || exit 1; done

# Each dependency is pinned in constraints.txt, so what is installed here is what the tests ran with.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than Python 3.11; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "make: the venv module is missing; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (two to five minutes the first time)"
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS),trl,dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis
