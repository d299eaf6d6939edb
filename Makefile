# Builds, tests and installs cudapool. Cargo builds the Rust parts; this file joins them with the C and C++
# consumers, the simulated driver and the checks that are not Cargo's. `make help` lists the targets.

CARGO  ?= cargo
CC     ?= cc
CXX    ?= c++
PYTHON ?= python3
PREFIX ?= /usr/local

# Warnings are errors in everything that includes the public header.
CTEST_WARNINGS := -Wall -Wextra -Wpedantic -Werror
CTEST_CFLAGS   := -std=c99 $(CTEST_WARNINGS) -O1 -g
CTEST_CXXFLAGS := -std=c++11 $(CTEST_WARNINGS) -O1 -g
CTEST_CPPFLAGS := -D_GNU_SOURCE -Iinclude -Isim/include -Ic-tests
CTEST_LIBS     := -pthread -ldl

lib     := target/release/libcudapool.so
sim     := target/sim/libcuda.so.1
version  = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The dynamic loader's path of everything that runs on the simulated driver.
on_sim  := LD_LIBRARY_PATH=$(CURDIR)/target/sim:$(CURDIR)/target/release

c_tests := $(patsubst c-tests/%.c,target/c-tests/%,$(wildcard c-tests/*.c)) \
           $(patsubst c-tests/%.cpp,target/c-tests/%,$(wildcard c-tests/*.cpp))

.PHONY: all lib sim header test c-tests c-tests-build fmt lint doc rust-test exports \
        real-test client-test asan valgrind install clean help
.DELETE_ON_ERROR:

all: lib preload ## Build the library and the preload shim

lib: ## Build target/release/libcudapool.so
	$(CARGO) build --release -p cudapool

sim: ## Build the simulated driver, target/sim/libcuda.so.1
	$(CARGO) build --release -p cudasim
	@mkdir -p target/sim
	@# By rename, so that a program that is just opening it sees the old file or the new one, whole.
	@cmp -s target/release/libcudasim.so $(sim) || { \
	    cp target/release/libcudasim.so $(sim).new$$$$ && mv -f $(sim).new$$$$ $(sim); }
	@ln -sfn libcuda.so.1 target/sim/libcuda.so

header: ## Write include/cudapool.h from src/ffi
	CUDAPOOL_WRITE_HEADER=1 $(CARGO) build

# Recipes that are kept with what they build.
-include examples/Makefile.inc
include tests/preload/Makefile.inc

# ---- tests ----

# The runner comes last and alone, so that its count is the last line.
test: fmt lint doc rust-test exports real-test client-test demo-test preload-test bundle-test c-tests-build ## Run everything
	$(on_sim) c-tests/run.sh target/c-tests

fmt:
	$(CARGO) fmt --all --check

lint:
	$(CARGO) clippy --workspace --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

rust-test: sim
	$(on_sim) $(CARGO) test --workspace

# Only the functions of the header may be visible.
exports: lib
	@nm -D --defined-only $(lib) | awk '{ print $$NF }' | LC_ALL=C sort | diff c-tests/exports.golden - \
	    && echo "exports: as in c-tests/exports.golden"

# 77: nothing could be checked here (no network, or the machine has a driver).
real-test: lib sim
	@tests/real/run.sh || [ $$? -eq 77 ]

client-test: lib sim preload
	@tests/clients/run.sh || [ $$? -eq 77 ]

c-tests: c-tests-build ## Build and run the C and C++ consumers on the simulated driver
	$(on_sim) c-tests/run.sh target/c-tests

c-tests-build: lib sim $(c_tests)

c_test_headers := $(wildcard c-tests/*.h sim/include/*.h) include/cudapool.h

# dlopen.cpp alone is not linked with the library: it opens it at run time.
link_lib := -Ltarget/release -lcudapool
target/c-tests/dlopen: link_lib :=
target/c-tests/torch_extension: examples/torch/extension.cpp c-tests/c10/util/Exception.h

$(c_tests): | lib

target/c-tests/%: c-tests/%.c $(c_test_headers)
	@mkdir -p $(@D)
	$(CC) $(CTEST_CFLAGS) $(CTEST_CPPFLAGS) $< -o $@ $(link_lib) $(CTEST_LIBS)

target/c-tests/%: c-tests/%.cpp $(c_test_headers)
	@mkdir -p $(@D)
	$(CXX) $(CTEST_CXXFLAGS) $(CTEST_CPPFLAGS) $< -o $@ $(link_lib) $(CTEST_LIBS)

# ---- the same tests under checkers of memory ----

host         = $(shell rustc -vV | sed -n 's/^host: //p')
asan_dir     = target/asan/$(host)/release
asan_tests   := $(patsubst target/c-tests/%,target/c-tests-asan/%,$(c_tests))

# The library with AddressSanitizer (which the stable compiler has, but hides). The test programs bring its
# run-time library. hostoom.c is left out: it replaces the allocator itself.
asan: sim asan-lib $(asan_tests) ## Run the C tests with AddressSanitizer
	LD_LIBRARY_PATH=$(CURDIR)/target/sim:$(CURDIR)/$(asan_dir) ASAN_OPTIONS=detect_leaks=0 CTEST_SLOWER=5 \
	    CTEST_SKIP=hostoom c-tests/run.sh target/c-tests-asan

.PHONY: asan-lib
asan-lib:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
	    $(CARGO) build --release --target $(host) --target-dir target/asan

$(asan_tests): | asan-lib
target/c-tests-asan/%: link_lib = -L$(asan_dir) -lcudapool
target/c-tests-asan/dlopen: link_lib :=

target/c-tests-asan/%: c-tests/%.c $(c_test_headers)
	@mkdir -p $(@D)
	$(CC) $(CTEST_CFLAGS) -fsanitize=address $(CTEST_CPPFLAGS) $< -o $@ $(link_lib) $(CTEST_LIBS)

target/c-tests-asan/%: c-tests/%.cpp $(c_test_headers)
	@mkdir -p $(@D)
	$(CXX) $(CTEST_CXXFLAGS) -fsanitize=address $(CTEST_CPPFLAGS) $< -o $@ $(link_lib) $(CTEST_LIBS)

# Slow: the programs that do most with little time.
valgrind: c-tests-build ## Run the C tests under valgrind
	$(on_sim) CTEST_SLOWER=20 CTEST_WRAPPER="valgrind -q --error-exitcode=9" \
	    c-tests/run.sh target/c-tests contract bad_input capture context options exit_atexit exit_static

# ---- the bundle for a machine with a GPU ----

-include gpu/Makefile.inc

# ---- install ----

install: lib preload ## Install libraries, header and pkg-config file under PREFIX
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include
	install -m 755 $(lib) $(DESTDIR)$(PREFIX)/lib/libcudapool.so
	install -m 755 $(preload_shim) $(DESTDIR)$(PREFIX)/lib/libcudapool_preload.so
	install -m 644 include/cudapool.h $(DESTDIR)$(PREFIX)/include/cudapool.h
	printf '%s\n' 'prefix=$(PREFIX)' '' 'Name: cudapool' \
	    'Description: A pooled GPU memory allocator behind a small C ABI' 'Version: $(version)' \
	    'Cflags: -I$${prefix}/include' 'Libs: -L$${prefix}/lib -lcudapool' \
	    > $(DESTDIR)$(PREFIX)/lib/pkgconfig/cudapool.pc

clean: ## Remove everything that was built
	$(CARGO) clean

help: ## List the targets
	@sed -n "s/^\([a-z-]*\):.*## /\1: /p" $(MAKEFILE_LIST) | awk -F': ' '{ printf "  %-16s %s\n", $$1, $$2 }'
