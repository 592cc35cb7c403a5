# make            build/nightshift and build/nightshiftd   make V=1     show commands
# make demo       the main job over real documents         make check   every test
# make vectors    golden cases (CASES=DIR)                 make bench   speed, as ratios
# make asan|tsan  check, sanitized                         make lint    static checks
# make layers     include arrows, lone headers             make install prefix, DESTDIR
B       := build
CSTD    := -std=c17 -D_GNU_SOURCE
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wvla \
           -Wstrict-prototypes -Wmissing-prototypes -Wformat=2 -Wundef \
           -Wpointer-arith -Wwrite-strings -Wdouble-promotion -Wimplicit-fallthrough -Wno-format-truncation
CFLAGS  ?= -O2 -g
PKGS    := jansson liblz4 inih libcrypto libxxhash libsystemd
prefix  ?= /usr/local
Q       := $(if $(V),,@)
say      = $(if $(V),,@printf '  %-5s %s\n' $(1) $(2))

ALL_CFLAGS := $(CSTD) $(WARN) -I. -fno-common -fstack-protector-strong -ffp-contract=off \
              $(shell pkg-config --cflags $(PKGS) 2>/dev/null) $(CFLAGS) $(SAN:%=-fsanitize=%)
ALL_LIBS   := $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lunistring -lm -pthread
CFLAGS_avx2       := -mavx2 -mfma -mf16c
CFLAGS_avx512     := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
CFLAGS_avx512bf16 := $(CFLAGS_avx512) -mavx512bf16
CFLAGS_amx        := $(CFLAGS_avx512) -mamx-tile -mamx-bf16

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
TEST    := $(patsubst %.c,$B/%,$(wildcard tests/*/test_*.c))
FUZZ    := $(patsubst %.c,$B/%,$(wildcard tests/*/fuzz_*.c))
SUPPORT := $(patsubst %.c,$B/%.o,$(wildcard tests/*.c))

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
	$$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -o $$@ $$^ \
	    $(ALL_LIBS) -lcmocka
endef
$(foreach l,$(LAYERS),$(eval $(call layer,$l)))
$(foreach l,$(LAYERS),$(eval $B/lib$l.a: $(patsubst %.c,$B/%.o,$(call src,$l))))

$B/tests/tools/%: $B/tests/tools/%.o $B/tests/tiny.o $B/libbase.a
	$(call say,LD,$@)
	$Q$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(ALL_LIBS)

$B/%.o: %.c $B/flags
	$(call say,CC,$<)
	$Qmkdir -p $(@D)
	$Q$(CC) $(ALL_CFLAGS) $(CFLAGS_$(lastword $(subst _, ,$(basename $(notdir $<))))) -MMD -MP -c -o $@ $<

# Rebuild everything when the flags change, and only then.
$B/flags: FORCE
	@mkdir -p $B; echo '$(CC) $(ALL_CFLAGS)' | cmp -s - $@ || echo '$(CC) $(ALL_CFLAGS)' > $@

tests: $(TEST)
clean:
	rm -rf build build-*
FORCE:
.PHONY: all tests clean FORCE
.DELETE_ON_ERROR:
.SECONDARY:
-include $(shell find $B -name '*.d' 2>/dev/null)
