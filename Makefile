# make            build/nightshift and build/nightshiftd   make V=1     show commands
# make demo       held-out jobs, beside their references   make check   every test
# make vectors    golden cases (CASES=DIR)                 make bench   speed, as ratios
# make asan|tsan  check, sanitized                         make lint    static checks
# make layers     include arrows, lone headers             make fuzz    each parser 60 s
# make soak       faults on real servers, 20 min at most
# make vectors-cuda  the same on simulated devices (minutes)
# make install    honours prefix and DESTDIR               make man     read the manuals
# make cuda       the plug-in for NVIDIA cards, by nvcc    make gpu-check  on a card
# make deb        a Debian package, in build/
B       := build
CSTD    := -std=c17 -D_GNU_SOURCE
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wvla \
           -Wstrict-prototypes -Wmissing-prototypes -Wformat=2 -Wundef \
           -Wpointer-arith -Wwrite-strings -Wdouble-promotion -Wimplicit-fallthrough -Wno-format-truncation \
           $(if $(CI),-Werror)
CFLAGS  ?= -O2 -g
PKGS    := jansson liblz4 inih libcrypto libxxhash libsystemd rdkafka libpq libjpeg libpng libwebp libseccomp libmicrohttpd libcurl
prefix  ?= /usr/local
CASES   ?= tests/cases
FUZZ_S  ?= 60
Q       := $(if $(V),,@)
say      = $(if $(V),,@printf '  %-5s %s\n' $(1) $(2))

# ubsan without recovery: what it finds fails the test that ran into it.
SANFLAGS   := $(SAN:%=-fsanitize=%) $(if $(SAN),-fno-sanitize-recover=all -fno-omit-frame-pointer)
ALL_CFLAGS := $(CSTD) $(WARN) -I. -fno-common -fstack-protector-strong -ffp-contract=off \
              $(shell pkg-config --cflags $(PKGS) 2>/dev/null) $(CFLAGS) $(SANFLAGS)
ALL_LIBS   := $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lunistring -lm -pthread
# The suffix of a kernel names its instruction set, so it names its flags.
CFLAGS_avx2       := -mavx2 -mfma -mf16c
CFLAGS_avx512     := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
CFLAGS_avx512bf16 := $(CFLAGS_avx512) -mavx512bf16
CFLAGS_amx        := $(CFLAGS_avx512) -mamx-tile -mamx-bf16
isa_flags          = $(CFLAGS_$(lastword $(subst _, ,$(basename $(notdir $(1))))))

LAYERS  := daemon connectors engine kernels config base
MAINS   := daemon/main.c daemon/cli.c
src      = $(filter-out $(MAINS),$(wildcard $(1)/*.c $(1)/*/*.c))
ARCHIVES := $(LAYERS:%=$B/lib%.a)
# A layer links only with what lies below it: the arrows hold at link time too.
below_base       := base
below_config     := config base
below_kernels    := kernels base
below_engine     := engine kernels base
below_connectors := connectors base
below_daemon     := $(LAYERS)
TEST    := $(patsubst %.c,$B/%,$(wildcard tests/*/test_*.c tests/engine/vectors.c))
TEST    += $(patsubst tests/%.cu,$B/tests/%,$(wildcard tests/cudasim/test_*.cu))
FUZZ    := $(patsubst %.c,$B/%,$(wildcard tests/*/fuzz_*.c))
SUPPORT := $(patsubst %.c,$B/%.o,$(wildcard tests/*.c))
SOURCES := $(foreach l,$(LAYERS),$(call src,$l)) $(wildcard $(MAINS))
HEADERS := $(filter-out %_body.h,$(wildcard $(LAYERS:%=%/*.h) $(LAYERS:%=%/*/*.h)))
WRAP    := -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc

all: $B/nightshift $B/nightshiftd
$B/nightshift: $B/daemon/cli.o $(ARCHIVES)
$B/nightshiftd: $B/daemon/main.o $(ARCHIVES)
$B/nightshift $B/nightshiftd:
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(ALL_LIBS)

