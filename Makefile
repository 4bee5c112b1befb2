# The two commands of the README: make demo, make test. Each installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Tests run side by side in four or more workers (tests/conftest.py), each file in one of them, since its tests share
# training runs. The longest files begin first: pytest-xdist is kept from putting those with the most tests first.
# CI runs every test; elsewhere those marked slow are left out (make test PYTEST_ARGS='-m ""' runs them too).
SELECTION := $(if $(CI),,-m "not slow")

.PHONY: demo test test-lowest lint format bench clean

$(STAMP): requirements.txt
	PYTHON=$(PYTHON) scripts/install_system_packages.sh base
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.txt
	touch $@

# Without a GPU, on two CPU ranks if there are two cores.
demo: $(STAMP)
	$(BIN)/python zero_stage_comparison.py --model tiny --batch-size 4 --seq-length 64 --repeats 3 \
	$$(nvidia-smi --list-gpus >/dev/null 2>&1 || test $$(nproc) -lt 2 || echo --num-gpus 2)
	$(BIN)/python -m ds_bench report --html results/demo.html >/dev/null

test: $(STAMP)
	PYTHON=$(PYTHON) scripts/install_system_packages.sh test
	PATH="$(CURDIR)/tests/support/compiler:$$PATH" $(BIN)/python -m ds_bench ops
	$(BIN)/python -m pytest $(SELECTION) -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The older versions of DeepSpeed, Transformers and torch that CI leaves out; simulated cards too.
test-lowest: $(STAMP)
	for versions in "0.17.6 4.57.6" "0.16.9 4.51.3" "0.19.8 5.17.0 2.11.0"; do \
	OLDER_STACK="$$versions" $(BIN)/python -m pytest tests/integration/test_older_versions.py || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python bench/fidelity.py
	$(BIN)/python bench/overhead.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
