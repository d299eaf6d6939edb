# Builds, tests and installs cudapool. Cargo builds the Rust parts; the recipes of everything else are kept
# beside what they build, in the Makefile.inc of its folder. `make help` lists the targets.

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
# What programs that are linked with the library ask the loader for.
soname  := libcudapool.so.0
shim    := target/release/libcudapool_preload.so
sim     := target/sim/libcuda.so.1
version  = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The dynamic loader's path of everything that runs on the simulated driver.
on_sim  := LD_LIBRARY_PATH=$(CURDIR)/target/sim:$(CURDIR)/target/release

.PHONY: all lib lib-debug preload header fmt lint doc install clean help
.DELETE_ON_ERROR:

all: lib preload ## Build the library and the preload shim

lib: ## Build target/release/libcudapool.so
	$(CARGO) build --release -p cudapool
	@# Only where it is not there: tests that run may be opening it.
	@[ -L $(dir $(lib))$(soname) ] || ln -s $(notdir $(lib)) $(dir $(lib))$(soname)

lib-debug: sim ## Build target/debug/libcudapool.so, which checks more, the order of locks among it
	$(CARGO) build -p cudapool
	@ln -sfn $(notdir $(lib)) target/debug/$(soname)

preload: ## Build target/release/libcudapool_preload.so
	$(CARGO) build --release -p cudapool_preload

header: ## Write include/cudapool.h from src/ffi
	CUDAPOOL_WRITE_HEADER=1 $(CARGO) build

# In this order: later ones use what earlier ones define.
include sim/Makefile.inc
include c-tests/Makefile.inc
include examples/Makefile.inc
include benches/Makefile.inc
include tests/preload/Makefile.inc
include tests/real/Makefile.inc
include tests/clients/Makefile.inc
include tests/install/Makefile.inc
include gpu/Makefile.inc
include tests/Makefile.inc

fmt: ## Check the format, and that lines have at most 110 columns
	$(CARGO) fmt --all --check
	tests/width.sh

lint: ## Check for what clippy warns of
	$(CARGO) clippy --workspace --all-targets -- -D warnings

doc: ## Build the documentation of the Rust parts, private items included
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

# The name with the whole version is the file; the loader asks for the second, the linker for the third. The
# shim is a plain file: nothing is linked with it, users write its name into LD_PRELOAD, and it takes the pool
# beside it.
install: lib preload ## Install libraries, header and pkg-config file under PREFIX
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include
	install -m 755 $(lib) $(DESTDIR)$(PREFIX)/lib/libcudapool.so.$(version)
	ln -sfn libcudapool.so.$(version) $(DESTDIR)$(PREFIX)/lib/$(soname)
	ln -sfn $(soname) $(DESTDIR)$(PREFIX)/lib/libcudapool.so
	install -m 755 $(shim) $(DESTDIR)$(PREFIX)/lib/libcudapool_preload.so
	install -m 644 include/cudapool.h $(DESTDIR)$(PREFIX)/include/cudapool.h
	printf '%s\n' 'prefix=$(PREFIX)' '' 'Name: cudapool' \
	    'Description: A pooled GPU memory allocator behind a small C ABI' 'Version: $(version)' \
	    'Cflags: -I$${prefix}/include' 'Libs: -L$${prefix}/lib -lcudapool' \
	    > $(DESTDIR)$(PREFIX)/lib/pkgconfig/cudapool.pc

clean: ## Remove everything that was built
	$(CARGO) clean

help: ## List the targets
	@sed -n "s/^\([a-z-]*\):.*## /\1\t/p" $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  %-16s %s\n", $$1, $$2 }'
