# cumoe. GNU make; `make help` lists the targets, `make print-NAME` shows a variable, V=1 shows the commands.
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := all

# ---- configuration: everything here may be set on the command line or in the environment ----------------------

ARCHS ?= 80 90a# machine code for these; a portable row runs on any of them
PTX   ?= 80# PTX of this architecture lets newer GPUs run the portable rows; empty: none
LIB   ?= lib# where everything built goes

CXX     ?= g++
OBJCOPY ?= objcopy
NM      ?= nm
FUZZ_CC ?= clang# with libFuzzer's runtime, if there is one
# A root's PATH (sudo make install) may lack it: it must be found alike, or all is built again.
NVCC    ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC)))),/usr/local/cuda)

PREFIX     ?= /usr/local
INCLUDEDIR ?= $(PREFIX)/include
LIBDIR     ?= $(PREFIX)/lib
BENCH_ARGS ?= --grouped
SANITIZE   ?= address,undefined
# Empty unless set: DESTDIR DEMO_ARGS TRAIN_ARGS TUNE_ARGS T V, and CFLAGS CXXFLAGS NVCCFLAGS LDFLAGS LDLIBS, which
# follow ours, so they win.

$(if $(strip $(ARCHS)),,$(error cumoe: ARCHS is empty: name at least one architecture))

# ---- derived --------------------------------------------------------------------------------------------------

OBJ := $(LIB)/obj
Q   := $(if $(V),,@)
# The first line of a recipe: a folder for what it makes, and its name.
begin = @mkdir -p $(@D)$(if $(V),,; printf '  %-5s %s\n' $(1) $@)
COMMA := ,
QUOTE := '
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

