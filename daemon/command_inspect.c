#include "daemon/command.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "daemon/arguments.h"
#include "daemon/setup.h"

static const char about[] =
    "Says what a checkpoint is and where this machine's memory would go.\n";

static void
print_bytes(const char *name, uint64_t bytes, const char *behind)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 1024 && unit < 4) {
        value /= 1024;
        unit++;
    }
    printf("  %-18s %10.*f %-3s  %s\n", name, unit ? 1 : 0, value, units[unit],
           behind);
}

static void
print_plan(const struct ns_memory_plan *plan)
{
    char pages[128];

    printf("memory on this machine\n");
    print_bytes("weights", plan->weight_bytes, "packed");
    snprintf(pages, sizeof(pages), "%u pages of 64 positions",
             plan->full_pages);
    print_bytes("kv, full layers", plan->full_bytes, pages);
    snprintf(pages, sizeof(pages), "%u pages of 64 positions",
             plan->sliding_pages);
    print_bytes("kv, sliding layers", plan->sliding_bytes, pages);
    print_bytes("canvases", plan->canvas_bytes, "");
    print_bytes("workspace", plan->workspace_bytes, "of one pass");
    print_bytes("total", plan->total_bytes, "");
}

static enum ns_status
inspect(const struct ns_options *options, struct ns_error *err)
{
    struct ns_engine_options engine;
    struct ns_backend *be = NULL;
    struct ns_model *model = NULL;
    struct ns_memory_plan plan;
    enum ns_status status;
    char directory[PATH_MAX];

    status = ns_setup_model(options, directory, sizeof(directory), err);
    if (status != NS_OK)
        return status;
    engine = ns_setup_engine(options, directory);
    status = ns_backend_open(&engine.backend, &be, err);
    if (status == NS_OK)
        status = ns_model_describe(directory, be, &model, err);
    if (status == NS_OK) {
        printf("%s\n", directory);
        ns_model_print(model, stdout);
        status = ns_engine_plan_memory(model, &engine, &plan, err);
    }
    if (status == NS_OK)
        print_plan(&plan);
    ns_model_close(model);
    ns_backend_close(be);
    return status;
}

int
ns_command_inspect(int argc, char **argv)
{
    static const struct ns_argument table[] = {
        { "model", 'm', "DIR", "checkpoint folder", .key = "engine.model" },
        { 0 },
    };
    static const struct ns_synopsis usage = {
        "nightshift inspect", "[MODEL] [options]", about, table, 0, 1, false,
    };
    struct ns_arguments arguments = { 0 };
    struct ns_options *options = NULL;
    struct ns_error err = { 0 };
    enum ns_status status;
    int leave = ns_arguments_parse(&arguments, &usage, argc, argv);

    if (leave != -1)
        return leave;
    if (optind < argc &&
        ns_arguments_add(&arguments, "engine.model", argv[optind], &err) !=
            NS_OK)
        return ns_command_fail(NS_EXIT_USAGE, "%s", err.text);
    status = ns_arguments_load(&arguments, &options, &err);
    if (status == NS_OK)
        status = inspect(options, &err);
    ns_options_destroy(options);
    if (status != NS_OK)
        return ns_command_fail(ns_exit_of(&err, NS_EXIT_CONFIG), "%s",
                               err.text);
    return NS_EXIT_OK;
}
