/* card.c - a day of jobs on a card that is not here, packed in several ways.
 *
 *     card [--card NAME] [--fp8] [--jobs N] [--hours H] [--steps S] [--day N]
 *          [--policy NAME]
 *
 * Makes a day's jobs from a seed (log-normal lengths, a third of them questions
 * on shared documents, deadlines, pictures, half of all sent in at the start),
 * plays them through each policy against the roofline model of the card at the
 * efficiencies that are expected of it, and prints one line each, tab-separated.
 * The last column is processor time a simulated pass, the planner's part of
 * which is bounded by it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/rng.h"
#include "engine/simulate.h"

struct maker {
    uint64_t seed;
    uint32_t n;
};

static double
uniform(struct maker *maker)
{
    return ns_draw_uniform(ns_mix(ns_mix(maker->seed) ^ maker->n++));
}

static double
normal(struct maker *maker)
{
    double u = uniform(maker), v = uniform(maker);

    return sqrt(-2 * log(1 - u)) * cos(2 * 3.14159265358979 * v);
}

static uint32_t
log_normal(struct maker *maker, double median, double sigma, double least,
           double most)
{
    double x = median * exp(sigma * normal(maker));

    return (uint32_t)(x < least ? least : x > most ? most : x);
}

/* Half of the work of a day is there when it begins, the rest trickles in. */
static double
arrival(struct maker *maker, double day_s)
{
    double u = uniform(maker);

    return u < .5 ? 600 * 2 * u : day_s * (2 * u - 1);
}

static void
make_jobs(struct ns_sim_job *jobs, size_t n, double day_s, double steps,
          uint64_t seed)
{
    struct maker maker = { seed, 0 };
    uint32_t left = 0, document = 0;
    uint64_t group = 0;
    double at = 0;

    for (size_t i = 0; i < n; i++) {
        struct ns_sim_job *job = &jobs[i];
        double spread = exp(.35 * normal(&maker));

        memset(job, 0, sizeof(*job));
        job->mode = NS_MODE_DIFFUSION;
        job->canvas_length = 256;
        job->prompt = log_normal(&maker, 1500, 1.1, 64, 200000);
        job->answer = log_normal(&maker, 300, .8, 16, 4096);
        job->steps = (float)(steps * spread < 2 ? 2 : steps * spread);
        job->arrival_s = arrival(&maker, day_s);
        if (left == 0 && uniform(&maker) < .04) {
            left = 2 + log_normal(&maker, 8, .7, 0, 100);
            document = log_normal(&maker, 12000, .8, 1000, 150000);
            at = job->arrival_s;
            group++;
        }
        if (left > 0) { /* a question on the document */
            left--;
            job->group = group;
            job->shared = document;
            job->prompt = document + log_normal(&maker, 60, .6, 16, 1000);
            job->arrival_s = at + 60 * uniform(&maker);
        }
        if (uniform(&maker) < .08)
            job->prompt += 280 * (1 + (uint32_t)(3 * uniform(&maker)));
        if (uniform(&maker) < .4)
            job->deadline_s = job->arrival_s + day_s / 3 *
                              (.1 + .9 * uniform(&maker));
        if (uniform(&maker) < .05) {
            job->priority = 10;
            job->deadline_s = job->arrival_s + day_s / 144;
        }
    }
}

static const struct ns_sim_policy policies[] = {
    { .name = "ours", .ranked = true, .sharing = true, .expires = true,
      .sated = true, .riders = 32, .max_sequences = 256 },
    { .name = "ours, no riders", .ranked = true, .sharing = true,
      .expires = true, .sated = true, .max_sequences = 256 },
    { .name = "ours, as many as fit", .ranked = true, .sharing = true,
      .expires = true, .max_sequences = 256 },
    { .name = "first come, prefixes shared", .sharing = true,
      .max_sequences = 256 },
    { .name = "first come", .max_sequences = 256 },
    { .name = "cap 32", .sharing = true, .max_sequences = 32 },
    { .name = "cap 4", .sharing = true, .max_sequences = 4 },
    { .name = "static 32", .whole = true, .max_sequences = 32 },
    { .name = "static 8", .whole = true, .max_sequences = 8 },
};

static double
cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int
main(int argc, char **argv)
{
    const char *name = "h100-80gb", *only = NULL;
    bool fp8 = false;
    size_t n = 100000;
    double hours = 24, steps = 16;
    uint64_t seed = 1;
    const struct ns_cost_card *card;
    struct ns_sim_machine machine = { .pass_tokens = 8192,
                                      .age_step_ms = 600000 };
    struct ns_sim_job *jobs;

    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (strcmp(argv[i], "--fp8") == 0) {
            fp8 = true;
            continue;
        }
        if (strcmp(argv[i], "--card") == 0)
            name = value;
        else if (strcmp(argv[i], "--policy") == 0)
            only = value;
        else if (strcmp(argv[i], "--jobs") == 0)
            n = strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--hours") == 0)
            hours = strtod(value, NULL);
        else if (strcmp(argv[i], "--steps") == 0)
            steps = strtod(value, NULL);
        else if (strcmp(argv[i], "--day") == 0)
            seed = strtoul(value, NULL, 10);
        else {
            fprintf(stderr, "card: unknown option %s\n", argv[i]);
            return 64;
        }
        i++;
    }
    card = ns_cost_card(name);
    jobs = calloc(n ? n : 1, sizeof(*jobs));
    if (!card || !jobs) {
        fprintf(stderr, "card: %s\n", card ? "out of memory"
                                           : "no card of that name");
        free(jobs);
        return 64;
    }
    machine.rates = fp8 ? card->fp8 : card->bf16;
    ns_cost_shape_released(fp8 ? 1 : 2, &machine.shape);
    machine.memory_bytes = ns_cost_card_pool(card, &machine.shape);
    printf("policy\ttokens/s\ttimely\tbusy\tdone\tmissed\trefused\tcached\t"
           "peak GB\tsequences\trows\thours\tus/pass\n");
    for (size_t p = 0; p < sizeof(policies) / sizeof(policies[0]); p++) {
        struct ns_sim_report report;
        struct ns_error err;
        double begun;

        if (only && strcmp(only, policies[p].name) != 0)
            continue;
        make_jobs(jobs, n, hours * 3600, steps, seed);
        begun = cpu_seconds();
        if (ns_simulate(&machine, &policies[p], jobs, n, &report, &err) !=
            NS_OK) {
            fprintf(stderr, "card: %s\n", err.text);
            free(jobs);
            return 70;
        }
        printf("%s\t%.0f\t%.0f\t%.3f\t%u\t%u\t%u\t%.3f\t%.1f\t%.1f\t%.0f\t%.2f\t"
               "%.1f\n",
               policies[p].name, (double)report.answer_tokens / report.seconds,
               (double)report.timely_tokens / report.seconds,
               report.busy_s / report.seconds, report.done, report.missed,
               report.refused,
               (double)report.cached_tokens / (double)report.prompt_tokens,
               report.peak_bytes / 1e9, report.mean_sequences,
               report.mean_rows, report.seconds / 3600,
               1e6 * (cpu_seconds() - begun) / (double)report.passes);
        fflush(stdout);
    }
    free(jobs);
    return 0;
}