cuda_roots    = $(CUDA_HOME) $(wildcard $(CUDA_HOME)/targets/*-linux)
CUDA_INCLUDE := $(patsubst %/cuda_runtime_api.h,%,$(firstword $(wildcard $(cuda_roots:%=%/include/cuda_runtime_api.h))))
# Beside nvcc's own, where nvcc is a wrapper that lies elsewhere; --compress-mode: from CUDA 12.8 on. Not for images
# with PTX, which takes seconds a megabyte.
FATBINARY     = $(firstword $(wildcard $(CUDA_HOME)/bin/fatbinary) fatbinary)
compress_mode = $(eval compress_mode := $(if $(findstring --compress-mode,$(shell $(FATBINARY) --help)),\
	--compress-mode=size))$(compress_mode)
CUDA_LIB     := $(patsubst %/libcudart_static.a,%,$(firstword $(wildcard \
	$(foreach d,lib64 lib lib/*-linux-gnu,$(cuda_roots:%=%/$d/libcudart_static.a)))))
# 13.0
CUDA_VERSION = $(if $(CUDA_INCLUDE),$(shell awk '/^.define CUDART_VERSION/ { printf "%d.%d", $$3 / 1000, \
	$$3 % 1000 / 10 }' $(CUDA_INCLUDE)/cuda_runtime_api.h))
VERSION = $(shell sed -n 's/^\#define CUMOE_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\).*/\2/p' \
	include/cumoe/types.h | paste -sd.)
# Before 1.0 a minor version may break.
SONAME = libcumoe.so.$(basename $(VERSION))

# What the benchmark calls this build. No locks: make must not disturb a commit under way.
COMMIT := $(or $(shell git --no-optional-locks describe --always --dirty --abbrev=12 2> /dev/null),unknown)

# An architecture-specific file is built only with its architecture; this tells variants.def which rows exist.
ARCH_DEFINES := $(patsubst %a,-DCUMOE_SM%=1,$(filter %a,$(ARCHS)))
ARCH_TEXT    := $(strip $(ARCHS)$(if $(PTX), +ptx$(PTX)))
# A switch over an enum without a default names every enumerator.
COMMON   := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror=switch -MMD -MP \
	$(if $(CUDA_INCLUDE),-isystem $(CUDA_INCLUDE))
C_COMMON := -std=c11 -D_GNU_SOURCE -Werror=implicit-function-declaration $(COMMON)
C_LIB    := $(C_COMMON) $(ARCH_DEFINES) -fPIC -fvisibility=hidden -ffunction-sections
C_HOST   := $(C_LIB) -O2 -g0
C_CPU    := $(C_LIB) -O3 -g0 -ffp-contract=off# see kernels/score.h
C_TOOL   := $(C_COMMON) $(ARCH_DEFINES) -O2 -g0 -Iinclude
CXX_TOOL := -std=c++17 $(COMMON) -O2 -g0 -Iinclude
# A GPU takes no vector from an address that is not a multiple of its size.
ALIGNED      := -fsanitize=alignment -fno-sanitize-recover=alignment
CXX_EMULATED := -std=c++17 $(ARCH_DEFINES) -O2 -g1 -w -Wno-psabi -fno-strict-aliasing -ffp-contract=off $(ALIGNED) \
	-include test/emulate/cuda.h -Itest/emulate -Ikernels -MMD -MP $(if $(CUDA_INCLUDE),-isystem $(CUDA_INCLUDE))
CAREFUL  := -Og -g1 -fno-sanitize-recover=all -fno-omit-frame-pointer
# Where tests spend their time. All else of theirs is compiled in half the time at -O1, and sanitized code in half of
# that at -Og, with tests that take no longer.
HOT_C    := kernels/cpu/% test/test.c test/oracle.c test/codes.c bench/decoder.c bench/tinylm.c
# The oracle's arithmetic, half of what sanitized tests would spend: it is compiled as it is.
UNSANITIZED := test/oracle.c test/codes.c
# What address finds too, and would be looked for before each access, is left to it.
C_ASAN   := $(CAREFUL) -fsanitize=$(SANITIZE) -fno-sanitize=null,object-size,pointer-overflow
C_FUZZ   := $(CAREFUL) -fsanitize=fuzzer-no-link,$(SANITIZE)
NV_FLAGS := -O3 -std=c++17 -Ikernels -Xptxas -v,-warn-spills,-warn-lmem-usage
LINK_LIBS := $(if $(CUDA_LIB),-L$(CUDA_LIB)) -lcudart_static -ldl -lpthread -lrt -lm

LIB_C   := $(sort $(wildcard host/*.c kernels/cpu/*.c))
# sm_of: 90 for a stem that ends in _sm90, else nothing. archs_of: the architectures a stem is compiled for.
sm_of    = $(if $(findstring _sm,$(1)),$(lastword $(subst _sm, ,$(1))))
archs_of = $(if $(call sm_of,$(1)),$(filter $(call sm_of,$(1))a,$(ARCHS)),$(ARCHS))
ptx_of   = $(if $(call sm_of,$(1)),,$(PTX))
KERNEL_CU := $(sort $(wildcard kernels/*/*.cu))
vpath %.cu $(sort $(dir $(KERNEL_CU)))
STEMS   := $(foreach s,$(basename $(notdir $(KERNEL_CU))),$(if $(call archs_of,$s),$s))
IMAGES  := $(STEMS:%=$(OBJ)/%.image.o)
# Portable ones of which each architecture has PTX of its own: on sm_90 they use what sm_80 has not, or nvcc makes less
# of it for types at run time.
OWN_PTX := arrange backward combine exchange masked quantize unpack_e4m3
ONE_PTX := $(if $(filter 80,$(PTX)),$(foreach s,$(filter-out $(OWN_PTX),$(STEMS)),$(if $(call sm_of,$s),,$s)))
CUBINS  := $(foreach s,$(STEMS),$(foreach a,$(call archs_of,$s),$(OBJ)/$s.sm_$a.cubin))
OBJS    := $(LIB_C:%.c=$(OBJ)/%.o) $(IMAGES)
ASAN_OBJS := $(LIB_C:%.c=$(OBJ)/asan/%.o) $(IMAGES)

# In test/, a .c with a .h of the same name is a helper of all programs; any other is a program of its own.
test_stems   := $(sort $(patsubst test/%.c,%,$(wildcard test/*.c)))
TEST_HELPERS := $(filter $(patsubst test/%.h,%,$(wildcard test/*.h)),$(test_stems))
# The demo's model is a helper too, and the one to be trained: test/tinymoe.c and test/train.c run them.
HELPER_C     := $(TEST_HELPERS:%=test/%.c) $(wildcard bench/tinylm.c bench/decoder.c bench/safetensors.c)
# A program over the shim (test/shim/) has no CUDA runtime: `make check` runs it, under the sanitizers.
SHIMMED      := $(patsubst test/%.c,%,$(shell grep -ls '^.include "shim/' $(test_stems:%=test/%.c) /dev/null))
SHIM_C       := $(wildcard test/shim/*.c)
# Kernels that the CPU runs (test/emulate/).
EMULATED     := $(basename $(notdir $(KERNEL_CU))) grid table
EMULATE_OBJS := $(EMULATED:%=$(OBJ)/emulate/%.o) $(OBJ)/test/emulate/machine.o $(SHIM_C:%.c=$(OBJ)/%.o)
EMULATE_TESTS ?= rows forward slices backward attention train variants ep staged
SHIM_WRAP    := malloc calloc realloc aligned_alloc free pthread_create dlopen dlsym getpid
TESTS        := $(filter-out $(TEST_HELPERS) $(SHIMMED),$(test_stems)) abi/abi
# A white-box test includes private headers and links the objects; all others link the archive as shipped.
WHITE_BOX    := $(patsubst test/%.c,%,$(shell grep -lsE '^.include "../(host|kernels)/' $(TESTS:%=test/%.c) /dev/null))
EXAMPLES     := $(basename $(notdir $(sort $(wildcard test/examples/*.c)))) $(if $(wildcard README.md),readme)
EXAMPLES_CXX := $(basename $(notdir $(sort $(wildcard test/examples/*.cpp))))
# Harnesses for bytes from outside, each with a driver of our own and, where clang has it, with libFuzzer.
FUZZERS      := $(filter-out main,$(basename $(notdir $(sort $(wildcard test/fuzz/*.c)))))
# Programs of bench/; what else lies there belongs to all of them, but for the demo's model and the one to be trained.
BENCH_MAINS := $(wildcard $(addprefix bench/,bench.c ops.c attention.c backward.c tune.c plan.c ep.c))
DEMO_C  := $(wildcard bench/demo.c bench/tinylm.c bench/safetensors.c)
TRAIN_C := $(wildcard bench/train.c bench/decoder.c bench/safetensors.c)
BENCH_C := $(sort $(filter-out $(BENCH_MAINS) $(DEMO_C) $(TRAIN_C),$(wildcard bench/*.c)))
# What is trained on unless TEXT= says otherwise: the project itself.
TEXT    ?= README.md bench/NOTES.md $(sort $(wildcard $(addsuffix .[ch],include/cumoe/* host/* kernels/* kernels/*/*)))
PROGRAMS := $(TESTS:%=$(LIB)/test/%) $(patsubst %,$(LIB)/test/examples/%,$(EXAMPLES) $(EXAMPLES_CXX))

formatted_in := include/cumoe host kernels kernels/* bench test test/abi test/examples test/shim test/fuzz \
	test/emulate test/emulate/device test/emulate/ep
FORMATTED := $(sort $(wildcard $(foreach d,$(formatted_in),$d/*.[ch] $d/*.cu $d/*.cuh $d/*.cpp)))

.PHONY: all shared demo train test bench bench-plan tune check emulate coverage mutants tests install uninstall format \
	lint clean help FORCE
all: $(LIB)/libcumoe.a
shared: $(LIB)/libcumoe.so

# ---- stamps: a file that holds the flags, rewritten when they change, so that what was built with them is rebuilt

as_word = x$(subst $(SPACE),_,$(strip $(1)))
define stamp
$(OBJ)/flags.$(1): $(if $(filter $(call as_word,$(2)),$(call as_word,$(file < $(OBJ)/flags.$(1)))),,FORCE)
	@mkdir -p $$(@D)
	@printf '%s\n' '$(subst $(QUOTE),$(QUOTE)\$(QUOTE)$(QUOTE),$(strip $(2)))' > $$@
endef
$(eval $(call stamp,cc,$(CC) $(C_CPU) $(C_HOST) $(C_TOOL) $(CFLAGS)))
$(eval $(call stamp,cxx,$(CXX) $(CXX_TOOL) $(CXX_EMULATED) $(CXXFLAGS)))
$(eval $(call stamp,asan,$(C_ASAN) $(FUZZ_CC) $(C_FUZZ)))
$(eval $(call stamp,nvcc,$(NVCC) $(CUDA_HOME) $(NV_FLAGS) $(NVCCFLAGS)))
$(eval $(call stamp,archs,$(ARCH_TEXT)))
$(eval $(call stamp,objects,cumoe groups train $(OBJS)))
$(eval $(call stamp,link,$(CC) $(LINK_LIBS) $(LDFLAGS) $(LDLIBS)))
$(eval $(call stamp,commit,$(COMMIT)))
FORCE:

# One clear line instead of a hundred errors.
$(OBJ)/toolkit: $(if $(and $(CUDA_INCLUDE),$(CUDA_LIB),$(shell command -v $(NVCC))),,FORCE)
	@command -v $(NVCC) > /dev/null || { echo "cumoe: $(NVCC) not found: install the CUDA Toolkit, 12.4 or newer (NVIDIA's\
	 package cuda-nvcc-13-0), and put nvcc on PATH, or set NVCC=" >&2; exit 1; }
	@test -n "$(CUDA_INCLUDE)" -a -n "$(CUDA_LIB)" || { echo "cumoe: cuda_runtime_api.h or libcudart_static.a not found\
	 below $(CUDA_HOME): install NVIDIA's package cuda-cudart-dev-13-0, or set CUDA_HOME=" >&2; exit 1; }
	@mkdir -p $(@D) && touch $@

# ---- kernels: <stem>.cu -> one cubin an architecture (+ PTX) -> fatbin -> read-only bytes in an object ----------

# ptxas reports registers and spills of every kernel; the report stays beside the cubin, for `make check`. Printed are
# warnings, and wgmmas that it makes wait for each other (C7510 and on, of which it says no more than "info").
complaints = grep -iE 'warning|C75[0-9]{2}'
one_ptx = $(if $(filter $*,$(ONE_PTX)),-DCUMOE_ONE_PTX)
nvcc_compile = $(NVCC) $(1) $(NV_FLAGS) $(one_ptx) $(NVCCFLAGS) -MMD -MP -MF $@.d -MT $@ -o $@ $< > $@.log 2>&1 \
	|| { cat $@.log >&2; exit 1; }; $(complaints) $@.log >&2; \
	sed -i -e '/^[^ ]*variants\.def *:/d' -e 's|[^ ]*variants\.def||' $@.d

# The rows of kernels/variants.def that a stem expands, rewritten when they change: instead of the whole table they make
# it be compiled again.
$(OBJ)/%.rows: kernels/variants.def
	@mkdir -p $(@D)
	@$(CC) -E -P -xc -DROWS_$* '-DVARIANT(...)=VARIANT(__VA_ARGS__)' '-DUNTILED(...)=UNTILED(__VA_ARGS__)' $< > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# device_rule EXTENSION,FLAGS
define device_rule
$(OBJ)/%.$(1): %.cu $(OBJ)/%.rows $(OBJ)/flags.nvcc $(OBJ)/toolkit
	$$(call begin,NVCC)
	$(Q)$$(call nvcc_compile,$(2))
endef
$(foreach a,$(filter-out $(PTX),$(ARCHS)),$(eval $(call device_rule,sm_$a.cubin,-cubin -arch=sm_$a)))
$(foreach p,$(PTX),$(eval $(call device_rule,compute_$p.ptx,-ptx -arch=compute_$p)))

# Machine code of PTX's own architecture: of that PTX, as nvcc makes it too. So its front end, most of the time that a
# portable stem takes, runs once for both; for sm_90a, too, whose one instruction more lies in that PTX as a comment
# (kernels/device/ptx.cuh).
# assemble_rule ARCHITECTURE,PTX,SED
define assemble_rule
$(OBJ)/%.sm_$(1).cubin: $(OBJ)/%.compute_$(2).ptx
	$$(call begin,PTXAS)
	$(Q)$(if $(3),sed $(3) $$< > $$@.ptx && )$(NVCC) -cubin -arch=sm_$(1) $(NV_FLAGS) $(NVCCFLAGS) -o $$@ \
	$(if $(3),$$@.ptx,$$<) > $$@.log 2>&1 || { cat $$@.log >&2; exit 1; }; $(complaints) $$@.log >&2; true
endef
$(foreach a,$(filter $(PTX),$(ARCHS)),$(eval $(call assemble_rule,$a,$a)))
$(if $(filter 90a,$(ARCHS)),$(eval $(ONE_PTX:%=$(OBJ)/%.sm_90a.cubin): $(call assemble_rule,90a,80,\
	-e 's|^\.target sm_80|.target sm_90a|' -e 's|// sm_90: ||')))

define fatbin_rule
$(OBJ)/$(1).fatbin: $(foreach a,$(call archs_of,$(1)),$(OBJ)/$(1).sm_$a.cubin) \
	$(foreach p,$(call ptx_of,$(1)),$(OBJ)/$(1).compute_$p.ptx) $(if $(call sm_of,$(1)),,$(OBJ)/flags.archs)
	$$(call begin,FATBIN)
	$(Q)$$(FATBINARY) --create=$$@ -64 --compress-all $(if $(call ptx_of,$(1)),,$$(compress_mode)) \
	$(foreach a,$(call archs_of,$(1)),--image3=kind=elf$(COMMA)sm=$a$(COMMA)file=$(OBJ)/$(1).sm_$a.cubin) \
	$(foreach p,$(call ptx_of,$(1)),--image3=kind=ptx$(COMMA)sm=$p$(COMMA)file=$(OBJ)/$(1).compute_$p.ptx)
endef
$(foreach s,$(STEMS),$(eval $(call fatbin_rule,$s)))

$(OBJ)/%.image.o: host/embed.S $(OBJ)/%.fatbin
	$(call begin,EMBED)
	$(Q)$(CC) -c -DIMAGE=cumoe_image_$* -DFATBIN='"$(OBJ)/$*.fatbin"' -o $@ $<

# Device code that programs of test/ load themselves, as a caller would: it lies beside them.
CALLER_CODE := $(patsubst test/%.cu,$(LIB)/test/%.ptx,$(wildcard test/*.cu test/examples/*.cu)) \
	$(patsubst test/%.cu,$(LIB)/test/%.fatbin,$(wildcard test/*.cu)) \
	$(foreach a,80 90,$(patsubst test/%.cu,$(LIB)/test/%.sm_$a.cubin,$(wildcard test/*.cu)))

define caller_rule
$(LIB)/test/%.$(1): test/%.cu $(OBJ)/flags.nvcc $(OBJ)/toolkit
	$$(call begin,NVCC)
	$(Q)$(NVCC) -O3 $(2) -o $$@ $$<
endef
$(eval $(call caller_rule,ptx,-ptx -arch=compute_80))
$(eval $(call caller_rule,fatbin,-fatbin -gencode arch=compute_80$(COMMA)code=[sm_80$(COMMA)compute_80] \
	-gencode arch=compute_90$(COMMA)code=sm_90))
$(foreach a,80 90,$(eval $(call caller_rule,sm_$a.cubin,-cubin -arch=sm_$a)))

# ---- host objects and the archive ------------------------------------------------------------------------------

c_needs = $(OBJ)/flags.cc $(OBJ)/toolkit
c_flags = $(if $(filter host/%,$<),$(C_HOST),$(if $(filter kernels/cpu/%,$<),$(C_CPU),$(C_TOOL)))

# $(call opt_of,FLAGS), of the object at hand
opt_of = $(if $(filter $(HOT_C),$<),$(if $(1),-O2),$(if $(filter test/%,$<),-O1))

# object_rule FOLDER/,FLAGS,STAMP: <source>.c -> $(OBJ)/FOLDER/<source>.o, by the flags of its own folder, then FLAGS.
define object_rule
$(OBJ)/$(1)%.o: %.c $(c_needs) $(3)
	$$(call begin,CC)
	$(Q)$$(CC) $$(c_flags) $$(if $$(filter $(UNSANITIZED),$$<),,$(2)) $$(call opt_of,$(2)) $$(CFLAGS) -c -o $$@ $$<
endef
$(eval $(call object_rule))
$(eval $(call object_rule,asan/,$(C_ASAN),$(OBJ)/flags.asan))
$(eval $(call object_rule,fuzz/,$(C_FUZZ),$(OBJ)/flags.asan))

$(OBJ)/test/examples/readme.o: $(OBJ)/test/examples/readme.c $(c_needs)
	$(call begin,CC)
	$(Q)$(CC) $(C_TOOL) $(CFLAGS) -c -o $@ $<
# A program of an earlier day, built against the headers of that day (test/abi/README.md).
$(OBJ)/test/abi/abi.o $(OBJ)/asan/test/abi/abi.o: private C_TOOL := -Itest/abi/include $(C_TOOL)
$(OBJ)/test/examples/readme.c: README.md
	@mkdir -p $(@D)
	$(Q)awk '/^```/ { if (on) exit; on = /^```c$$/; next } on' $< > $@
$(OBJ)/%.o: %.cpp $(OBJ)/flags.cxx $(OBJ)/toolkit
	$(call begin,CXX)
	$(Q)$(CXX) $(CXX_TOOL) $(CXXFLAGS) -c -o $@ $<
define emulate_rule
	$(call begin,CXX)
	$(Q)$(CXX) $(CXX_EMULATED) -x c++ -c -o $@ $<
endef
$(OBJ)/emulate/%.o: %.cu $(OBJ)/%.rows $(OBJ)/flags.cxx $(OBJ)/toolkit
	$(emulate_rule)
$(OBJ)/emulate/%.o: test/emulate/%.cpp $(OBJ)/flags.cxx $(OBJ)/toolkit
	$(emulate_rule)
# For other architectures this one is compiled again, for cumoe_architectures.
says_archs := $(OBJ)/host/status.o $(OBJ)/asan/host/status.o $(OBJ)/fuzz/host/status.o
$(says_archs): $(OBJ)/flags.archs
$(says_archs): private C_HOST += -DCUMOE_ARCHS='"$(ARCH_TEXT)"'
$(OBJ)/bench/report.o: $(OBJ)/flags.commit
$(OBJ)/bench/report.o: C_TOOL += -DCUMOE_COMMIT='"$(COMMIT)"'

# All objects become one whose hidden symbols are local: an engine may have its own function `launch`. What not every
# program needs is a member of its own, which one without it does not link; what those use of cumoe.o, all call
# cumoe_internal_...; so is what cumoe.o's table has of them, weakly (host/operations.def: LATE). A member is a line
# here: its stems in host/ and kernels/cpu/, its images.
member_groups = ep% group arenas% nccl exchange exchange.image exchange_few_sm90.image
member_train  = backward% attention train attention%.image training%.image
# member_objects NAME
member_objects = $(filter $(foreach s,$(member_$(1)),$(OBJ)/host/$s.o $(OBJ)/kernels/cpu/$s.o $(OBJ)/$s.o),$(OBJS))
BESIDES := $(foreach m,groups train,$(if $(call member_objects,$m),$m))
MEMBERS := $(OBJ)/cumoe.o $(BESIDES:%=$(OBJ)/%.o)
$(foreach m,$(BESIDES),$(eval $(OBJ)/joined/$m.o: $(call member_objects,$m)))
$(OBJ)/joined/cumoe.o: $(filter-out $(foreach m,$(BESIDES),$(call member_objects,$m)),$(OBJS))
$(MEMBERS:$(OBJ)/%=$(OBJ)/joined/%): $(OBJ)/joined/%.o: $(OBJ)/flags.objects
	$(call begin,LD)
	$(Q)$(LD) -r -o $@ $(filter %.o,$^)
$(OBJ)/joined/renamed: $(MEMBERS:$(OBJ)/%=$(OBJ)/joined/%)
	@$(NM) -u $(BESIDES:%=$(@D)/%.o) | awk 'NF == 2 { print $$2 }' | sort -u > $@.needed
	@$(NM) -g --defined-only $(@D)/cumoe.o | awk '$$3 !~ /^cumoe_/ { print $$3 }' | sort | comm -12 - $@.needed | \
	awk '{ print $$1, "cumoe_internal_" $$1 }' > $@
	@$(NM) -u $(@D)/cumoe.o | awk 'NF == 2 { print $$2 }' | sort -u > $@.late
	@$(NM) -g --defined-only $(BESIDES:%=$(@D)/%.o) | awk 'NF == 3 { print $$3 }' | sort -u | comm -12 - $@.late | \
	awk '{ print $$1, "cumoe_internal_" $$1 }' >> $@
	@awk '{ print $$2 }' $@ > $@.shared
$(MEMBERS): $(OBJ)/%.o: $(OBJ)/joined/%.o $(OBJ)/joined/renamed
	$(call begin,LINK)
	$(Q)$(OBJCOPY) --redefine-syms=$(OBJ)/joined/renamed $< $@ && $(OBJCOPY) --localize-hidden $@ && \
	$(OBJCOPY) --globalize-symbols=$(OBJ)/joined/renamed.shared $@

$(LIB)/libcumoe.a: $(MEMBERS)
	$(call begin,AR)
	$(Q)rm -f $@ && $(AR) rcsD $@ $^

# On request, for programs that load it: the archive with a CUDA runtime inside. The tests have their own, so that
# `make install` installs what was asked for.
$(LIB)/libcumoe.so $(LIB)/test/libcumoe.so: $(MEMBERS) host/cumoe.map $(OBJ)/flags.link
	$(call begin,LINK)
	$(Q)$(CC) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=host/cumoe.map -Wl,-z,defs -o $@ $(MEMBERS) \
	$(LINK_LIBS) $(LDLIBS) && chmod -x $@

# ---- programs ---------------------------------------------------------------------------------------------------

define link
	$(call begin,LINK)
	$(Q)$(CC) $(LDFLAGS) $(link_flags) -o $@ $(filter %.o %.a,$^) $(LINK_LIBS) $(LDLIBS)
endef
$(OBJ)/asan/%: private link_flags = -fsanitize=$(SANITIZE)
$(OBJ)/fuzz/%: private link_flags = -fsanitize=fuzzer,$(SANITIZE)
$(OBJ)/fuzz/%: private CC = $(FUZZ_CC)
$(EXAMPLES_CXX:%=$(LIB)/test/examples/%): private CC = $(CXX)
$(SHIMMED:%=$(OBJ)/asan/bin/%) $(OBJ)/emulate/bin/%: LINK_LIBS := $(SHIM_WRAP:%=-Wl,--wrap=%) -ldl -lpthread -lrt -lm

archive      := $(LIB)/libcumoe.a $(OBJ)/flags.link
helper_objs  := $(HELPER_C:%.c=$(OBJ)/%.o)
asan_helpers := $(HELPER_C:%.c=$(OBJ)/asan/%.o)
fuzz_c       := $(LIB_C) bench/safetensors.c
.SECONDARY:

$(LIB)/test/%: $(OBJ)/test/%.o $(helper_objs) $(archive)
	$(link)
$(WHITE_BOX:%=$(LIB)/test/%): $(LIB)/test/%: $(OBJ)/test/%.o $(helper_objs) $(OBJS) $(OBJ)/flags.link
	$(link)
$(LIB)/test/examples/%: $(OBJ)/test/examples/%.o $(archive)
	$(link)
$(LIB)/demo: $(DEMO_C:%.c=$(OBJ)/%.o) $(archive)
	$(link)
$(LIB)/train: $(TRAIN_C:%.c=$(OBJ)/%.o) $(archive)
	$(link)
$(patsubst %,$(LIB)/bench/%,plan tune ep): $(LIB)/bench/%: $(OBJ)/bench/%.o $(BENCH_C:%.c=$(OBJ)/%.o) $(OBJS) \
	$(OBJ)/flags.link
	$(link)
$(LIB)/bench/%: $(OBJ)/bench/%.o $(BENCH_C:%.c=$(OBJ)/%.o) $(archive)
	$(link)
$(OBJ)/asan/bin/%: $(OBJ)/asan/test/%.o $(asan_helpers) $(ASAN_OBJS) $(OBJ)/flags.link
	$(link)
$(SHIMMED:%=$(OBJ)/asan/bin/%): $(SHIM_C:%.c=$(OBJ)/asan/%.o)
$(OBJ)/emulate/bin/%: private CC = $(CXX)
$(OBJ)/emulate/bin/%: private link_flags = -fsanitize=alignment
$(OBJ)/emulate/bin/%: $(OBJ)/test/%.o $(helper_objs) $(EMULATE_OBJS) $(OBJS) $(OBJ)/flags.link
	$(link)
$(FUZZERS:%=$(OBJ)/asan/fuzz/%): $(OBJ)/asan/fuzz/%: $(OBJ)/asan/test/fuzz/%.o $(OBJ)/asan/test/fuzz/main.o \
	$(fuzz_c:%.c=$(OBJ)/asan/%.o) $(IMAGES) $(OBJ)/flags.link
	$(link)
$(FUZZERS:%=$(OBJ)/fuzz/%): $(OBJ)/fuzz/%: $(OBJ)/fuzz/test/fuzz/%.o $(fuzz_c:%.c=$(OBJ)/fuzz/%.o) $(IMAGES) \
	$(OBJ)/flags.link
	$(link)

$(LIB)/test/kernel $(OBJ)/asan/bin/kernel $(LIB)/test/examples/vector_add: | $(CALLER_CODE)

# Not executable: test/run.sh runs what is. Without NVTX's headers test/ranges.c skips.
$(LIB)/test/profiler.so $(LIB)/test/sends.so: $(LIB)/test/%.so: test/tool/%.c $(c_needs)
	$(call begin,LINK)
	$(Q)$(CC) $(C_TOOL) $(CFLAGS) -MF $(OBJ)/$*.d -fPIC -shared -o $@ $< && chmod -x $@
$(LIB)/test/ranges $(OBJ)/asan/bin/ranges: \
	| $(if $(wildcard $(CUDA_INCLUDE)/nvtx3/nvToolsExt.h),$(LIB)/test/profiler.so)
$(LIB)/test/ranks $(OBJ)/asan/bin/ranks: | $(LIB)/test/sends.so

tests: $(PROGRAMS)
demo: $(LIB)/demo
	$(Q)$(LIB)/demo $(DEMO_ARGS)
train: $(LIB)/train
	$(Q)$(LIB)/train --out $(LIB)/trained $(TRAIN_ARGS) $(TEXT)
bench: $(LIB)/bench/bench
	$(Q)$(LIB)/bench/bench $(BENCH_ARGS)
# On a GPU: measures every kernel and writes the table of thresholds, to be read and committed like source. The file is
# named as the GPU is ("NVIDIA H100 80GB HBM3": h100.def), unless GPU= says otherwise; host/tune.c must list it.
tune: $(LIB)/bench/tune
	$(Q)$(LIB)/bench/tune $(TUNE_ARGS) > $(LIB)/tune.def && gpu=$(or $(GPU),$$(sed -n \
	  's/.*make tune. on [-0-9]*, NVIDIA \([A-Za-z0-9]*\).*/\L\1/p' $(LIB)/tune.def)) && [ "$$gpu" ] && \
	  cp $(LIB)/tune.def "host/tune/$$gpu.def" && touch host/tune.c && echo "host/tune/$$gpu.def"
# Needs no GPU: what the plan of a layer costs the host.
bench-plan: $(LIB)/bench/plan
	$(Q)$<

# ---- tests: `make test T="gemm first"` runs some of them; T=install the staged installation, T=torch PyTorch ------

script_env = $(foreach v,LIB V CC CXX NVCC MAKE VERSION CUDA_VERSION CUDA_HOME CUDA_LIB CUDA_INCLUDE ARCH_DEFINES \
	CUBINS FORMATTED FUZZERS PYTHON,$v='$($v)')
chosen = $(if $(T),$(filter $(foreach t,$(T),%/$t %/$t.sh),$(1)),$(1))
test_programs  := $(call chosen,$(PROGRAMS))
test_scripts   := $(call chosen,test/check/install.sh test/check/torch.sh test/check/train.sh)
# Programs that run under the sanitizers.
# The shim stands for a runtime of CUDA 12.8 or newer (host/runtime.h).
ASAN_TESTS     ?= $(TESTS) $(if $(filter 12.4 12.5 12.6,$(CUDA_VERSION)),,$(SHIMMED))
check_programs := $(call chosen,$(ASAN_TESTS:%=$(OBJ)/asan/bin/%))
check_scripts  := $(call chosen,$(addprefix test/check/,headers.sh typed.sh symbols.sh docs.sh kernels.sh format.sh \
	aarch64.sh toolkits.sh machines.sh tsan.sh $(if $(findstring address,$(SANITIZE)),fuzz.sh)))
# Two drivers a harness; libFuzzer only where clang has its runtime.
libfuzzer      = $(wildcard $(shell $(FUZZ_CC) -print-resource-dir 2> /dev/null)/lib/*/libclang_rt.fuzzer*.a)
fuzz_programs := $(if $(and $(filter check,$(MAKECMDGOALS)),$(filter %/fuzz.sh,$(check_scripts))),\
	$(FUZZERS:%=$(OBJ)/asan/fuzz/%) $(if $(libfuzzer),$(FUZZERS:%=$(OBJ)/fuzz/%)))

test: $(test_programs) $(LIB)/libcumoe.a $(if $(filter %/torch.sh,$(test_scripts)),$(LIB)/test/libcumoe.so) \
	$(if $(filter %/train.sh,$(test_scripts)),$(LIB)/train $(LIB)/demo)
	@$(script_env) test/run.sh $(test_programs) $(test_scripts)

# A sanitized program has no GPU to see: the driver's own memory is not under test. What only a GPU machine runs is
# compiled at least.
check: $(check_programs) $(fuzz_programs) $(LIB)/libcumoe.a $(if $(T),,$(BENCH_MAINS:%.c=$(OBJ)/%.o))
	@$(script_env) CUDA_VISIBLE_DEVICES= UBSAN_OPTIONS=print_stacktrace=1 test/run.sh $(check_scripts) $(check_programs)

# Kernels without a GPU: minutes, on demand.
emulate: $(call chosen,$(EMULATE_TESTS:%=$(OBJ)/emulate/bin/%))
	@$(script_env) test/check/emulate.sh $(notdir $^)

# How good the tests of host/ are: branches that none takes, changes that none notices. Minutes; on demand.
coverage mutants: $(LIB)/libcumoe.a
	@$(script_env) test/check/$@.sh

# ---- install ------------------------------------------------------------------------------------------------------

PKG_DIR   := $(LIBDIR)/pkgconfig
CMAKE_DIR := $(LIBDIR)/cmake/cumoe
# Package files name their neighbours relative to themselves, so that an installed tree can be moved.
relative = $(shell realpath -m --relative-to='$(1)' '$(2)')
fill = sed -e 's|@PREFIX@|$(call relative,$(1),$(PREFIX))|' -e 's|@INCLUDEDIR@|$(call relative,$(1),$(INCLUDEDIR))|' \
	-e 's|@LIBDIR@|$(call relative,$(1),$(LIBDIR))|' -e 's|@CUDA_LIB@|$(CUDA_LIB)|' -e 's|@VERSION@|$(VERSION)|' \
	-e 's|@MAJOR_MINOR@|$(basename $(VERSION))|' -e 's|@SONAME@|$(SONAME)|' \
	-e 's|@CUDA_VERSION@|$(CUDA_VERSION)|' -e 's|@CUDA_MAJOR@|$(basename $(CUDA_VERSION))|'

# The shared library is installed where `make shared` made it.
SHARED := $(or $(wildcard $(LIB)/libcumoe.so),$(if $(filter shared,$(MAKECMDGOALS)),$(LIB)/libcumoe.so))

define install_shared
install -m 644 $(SHARED) '$(DESTDIR)$(LIBDIR)/libcumoe.so.$(VERSION)' && \
ln -sf libcumoe.so.$(VERSION) '$(DESTDIR)$(LIBDIR)/$(SONAME)' && \
ln -sf $(SONAME) '$(DESTDIR)$(LIBDIR)/libcumoe.so' && \
$(call fill,$(PKG_DIR)) host/cumoe-shared.pc.in > '$(DESTDIR)$(PKG_DIR)/cumoe-shared.pc'
endef

install: $(LIB)/libcumoe.a $(SHARED)
	$(Q)mkdir -p '$(DESTDIR)$(INCLUDEDIR)/cumoe' '$(DESTDIR)$(PKG_DIR)' '$(DESTDIR)$(CMAKE_DIR)'
	$(Q)install -m 644 include/cumoe/*.h '$(DESTDIR)$(INCLUDEDIR)/cumoe'
	$(Q)install -m 644 $< '$(DESTDIR)$(LIBDIR)'
	$(Q)$(call fill,$(PKG_DIR)) host/cumoe.pc.in > '$(DESTDIR)$(PKG_DIR)/cumoe.pc'
	$(Q)$(call fill,$(CMAKE_DIR)) host/cumoeConfig.cmake.in > '$(DESTDIR)$(CMAKE_DIR)/cumoeConfig.cmake'
	$(Q)$(call fill,$(CMAKE_DIR)) host/cumoeConfigVersion.cmake.in > '$(DESTDIR)$(CMAKE_DIR)/cumoeConfigVersion.cmake'
	$(Q)$(if $(SHARED),$(install_shared))
	@echo "cumoe $(VERSION) is in $(DESTDIR)$(PREFIX)"

uninstall:
	rm -rf '$(DESTDIR)$(INCLUDEDIR)/cumoe' '$(DESTDIR)$(CMAKE_DIR)'
	rm -f '$(DESTDIR)$(LIBDIR)/libcumoe.a' '$(DESTDIR)$(PKG_DIR)/cumoe.pc' '$(DESTDIR)$(PKG_DIR)/cumoe-shared.pc'
	rm -f $(patsubst %,'$(DESTDIR)$(LIBDIR)/%',libcumoe.so $(SONAME) libcumoe.so.$(VERSION))

# ---- for those who change the code --------------------------------------------------------------------------------

format:
	clang-format --style=file -i $(FORMATTED)

lint:
	clang-tidy --quiet $(LIB_C) -- $(filter-out -MMD -MP,$(C_HOST)) $(CFLAGS)
	cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,portability --inline-suppr \
	--suppress=missingIncludeSystem $(ARCH_DEFINES) -Iinclude $(LIB_C)

clean:
	rm -rf $(OBJ) $(LIB)/libcumoe.a $(LIB)/libcumoe.so $(LIB)/test $(LIB)/bench $(LIB)/demo $(LIB)/train $(LIB)/trained \
	$(LIB)/prefix $(LIB)/planted \
	$(LIB)/aarch64 $(LIB)/toolkits $(LIB)/machines

help:
	@echo 'make            $(LIB)/libcumoe.a'
	@echo 'make shared     $(LIB)/libcumoe.so as well, for programs that load it; make install then installs both'
	@echo 'make demo       a small trained model writes text, on the GPU or the CPU   (DEMO_ARGS)'
	@echo 'make train      trains that model from scratch on TEXT="FILE ...", on the GPU or the CPU  (TRAIN_ARGS)'
	@echo 'make test       all tests, on the GPU or the CPU                           (T="plan forward": some)'
	@echo 'make tests      builds them only; test/run.sh runs them, here or where $(LIB)/ and test/ were carried'
	@echo 'make check      no GPU: sanitizers, headers, symbols, machine code, README, format, fuzzing (T=docs: one)'
	@echo '                SANITIZE=thread, or another; address,undefined by default'
	@echo 'make emulate    no GPU: the kernels run by the CPU, in their tests: minutes (T="rows": one)'
	@echo 'make coverage   branches of host/ that no test takes; make mutants: changes of host/ that no test notices'
	@echo 'make bench      speed, against the roofline and cuBLAS                     (BENCH_ARGS)'
	@echo 'make tune       measures every kernel and writes host/tune/<the GPU>.def  (TUNE_ARGS, GPU)'
	@echo 'make install    headers, library, pkg-config and CMake files (PREFIX, LIBDIR, INCLUDEDIR, DESTDIR); uninstall'
	@echo 'make format, lint, clean, print-NAME'
	@echo
	@echo 'ARCHS="$(ARCHS)" PTX="$(PTX)"   GPUs with machine code; V=1 shows commands'
	@echo 'CC CXX NVCC CUDA_HOME CFLAGS NVCCFLAGS LDFLAGS LDLIBS   tools, and flags that follow ours'

print-%:
	@echo '$($*)'

-include $(shell find $(OBJ) -name '*.d' 2> /dev/null)