define layer
$B/lib$(1).a: $(patsubst %.c,$B/%.o,$(call src,$(1)))
	$$(call say,AR,$$@)
	$$Qrm -f $$@; ar rcs $$@ $$^
$B/tests/$(1)/%: $B/tests/$(1)/%.o $(SUPPORT) $(below_$(1):%=$B/lib%.a)
	$$(call say,LD,$$@)
	$$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) $(WRAP) -o $$@ $$^ $(ALL_LIBS) -lcmocka
# Under clang libFuzzer drives the target; else it replays a corpus.
$B/tests/$(1)/fuzz_%: $B/tests/$(1)/fuzz_%.o $(if $(FUZZER),,$B/tests/replay/replay.o) $(below_$(1):%=$B/lib%.a)
	$$(call say,LD,$$@)
	$$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) $(FUZZER:%=-fsanitize=%) -o $$@ $$^ $(ALL_LIBS)
endef
$(foreach l,$(LAYERS),$(eval $(call layer,$l)))

$B/%.o: %.c $B/flags
	$(call say,CC,$<)
	$Qmkdir -p $(@D)
	$Q$(CC) $(ALL_CFLAGS) $(call isa_flags,$<) -MMD -MP -c -o $@ $<

$B/connectors/postgres_schema.o: connectors/schema.sql connectors/schema_2.sql
$B/daemon/http_page.o: daemon/http_page.html

# Rebuild everything when the flags change, and only then.
$B/flags: FORCE
	@mkdir -p $B; echo '$(CC) $(ALL_CFLAGS)' | cmp -s - $@ || echo '$(CC) $(ALL_CFLAGS)' > $@

# --- with their own set-up: what pkg-config says is read when make starts, so
# a target that may install packages starts make again behind it.
parallel = $(if $(filter j%,$(MAKEFLAGS:-%=%)),,-j$(shell nproc))
again    = +$Q$(MAKE) --no-print-directory $(parallel)
check:
	@scripts/setup.sh check
	$(again) check-now
demo:
	@scripts/setup.sh build
	$(again) demo-now
vectors:
	@scripts/setup.sh check
	$(again) $B/tests/engine/vectors
	$Q$B/tests/engine/vectors $(CASES)
soak:
	@scripts/setup.sh check
	$(again) soak-now
vectors-cuda:
	@scripts/setup.sh check
	$(again) $B/tests/engine/vectors $B/cudasim/libnightshift-cuda.so
	$QLD_LIBRARY_PATH=$B/cudasim $B/tests/engine/vectors $(CASES) ref fp32 cuda
bench:
	@scripts/setup.sh bench check
	$(again) bench-now
lint:
	@scripts/setup.sh lint
	$(again) -k lint-now
asan tsan:
	@scripts/setup.sh check
	$(again) B=build-$@ CFLAGS='-O1 -g' SAN='$(if $(filter asan,$@),address undefined,thread)' check-now
fuzz:
	@scripts/setup.sh fuzz
	$(again) B=build-fuzz CC=clang WARN= CFLAGS='-O1 -g' SAN='address undefined fuzzer-no-link' FUZZER=fuzzer fuzz-now

check-now: $(TEST) $(FUZZ) all $B/tests/nightshiftd $B/cudasim/libnightshift-cuda.so
	$Qscripts/fetch-tokenizer.sh $B/tokenizer || true
	$Qscripts/fetch-kafka.sh build/kafka || true
	$Qscripts/fetch-schema-suite.sh build/schema-suite || true
	$Qtests/run.sh $B $(TEST) $(FUZZ)
# Seeds are printed: NS_SEED=N and NS_HISTORY=... do the same again.
soak-now: all $B/tests/daemon/test_simulation $B/tests/daemon/test_soak
	$Qscripts/fetch-kafka.sh build/kafka
	$QNS_HISTORIES=100000 $B/tests/daemon/test_simulation
	$QNS_SOAK=2000:200:1200 $B/tests/daemon/test_soak
