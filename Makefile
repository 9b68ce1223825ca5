# The two commands of the README: `make demo` and `make test`. Both set up what they need in .venv.

PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# One thread per worker: two processes that each start two threads spend their time waiting for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-all clean

demo: $(VENV)/.runtime
	$(BIN)/python tools/demo.py

test: $(VENV)/.test
	$(PYTEST) --ignore tests/kernels -m "not slow and not gpu"
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels -m "not slow and not gpu"

test-all: $(VENV)/.test
	$(PYTEST) --ignore tests/kernels -m "not gpu"
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels -m "not gpu"

# On a machine whose Python has a torch that reaches a GPU, the environment shares it and downloads nothing else.
$(VENV)/.runtime: pyproject.toml tools/make_environment.py
	@$(PYTHON) tools/make_environment.py $(VENV) $(TORCH)
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(BIN)/python -m pip install -q -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) .dsv4-cache .pytest_cache .hypothesis
