# A thin front for CMake: what a user types. CMakePresets.json has the build types.
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local

.PHONY: all demo check soak build bench install clean setup
all: build

setup:
	@dev/setup.sh

build: setup
	@cmake --preset release >build.log 2>&1 || { cat build.log; exit 1; }
	@cmake --build --preset release -j $(JOBS) >build.log 2>&1 || { cat build.log; exit 1; }
	@rm -f build.log

# Trains a GPT on the King James Bible, then writes in its style.
demo: build
	@dev/demo.sh

# Every test; TESTING.md says what is in it.
check: setup
	@dev/check.sh

# A million calls at random, with failures put in, against a plain program; prints the seed of what fails. CALLS: how many.
soak: build
	@build/tests/random_calls_test --soak $(or $(CALLS),1000000)

bench: build
	@bench/run.sh

install: build
	@cmake --install build --prefix $(PREFIX)

clean:
	rm -rf build build-* build.log