demo-now: all $(if $(wildcard models/demo),,$B/tests/tools/make_checkpoint)
	$Qscripts/demo.sh $B
bench-now: all $B/bench/connectors $B/bench/checkpoints $B/bench/nightshiftd $B/bench/engine $B/bench/images $B/bench/cpu_limit $B/bench/card
	$Qscripts/fetch-kafka.sh build/kafka
	$Q$B/bench/connectors $B
	$Q$B/bench/checkpoints $B
	$Qbench/documents.py $B
	$Qbench/run.sh $B
	$Qbench/plan.sh $B
fuzz-now: $(FUZZ)
	$Qscripts/fuzz.sh $(FUZZ_S) $(FUZZ)

$B/tests/tools/%: $B/tests/tools/%.o $(SUPPORT) $B/libbase.a
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) $(WRAP) -o $@ $^ $(ALL_LIBS)
# The daemon as it ships, with an engine that answers at once.
INSTANT := submit pass next_event cancel load progress
$B/bench/nightshiftd: $B/daemon/main.o $B/bench/instant_engine.o $(ARCHIVES)
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) $(INSTANT:%=-Wl,--wrap=ns_engine_%) -o $@ $^ $(ALL_LIBS)
# The daemon as it ships, with fault points around it: tests/faults/points.c.
POINTS := ns_ends_open PQpipelineSync rd_kafka_commit clock_gettime
$(addprefix $B/tests/daemon/test_,away faults outages soak): | $B/tests/nightshiftd $B/nightshiftd
$B/tests/nightshiftd: $B/daemon/main.o $B/tests/faults/points.o $(ARCHIVES)
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(POINTS:%=-Wl,--wrap=%) $(ALL_LIBS)
$B/bench/%: $B/bench/%.o $(below_engine:%=$B/lib%.a)
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(ALL_LIBS)

