# make demo    everything from nothing: environment, embedded model, real rollouts, a look at them
# make test    the test suite, with real vLLM in it
# make check   ruff, mypy --strict, import-linter, pages of docs/ that are made
# make bench   benchmarks (tests/benchmarks)
# make soak    fault tests at length: hundreds of kills, a thousand flipped bits (tests/soak); OPTIONS="--kills 1000"
# make native-gpu   on a CUDA device with vLLM: proof that its sampling masks are exact, and their speed (tests/native);
#              PYTHON=... is the environment (default: .venv), MODEL=... the model (default: embedded, or a tiny one)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/smollm2
BENCH_PACKAGES := .cache/bench-packages
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

export VLLM_LOGGING_LEVEL ?= ERROR
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: venv model demo test check format bench soak native-gpu clean

venv: $(VENV)/.made

# The lock file pins every package of the CPU environment. Torch's CPU build comes first, from wherever it is to be had:
# the plain index has only the CUDA build, several gigabytes of it.
$(VENV)/.made: requirements-cpu.lock pyproject.toml
	@echo "installing the packages into $(VENV): 2-3 minutes"
	$(PYTHON) -m venv $(VENV)
	torch=$$(grep '^torch==' requirements-cpu.lock); \
	$(PIP) install --no-deps "$$torch" 2>/dev/null || $(PIP) install --no-deps --index-url $(TORCH_INDEX) "$$torch"
	$(PIP) install --no-deps --requirement requirements-cpu.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

model: $(MODEL)

$(MODEL): $(VENV)/.made
	$(BIN)/python examples/embedded_model.py $(MODEL)
	touch $(MODEL)

demo: venv model
	$(BIN)/rollgen generate examples/prompts.jsonl --model $(MODEL) --dtype float32 --out demo-rollouts --clean \
		--temperature 0.8 --top-k 50 --top-p 0.9 --n 2 --max-tokens 96 --max-model-len 1024
	$(BIN)/rollgen inspect demo-rollouts
	@printf '\nWhat next:\n'
	@echo '  $(BIN)/rollgen inspect demo-rollouts --html demo.html   # a page to look at it'
	@echo '  $(BIN)/python examples/02_train_step.py demo-rollouts   # a training step on it'
	@echo '  docs/tutorial.md                                      # from prompts to trained steps'

# One thread an engine: on few cores threads that spin for each other take several times as long. Tests wait for something
# half of their time, so there are more processes than cores: two for tests with vLLM, which are in two chains
# (tests/models/schedule.py), and some for all others. What vLLM compiles for this CPU is compiled once;
# headers would be for each temporary directory.
test: export OMP_NUM_THREADS := 1
test: export VLLM_CPU_OMP_THREADS_BIND := nobind
test: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/torchinductor
test: export TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS := 0
test: PROCESSES := $(shell cores=$$(env -u OMP_NUM_THREADS nproc); echo $$((cores < 6 ? cores + 2 : 8)))
test: venv model
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/make_pages.py --check

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/make_pages.py

bench: venv model $(BENCH_PACKAGES)
	$(BIN)/python -m tests.benchmarks

# The benchmarks run without these packages too, and then say so.
$(BENCH_PACKAGES): tests/benchmarks/requirements.txt $(VENV)/.made
	rm -rf $@
	$(PIP) install --no-deps --target $@.new --requirement $< && mv $@.new $@ && touch $@ || rm -rf $@.new

soak: venv
	$(BIN)/python -m tests.soak $(OPTIONS)

# A CUDA environment is not made here: what is given, else .venv.
native-gpu: export HF_HUB_OFFLINE := 0
native-gpu:
	$(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) -m tests.native \
		$(if $(filter-out file,$(origin MODEL)),--model "$(MODEL)")

clean:
	rm -rf $(VENV) .cache demo-rollouts
