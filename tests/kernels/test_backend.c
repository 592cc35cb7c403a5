/* Opening a backend, its memory, its failures, and what the machine has. */
#include "tests/kernels/lab.h"

#include <sys/stat.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/machine.h"
#include "tests/fault.h"

static enum ns_status
try_open(struct ns_backend_options options, struct ns_backend **out,
         struct ns_error *err)
{
    *out = NULL;
    return ns_backend_open(&options, out, err);
}

static void
assert_refused(struct ns_backend_options options, const char *says)
{
    struct ns_backend *be;
    struct ns_error err;

    assert_int_equal(try_open(options, &be, &err), NS_REJECT);
    assert_null(be);
    if (!strstr(err.text, says))
        fail_msg("\"%s\" does not say \"%s\"", err.text, says);
}

static void
what_the_machine_or_the_build_lacks_is_refused_by_name(void **state)
{
    char list[64];

    (void)state;
    assert_refused((struct ns_backend_options){ .name = "tpu" },
                   "there is no backend \"tpu\"");
    assert_refused((struct ns_backend_options){ .isa = "sse9" },
                   machine_list(list, sizeof(list)));
    assert_refused((struct ns_backend_options){ .arithmetic = "fp64" },
                   "there is no arithmetic \"fp64\"");
    assert_refused((struct ns_backend_options){ .n_threads = 100000 },
                   "100000 threads");
    assert_refused((struct ns_backend_options){ .isa = "ref",
                                                .arithmetic = "bf16" },
                   "does not go with ref");
    if (machine_has(ISA_AVX512BF16))
        assert_refused((struct ns_backend_options){ .isa = "avx512bf16",
                                                    .arithmetic = "fp32" },
                       "does not go with avx512bf16");
    for (enum isa isa = ISA_REF; isa < N_ISA; isa++)
        if (!machine_has(isa))
            assert_refused((struct ns_backend_options){ .isa = isa_name(isa) },
                           "this machine has no");
}

static void
a_missing_gpu_plugin_is_named(void **state)
{
    struct ns_backend *be;
    struct ns_error err;

    (void)state;
    if (try_open((struct ns_backend_options){ .name = "cuda" }, &be, &err) ==
        NS_OK) {
        ns_backend_close(be); /* a machine with the plug-in and a card */
        return;
    }
    assert_int_equal(err.status, NS_REJECT);
    assert_non_null(strstr(err.text, "libnightshift-cuda.so"));
}

static void
arithmetic_is_named_by_what_its_bits_depend_on(void **state)
{
    static const struct {
        enum isa isa;
        const char *arithmetic;
    } expected[] = {
        { ISA_REF, "fp32-ref" },
        { ISA_AVX2, "fp32" },
        { ISA_AVX512, "fp32" },
        { ISA_AVX512BF16, "bf16-avx512" },
        { ISA_AMX, "bf16-amx" },
    };
    struct ns_backend *be;
    struct ns_error err;

    (void)state;
    for (size_t i = 0; i < LENGTH(expected); i++) {
        if (!machine_has(expected[i].isa))
            continue;
        assert_int_equal(try_open((struct ns_backend_options){
                                      .isa = isa_name(expected[i].isa) },
                                  &be, &err),
                         NS_OK);
        assert_string_equal(be->arithmetic, expected[i].arithmetic);
        assert_string_equal(be->ops->name, "cpu");
        ns_backend_close(be);
    }
    /* Without a word it is fp32, also where bf16 products would be faster. */
    assert_int_equal(try_open((struct ns_backend_options){ 0 }, &be, &err),
                     NS_OK);
    assert_string_equal(be->arithmetic,
                        machine_has(ISA_AVX2) ? "fp32" : "fp32-ref");
    ns_backend_close(be);
    assert_int_equal(
        try_open((struct ns_backend_options){ .arithmetic = "auto" }, &be,
                 &err),
        NS_OK);
    assert_int_equal(strncmp(be->arithmetic, "bf16", 4) == 0,
                     machine_has(ISA_AVX512BF16));
    ns_backend_close(be);
    ns_backend_close(NULL);
}

