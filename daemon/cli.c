/* nightshift(1): dispatch to the commands. */
#include <stdio.h>
#include <string.h>

#include "base/version.h"
#include "daemon/command.h"
#include "daemon/setup.h"
#include "daemon/tool.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *meaning;
} commands[] = {
    { "run", ns_command_run, "run the jobs of a file" },
    { "validate", ns_command_validate, "check the jobs of a file" },
    { "plan", ns_command_plan, "say how long the jobs of a file would take" },
    { "show", ns_command_show, "print a results file for reading" },
    { "submit", ns_command_submit, "hand in the jobs of a file as a batch" },
    { "status", ns_command_status, "say how batches stand" },
    { "watch", ns_command_watch, "wait until a batch has ended" },
    { "results", ns_command_results, "write the results of a batch" },
    { "cancel", ns_command_cancel, "cancel jobs or a batch" },
    { "pause", ns_command_pause, "begin no more jobs" },
    { "resume", ns_command_resume, "begin jobs again" },
    { "dlq", ns_command_dlq, "list dead letters, send them again" },
    { "replay", ns_command_replay, "read topics again since a time" },
    { "inspect", ns_command_inspect, "say what a model is and needs" },
    { "db", ns_command_db, "install, migrate and purge the database" },
    { "tokenize", ns_command_tokenize, "text to token ids, and back" },
};

static void
print_usage(FILE *file)
{
    fprintf(file, "usage: nightshift COMMAND [options]\n\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        fprintf(file, "  %-10s %s\n", commands[i].name, commands[i].meaning);
    fprintf(file, "\n`nightshift COMMAND --help` says more, and "
                  "nightshift(1) all.\n");
}

int
main(int argc, char **argv)
{
    if (ns_tool_is_helper(argc, argv))
        return ns_tool_main(argv);
    if (ns_decoder_is_helper(argc, argv))
        return ns_decoder_main(ns_picture_decode, NS_DECODER_CPU_SECONDS);
    if (argc < 2) {
        print_usage(stderr);
        return NS_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return NS_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("nightshift %s\n", NS_VERSION);
        return NS_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[1], commands[i].name) == 0) {
            int status = commands[i].run(argc - 1, argv + 1);

            /* A reader that went away, a full disk: not a success. */
            if (fflush(stdout) != 0 && status == NS_EXIT_OK)
                status = ns_command_fail(NS_EXIT_AGAIN,
                                         "cannot write standard output");
            return status;
        }
    fprintf(stderr, "nightshift: there is no command %s\n", argv[1]);
    print_usage(stderr);
    return NS_EXIT_USAGE;
}