# --- CUDA. One set of sources, two plug-ins: nvcc's for cards, and g++'s that
# runs on tests/cudasim. There -fsanitize=thread only makes the compiler call
# before every access of a kernel; what it calls is tests/cudasim/memory.cc.
KERNELS := $(wildcard kernels/cuda/*.cu)
CXX_SIM := $(if $(findstring gcc,$(CC)),$(CC:gcc=g++),g++)
SIM_CXXFLAGS := -std=c++17 -O3 -g -fPIC -I. -Itests/cudasim -DNS_CUDASIM -ffp-contract=off \
    -Wall -Wunused -Wno-unknown-pragmas $(if $(CI),-Werror)
SIM_CALLS := -fsanitize=thread -fno-tree-vectorize -fno-store-merging --param=tsan-instrument-func-entry-exit=0
SIM     := $(patsubst tests/cudasim/%.cc,$B/cudasim/%.o,$(wildcard tests/cudasim/*.cc))
NVCC     = $(shell cat $B/nvcc)
# PyPI's toolkit keeps in lib/ what nvcc looks for in lib64/.
NVLINK   = -L$(dir $(NVCC))../lib -cudart static
NVFLAGS := -std=c++17 -O3 -I. -Xcompiler -fPIC,-Wall -lineinfo -Xptxas -v \
    -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90

$B/cudasim/%.o: tests/cudasim/%.cc
	$(call say,SIM,$<)
	$Qmkdir -p $(@D)
	$Q$(CXX_SIM) $(SIM_CXXFLAGS) -Wshadow -fvisibility=hidden -MMD -MP -c -o $@ $<
$B/cudasim/%.o: kernels/cuda/%.cu
	$(call say,SIM,$<)
	$Qmkdir -p $(@D)
	$Q$(CXX_SIM) $(SIM_CXXFLAGS) $(SIM_CALLS) -mfma -fvisibility=hidden -MMD -MP -x c++ -c -o $@ $<
$B/cudasim/%.o: tests/cudasim/%.cu
	$(call say,SIM,$<)
	$Qmkdir -p $(@D)
	$Q$(CXX_SIM) $(SIM_CXXFLAGS) $(SIM_CALLS) -MMD -MP -x c++ -c -o $@ $<
$B/tests/cudasim/%: $B/cudasim/%.o $(SIM)
	$(call say,LD,$@)
	$Qmkdir -p $(@D)
	$Q$(CXX_SIM) -rdynamic -o $@ $^ -lcmocka -ldl -pthread
# A plug-in brings what it needs of base: the programs export nothing.
$B/plugin/%.o: %.c $B/flags
	$(call say,CC,$<)
	$Qmkdir -p $(@D)
	$Q$(CC) $(filter-out $(SANFLAGS),$(ALL_CFLAGS)) -fPIC -fvisibility=hidden -MMD -MP -c -o $@ $<
$B/plugin/libbase.a: $(patsubst %.c,$B/plugin/%.o,$(call src,base))
	$(call say,AR,$@)
	$Qrm -f $@; ar rcs $@ $^
$B/cudasim/libnightshift-cuda.so: $(KERNELS:kernels/cuda/%.cu=$B/cudasim/%.o) $(filter-out %/test_%,$(SIM)) $B/plugin/libbase.a
	$(call say,LD,$@)
	$Q$(CXX_SIM) -shared -Wl,-z,defs -o $@ $^ -lm -ldl -pthread
$B/cuda/%.o: kernels/cuda/%.cu $B/nvcc
	$(call say,NVCC,$<)
	$Qmkdir -p $(@D)
	$Q$(NVCC) $(NVFLAGS) -MD -MF $(@:.o=.d) -c -o $@ $< >$(@:.o=.ptxas) 2>&1 || { cat $(@:.o=.ptxas); false; }
$B/libnightshift-cuda.so: $(KERNELS:kernels/cuda/%.cu=$B/cuda/%.o) $B/plugin/libbase.a $B/nvcc
	$(call say,LD,$@)
	$Q$(NVCC) -shared $(NVLINK) -o $@ $(filter %.o %.a,$^)
# The instructions that a card has, by themselves: needs CUDA and libc alone.
$B/cuda/test_instructions: tests/cudasim/test_instructions.cu kernels/cuda/device.cuh $B/nvcc
	$(call say,NVCC,$<)
	$Qmkdir -p $(@D)
	$Q$(NVCC) $(filter-out -Xptxas -v,$(NVFLAGS)) $(NVLINK) -o $@ $<
$B/nvcc:
	$Qmkdir -p $B; scripts/fetch-cuda.sh $B/cuda-toolkit >$@.new && mv $@.new $@
# On a machine with a card: the instructions, then every golden case.
gpu-check: cuda
	$Q$B/cuda/test_instructions
	$Qfor tool in memcheck racecheck; do \
	    compute-sanitizer --error-exitcode 1 --tool $$tool $B/cuda/test_instructions || exit 1; done
	$(again) $B/tests/engine/vectors
	$QLD_LIBRARY_PATH=$B $B/tests/engine/vectors $(CASES) ref fp32 cuda
$B/tests/daemon/test_cuda $B/tests/kernels/test_head_masks $B/tests/kernels/test_float8: | $B/cudasim/libnightshift-cuda.so
cuda:
	@scripts/setup.sh cuda
	$(again) cuda-now
# No kernel may spill or use local memory.
cuda-now: $(if $(KERNELS),$B/libnightshift-cuda.so) $B/cuda/test_instructions
	$Q$(if $(KERNELS),,exit 0;) scripts/ptxas.sh $(KERNELS:kernels/cuda/%.cu=$B/cuda/%.ptxas) >$B/cuda/ptxas.txt; rc=$$?; \
	    cat $B/cuda/ptxas.txt; exit $$rc

# --- static checks; a stamp a file, so that only what changed is read again.
# gcc 12's analyzer loses what comes back through an out parameter: it takes it
# for NULL, unset or leaked. What it says of malloc, free and files stays on;
# leaks and unset memory are for `make asan`.
ANALYZE := -fanalyzer -Wno-analyzer-malloc-leak -Wno-analyzer-use-of-uninitialized-value \
           -Wno-analyzer-null-dereference -Wno-analyzer-null-argument
lint-now: all $(SOURCES:%.c=$B/lint/%.gcc) $(SOURCES:%.c=$B/lint/%.tidy)
	$Qscripts/lint.sh $B/lint $(LAYERS)
$B/lint/%.gcc: %.c $B/flags
	$(call say,CHECK,$<)
	$Qmkdir -p $(@D)
	$Q$(CC) $(ALL_CFLAGS) $(call isa_flags,$<) -Werror $(ANALYZE) -MMD -MP -MF $@.d -MT $@ -c -o /dev/null $<
	@touch $@
$B/lint/%.tidy: %.c $B/flags .clang-tidy
	$(call say,TIDY,$<)
	$Qmkdir -p $(@D)
	$Qclang-tidy --quiet $< -- $(filter-out $(WARN),$(ALL_CFLAGS)) $(call isa_flags,$<) 2>$@.log || \
	    { cat $@.log; false; }
	@touch $@

define arrow
@! grep -rn --include='*.[ch]' '^ *# *include "\($(2)\)/' $(1)

endef
layers:
	$(call arrow,base,daemon\|engine\|connectors\|kernels\|config)
	$(call arrow,config,daemon\|engine\|connectors\|kernels)
	$(call arrow,kernels,daemon\|engine\|connectors\|config)
	$(call arrow,engine,daemon\|connectors\|config\|kernels/cpu\|kernels/cuda)
	$(call arrow,connectors,daemon\|engine\|kernels\|config)
	$(call arrow,daemon,kernels)
	@for h in $(HEADERS); do $(CC) $(ALL_CFLAGS) -fsyntax-only -x c $$h || exit 1; done
	@echo 'arrows hold, $(words $(HEADERS)) headers compile alone'

man:
	@man -l $(wildcard */*.[1-8])