static void
opening_and_reserving_fail_cleanly_at_every_allocation(void **state)
{
    (void)state;
    for (int n = 0;; n++) {
        struct ns_backend_options options = { .isa = "ref", .n_threads = 2 };
        struct ns_backend *be = NULL;
        enum ns_status status;
        struct ns_error err;
        void *memory = NULL;

        fault_arm(n);
        status = ns_backend_open(&options, &be, &err);
        if (status == NS_OK)
            status = be->ops->reserve(be, &lab_sizes, &err);
        if (status == NS_OK)
            status = be->ops->alloc(be, 1000, "the test's page", &memory,
                                    &err);
        if (!fault_fired()) {
            assert_int_equal(status, NS_OK);
            assert_true(n >= 4);
            be->ops->release(be, memory);
            ns_backend_close(be);
            return;
        }
        assert_int_equal(status, NS_FATAL);
        assert_null(memory);
        ns_backend_close(be);
    }
}

static void
memory_is_aligned_zeroed_and_counted(void **state)
{
    static const size_t sizes[] = { 0, 1, 63, 64, 65, 4097, 9 << 20 };
    struct ns_error err;
    struct lab lab;
    size_t before;

    (void)state;
    assert_true(lab_open(&lab, "ref", 2));
    before = ((struct cpu *)lab.be)->bytes_in_use;
    for (size_t i = 0; i < LENGTH(sizes); i++) {
        unsigned char *memory;
        void *out;

        assert_int_equal(
            lab.ops->alloc(lab.be, sizes[i], "it", &out, &err), NS_OK);
        memory = out;
        assert_int_equal((uintptr_t)memory % 64, 0);
        for (size_t j = 0; j < sizes[i]; j++)
            if (memory[j] != 0)
                fail_msg("byte %zu of %zu is not zero", j, sizes[i]);
        memset(memory, 0xff, sizes[i]); /* the next one must not see it */
        assert_int_equal(((struct cpu *)lab.be)->bytes_in_use,
                         before + sizes[i]);
        lab.ops->release(lab.be, memory);
    }
    lab.ops->release(lab.be, NULL);
    assert_int_equal(((struct cpu *)lab.be)->bytes_in_use, before);
    lab_close(&lab);
}

static void
memory_that_the_machine_lacks_is_refused_with_name_and_size(void **state)
{
    struct ns_error err;
    struct lab lab;
    void *out = NULL;

    (void)state;
    assert_true(lab_open(&lab, "ref", 1));
    assert_int_equal(lab.ops->alloc(lab.be, (size_t)1 << 50, "KV pages", &out,
                                    &err),
                     NS_FATAL);
    assert_non_null(strstr(err.text, "KV pages needs 1073741824 MiB"));
    assert_int_equal(lab.ops->alloc(lab.be, SIZE_MAX - 3, "KV pages", &out,
                                    &err),
                     NS_FATAL);
    assert_non_null(strstr(err.text, "KV pages"));
    assert_null(out);
    lab_close(&lab);
}

static void
a_failure_sticks_until_sync_reports_it_once(void **state)
{
    int32_t ids[3] = { 0, 9, 1 };
    uint64_t seed = 1;
    struct ns_matrix m = matrix_random(&seed, NS_F32, 9, 4, 1);
    struct ns_weight table;
    struct ns_error err = { 0 };
    struct ns_rows y;
    struct lab lab;

    (void)state;
    assert_true(lab_open(&lab, "ref", 1));
    table = lab_pack(&lab, NS_PACK_TABLE, &m, 1);
    y = lab_rows(&lab, 3, 4);
    lab.ops->embed(lab.be, y, &table, ids, 1);
    assert_true(row(y, 0)[0] == GAP); /* nothing was done */
    ids[1] = 8;
    lab.ops->embed(lab.be, y, &table, ids, 1);
    assert_true(row(y, 0)[0] == GAP); /* nor after it */
    assert_int_equal(lab.ops->sync(lab.be, &err), NS_FATAL);
    assert_string_equal(err.text, "token 9 in row 1, vocabulary of 9");

    assert_int_equal(lab.ops->sync(lab.be, &err), NS_OK);
    lab.ops->embed(lab.be, y, &table, ids, 1);
    assert_true(row(y, 0)[0] == matrix_at(&m, 0, 0, 0));
    ids[2] = -1;
    lab.ops->embed(lab.be, y, &table, ids, 1);
    assert_int_equal(lab.ops->sync(lab.be, &err), NS_FATAL);
    assert_string_equal(err.text, "token -1 in row 2, vocabulary of 9");
    lab.ops->drop(lab.be, &table);
    matrix_free(m);
    lab_close(&lab);
}

