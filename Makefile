# make demo   install what the demo needs into .venv, and run it
# make test   install the rest, and run the quick tests: of each test two cases at most
# make isa    run the tests that depend on rounding, with older CPU instruction sets
# make slow   run the slow tests (ant, other physics backends, the whole demo) and all cases of the others beyond two;
#             SLOW='(slow or more) and not sweep' leaves the longest out
# make check  check format, lint, types, layers and plain English
# make demo-matrix  repeat the demo's training with 4 seeds and 3 instruction sets
# make matrix  run the core tests with the Python of a Debian release and the newest libraries (as root; RELEASE=trixie, ROOT=folder)
# make floors  run the core tests with the lowest versions that pyproject.toml allows (VENV_OF_FLOORS=folder, a new one)
# make torch-sims  run the tests of simulators that need another MuJoCo, and of ManiSkill3, in .cache/torch-sims
# make mutate  count how many one-line changes of the core the tests notice (half an hour)
# make coverage  print the share of branches of the core's packages that the quick tests run
# make picture  train the policies of README's two pictures, and draw these (3 minutes)
# make gallery  draw an environment of each library into the picture of docs/worlds.md
# make docs   build the site into .cache/docs, offline; warnings are errors
# make bench  measure beside the peers in half an hour, and renew the pages that show it (make report: only the pages)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
# The persistent compile cache makes second runs of the suite faster, small programs included: there are thousands.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

.PHONY: demo demo-matrix test isa slow check matrix floors torch-sims mutate coverage picture gallery docs bench report format clean

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $(DEMO)

$(STAMP): $(DEMO)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(DEMO)
	$(BIN)/python -m envkit demo

demo-matrix: $(STAMP)
	ENVKIT_DEMO_CACHE=$(CURDIR)/.cache/demo $(BIN)/python -m bench.demo_matrix

# Two processes share two cores: threads of torch in each would wait for each other, spinning.
test isa slow: export OMP_NUM_THREADS = 1
# Where Python is told to keep no bytecode, each of many hundred workers would compile all modules anew. Empty means no.
test isa slow: export PYTHONDONTWRITEBYTECODE =

# A file of tests stays in one process, with the envs it has compiled.
test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not more' -n 2 --dist loadfile

# XLA, torch and MKL keep to SSE4.2; what is compiled for it has a cache of its own.
isa: export JAX_COMPILATION_CACHE_DIR = $(CURDIR)/.cache/jax-sse4_2
isa: export XLA_FLAGS = --xla_cpu_max_isa=SSE4_2
isa: export ATEN_CPU_CAPABILITY = default
isa: export MKL_CBWR = COMPATIBLE
ISA ?= rounding and not slow
isa: $(STAMP)
	$(BIN)/python -m pytest -m '$(ISA)' -n 2 --dist loadfile

SLOW ?= slow or more
slow: $(STAMP)
	$(BIN)/python -m pytest -m '$(SLOW)' --timeout 900 -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m tests.words

# The root lies in ROOT, else in the user's cache folder; it takes 7 GB, most of it torch with CUDA.
RELEASE ?= trixie
matrix:
	$(PYTHON) -m bench.matrix newest --debian $(RELEASE) $(if $(ROOT),--root '$(ROOT)')

VENV_OF_FLOORS ?= .cache/floors
floors: $(STAMP)
	$(BIN)/python -m bench.matrix lowest --venv $(VENV_OF_FLOORS)

mutate: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[mutate]'
	$(BIN)/python -m bench.mutate

# These simulators pin another MuJoCo than constraints.txt; of the other versions, theirs are those of constraints.txt too.
SIMS := .cache/torch-sims
torch-sims: export MJLAB_WARP_QUIET = 1
torch-sims:
	$(PYTHON) -m venv $(SIMS)
	grep -v mujoco constraints.txt > $(SIMS)/constraints.txt
	$(SIMS)/bin/python -m pip install -q -c $(SIMS)/constraints.txt -e '.[mjlab]' mani-skill hypothesis psutil pytest pytest-timeout
	$(SIMS)/bin/python -m pytest tests/torch_sims

MEASURED := rules data specs functional env transforms
coverage: export OMP_NUM_THREADS = 1
coverage: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[coverage]'
	$(BIN)/python -m pytest -m 'not slow and not more' -n 2 --dist loadfile --cov-branch --cov-report= --cov=envkit
	@for package in $(MEASURED); do echo "$$package $$($(BIN)/python -m coverage report --include='envkit/'$$package'.py,envkit/'$$package'/*' --format=total) %"; done

picture: $(STAMP)
	$(BIN)/python -m bench.picture
	$(BIN)/python -m bench.learning_curve

gallery: $(STAMP)
	$(BIN)/python -m bench.gallery

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m bench.report --check
	$(BIN)/python -m sphinx -q -W --keep-going docs .cache/docs

# What README's table and docs/benchmarks.md show, in one run of half an hour. Each other module of bench/ measures one thing,
# see docs/benchmark_log.md: python -m bench.pool_policy
WORKS := gym_pool collect async_pool brax_step brax_scan gradient worlds scaling

bench: export BENCH_RUN = $(shell date -u +%FT%TZ)
bench: $(STAMP)
	for work in $(WORKS); do $(BIN)/python -m bench.$$work || exit 1; done
	$(BIN)/python -m bench.report

report: $(STAMP)
	$(BIN)/python -m bench.report

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache demo_out