to    = $(DESTDIR)$(prefix)
share = $(to)/share/nightshift
units = $(to)/lib/systemd/system
install: all
	install -d $(to)/bin $(to)/sbin $(share) $(units) $(to)/lib/sysusers.d $(to)/lib/tmpfiles.d
	install -m 755 $B/nightshift $(to)/bin
	install -m 755 $B/nightshiftd $(to)/sbin
	for p in $(wildcard */*.[1-8]); do \
	    install -D -m 644 $$p $(to)/share/man/man$${p##*.}/$${p##*/} || exit 1; done
	for u in $(wildcard systemd/*.service systemd/*.target systemd/*.timer); do \
	    sed 's,/usr/local,$(prefix),g' $$u >$(units)/$${u##*/} && chmod 644 $(units)/$${u##*/} || exit 1; done
	for u in $(wildcard systemd/*.service); do \
	    install -D -m 644 systemd/hardening.conf $(units)/$${u##*/}.d/hardening.conf || exit 1; done
	install -m 644 systemd/nightshift.sysusers $(to)/lib/sysusers.d/nightshift.conf
	install -m 644 systemd/nightshift.tmpfiles $(to)/lib/tmpfiles.d/nightshift.conf
	install -m 644 config/nightshift.conf $(share)
	if [ -d models/demo ]; then install -d $(share)/models/demo && install -m 644 models/demo/* $(share)/models/demo; fi

deb: all
	@scripts/setup.sh deb
	$Qscripts/deb.sh $B

tests: $(TEST) $(FUZZ)
clean:
	rm -rf build build-*
FORCE:
.PHONY: all cuda cuda-now gpu-check vectors-cuda check check-now soak soak-now demo demo-now vectors bench bench-now lint lint-now asan tsan fuzz fuzz-now \
        layers man install deb tests clean FORCE
.DELETE_ON_ERROR:
.SECONDARY:
-include $(shell find $B -name '*.d' -type f 2>/dev/null)