static void
time_inside_ops_is_counted(void **state)
{
    uint64_t before;
    struct ns_rows x;
    struct lab lab;

    (void)state;
    assert_true(lab_open(&lab, "ref", 1));
    x = lab_rows(&lab, 100, 300);
    before = lab.be->busy_ns;
    lab.ops->rmsnorm(lab.be, x, x, NULL, 1e-6f);
    assert_true(lab.be->busy_ns > before);
    lab_close(&lab);
}

static void
write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void
the_smallest_quota_on_the_way_up_counts_in_whole_processors(void **state)
{
    char root[] = "/tmp/nightshift-test-XXXXXX";
    char path[256], self[256];

    (void)state;
    assert_non_null(mkdtemp(root));
    snprintf(self, sizeof(self), "%s/self", root);
    snprintf(path, sizeof(path), "%s/a", root);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof(path), "%s/a/b", root);
    assert_int_equal(mkdir(path, 0700), 0);

    assert_int_equal(machine_quota(self, root), UINT32_MAX); /* no file */
    write_text(self, "12:cpu:/legacy\n0::/a/b\n");
    assert_int_equal(machine_quota(self, root), UINT32_MAX); /* no quota */
    snprintf(path, sizeof(path), "%s/a/b/cpu.max", root);
    write_text(path, "max 100000\n");
    assert_int_equal(machine_quota(self, root), UINT32_MAX);
    write_text(path, "250000 100000\n");
    assert_int_equal(machine_quota(self, root), 3);
    snprintf(path, sizeof(path), "%s/a/cpu.max", root);
    write_text(path, "150000 100000\n");
    assert_int_equal(machine_quota(self, root), 2);
    snprintf(path, sizeof(path), "%s/cpu.max", root); /* a container's own */
    write_text(path, "50000 100000\n");
    assert_int_equal(machine_quota(self, root), 1);
    write_text(self, "0::/\n");
    assert_int_equal(machine_quota(self, root), 1);
    write_text(path, "nonsense\n");
    assert_int_equal(machine_quota(self, root), UINT32_MAX);

    unlink(path);
    unlink(self);
    snprintf(path, sizeof(path), "%s/a/cpu.max", root);
    unlink(path);
    snprintf(path, sizeof(path), "%s/a/b/cpu.max", root);
    unlink(path);
    snprintf(path, sizeof(path), "%s/a/b", root);
    rmdir(path);
    snprintf(path, sizeof(path), "%s/a", root);
    rmdir(path);
    assert_int_equal(rmdir(root), 0);
    assert_in_range(machine_threads(), 1,
                    (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            what_the_machine_or_the_build_lacks_is_refused_by_name),
        cmocka_unit_test(a_missing_gpu_plugin_is_named),
        cmocka_unit_test(arithmetic_is_named_by_what_its_bits_depend_on),
        cmocka_unit_test(
            opening_and_reserving_fail_cleanly_at_every_allocation),
        cmocka_unit_test(memory_is_aligned_zeroed_and_counted),
        cmocka_unit_test(
            memory_that_the_machine_lacks_is_refused_with_name_and_size),
        cmocka_unit_test(a_failure_sticks_until_sync_reports_it_once),
        cmocka_unit_test(time_inside_ops_is_counted),
        cmocka_unit_test(
            the_smallest_quota_on_the_way_up_counts_in_whole_processors),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
