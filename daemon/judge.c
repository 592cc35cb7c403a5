#include "daemon/judge.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/parts.h"
#include "daemon/tool.h"
#include "daemon/validators.h"
#include "engine/rng.h"

enum {
    CONTROLS_BYTES = 1 << 20, /* a vocabulary has no more of them */
    CODE_MS = 60000,          /* for all code of an answer, by the clock */
};

struct trial {
    const struct ns_judge_options *options;
    const struct ns_tokenizer *tokenizer;
    const struct ns_work *work;
    struct ns_reason reason;
    struct ns_error *err; /* where a tool does not start */
};

static uint32_t
validators_of(const struct ns_judge_options *options, const struct ns_job *job)
{
    return job->has_validators ? job->validators : options->validators;
}

enum ns_status
ns_judge_check(const struct ns_judge_options *options,
               const struct ns_job *job, struct ns_error *err)
{
    uint32_t which = validators_of(options, job);

    if ((which & 1u << NS_VALIDATOR_PYTHON) && !options->python)
        return ns_refuse(err, "unsupported", "nightshift.validators",
                         "nightshift.validators: python: validators.python "
                         "is not set");
    if ((which & 1u << NS_VALIDATOR_C) && !options->cc)
        return ns_refuse(err, "unsupported", "nightshift.validators",
                         "nightshift.validators: c: validators.cc is not set");
    return NS_OK;
}

enum ns_status
ns_judge_hear(const struct ns_judge_options *options,
              const struct ns_tokenizer *tokenizer, struct ns_work *work,
              struct ns_error *err)
{
    ns_buf_fini(&work->controls);
    ns_buf_init(&work->controls, CONTROLS_BYTES);
    if (!(validators_of(options, work->job) & 1u << NS_VALIDATOR_CONTROL))
        return NS_OK;
    ns_controls_of(work->job->messages, tokenizer, &work->controls);
    ns_controls_of(work->job->tools, tokenizer, &work->controls);
    return ns_buf_check(&work->controls, "control strings of a job", err);
}

uint64_t
ns_judge_seed(const struct ns_work *work)
{
    uint64_t seed = work->claim.stored_seed;

    return work->attempt == 0
               ? seed
               : ns_draw(seed, 0, 0, NS_DRAW_RETRY, work->attempt) >> 11;
}

/* --- one look ---------------------------------------------------------- */

/* NS_RETRY where the tool could not be started. */
static enum ns_status
parses(struct trial *trial, enum ns_validator which, bool *good)
{
    const struct ns_result *result = &trial->work->result;
    bool python = which == NS_VALIDATOR_PYTHON;
    int64_t until = ns_now_ms() + CODE_MS;
    enum ns_status status = NS_OK;
    struct ns_code code;
    size_t at = 0;

    *good = true;
    while (*good && status == NS_OK &&
           ns_next_code(result->content, result->content_length,
                        python ? "python|py|python3" : "c|h", &at, &code)) {
        struct ns_tool_answer answer;

        if (ns_now_ms() > until) {
            snprintf(trial->reason.text, sizeof(trial->reason.text),
                     "code from line %zu on: all before it took %d s to parse",
                     code.line, CODE_MS / 1000);
            *good = false;
            break;
        }
        *good = python ? ns_tool_python(trial->options->python, code.text,
                                        code.length, &answer, &status,
                                        trial->err)
                       : ns_tool_c(trial->options->cc, code.text, code.length,
                                   &answer, &status, trial->err);
        if (!*good && status == NS_OK)
            snprintf(trial->reason.text, sizeof(trial->reason.text),
                     "code from line %zu on: %.150s", code.line, answer.says);
    }
    return status;
}

static enum ns_status
look(struct trial *trial, enum ns_validator which, bool *good)
{
    const struct ns_result *result = &trial->work->result;
    const char *text = result->content;
    size_t length = result->content_length;
    bool cut = result->finish_reason &&
               strcmp(result->finish_reason, "length") == 0;

    *good = true;
    switch (which) {
    case NS_VALIDATOR_CONTROL:
        *good = ns_validate_control(text, length,
                                    trial->work->controls.data,
                                    trial->tokenizer, &trial->reason);
        break;
    case NS_VALIDATOR_REPETITION:
        *good = ns_validate_repetition(text, length, cut, &trial->reason);
        break;
    case NS_VALIDATOR_FENCE:
        *good = ns_validate_fence(text, length, &trial->reason);
        break;
    case NS_VALIDATOR_JSON:
    case NS_VALIDATOR_SCHEMA:
        *good = ns_validate_json(text, length,
                                 which == NS_VALIDATOR_SCHEMA
                                     ? trial->work->job->answer_schema
                                     : NULL,
                                 &trial->reason);
        break;
    case NS_VALIDATOR_PYTHON:
    case NS_VALIDATOR_C:
        return parses(trial, which, good);
    case NS_N_VALIDATORS:
        break;
    }
    return NS_OK;
}

/* --- the verdict --------------------------------------------------------- */

static bool
seed_matters(const struct ns_work *work)
{
    return work->request.mode == NS_MODE_DIFFUSION ||
           (work->request.has_temperature && work->request.temperature > 0);
}

static void
turn_down(struct ns_pipeline *pipeline, struct ns_work *work,
          enum ns_validator which, const struct ns_reason *reason)
{
    const struct ns_judge_options *options = &pipeline->options.judge;
    const struct ns_job *job = work->job;
    uint32_t retries = job->has_retries ? job->retries : options->retries;
    struct ns_result last = work->result;

    ns_metrics_turned_down(pipeline->metrics, which);
    if (work->attempt < retries && seed_matters(work)) {
        if (ns_pipeline_stopping(pipeline)) {
            ns_work_advance(pipeline, work, NS_ON_STOP);
            return;
        }
        ns_job_warn(work->job, "validators: attempt %u with seed %" PRIu64
                    " turned down: %s: %s", work->attempt + 1, last.seed,
                    ns_validator_name(which), reason->text);
        work->attempt++;
        ns_work_advance(pipeline, work, NS_ON_AGAIN);
        return;
    }
    ns_refuse(&work->error, "invalid_output", "nightshift.validators",
              "%s: %s%s", ns_validator_name(which), reason->text,
              work->attempt < retries
                  ? "; another seed would change nothing"
                  : "");
    if (work->attempt > 0)
        ns_context(&work->error, "%u attempts", work->attempt + 1);
    last.status = NS_RESULT_FAILED; /* what it cost stays; its texts do not */
    last.error = work->error;
    last.detail = last.content;
    last.detail_length = last.content_length;
    last.content = last.reasoning = last.finish_reason = NULL;
    last.content_length = last.reasoning_length = 0;
    work->result = last;
    ns_work_advance(pipeline, work, NS_ON_UNFIT);
}

void
ns_judge(struct ns_pipeline *pipeline, struct ns_work *work)
{
    uint32_t which = validators_of(&pipeline->options.judge, work->job);
    struct trial trial = {
        .options = &pipeline->options.judge,
        .tokenizer = ns_engine_tokenizer(pipeline->options.engine),
        .work = work,
        .err = &work->error,
    };

    if (atomic_load(&work->fenced)) {
        ns_work_advance(pipeline, work, NS_ON_FENCED);
        return;
    }
    if (work->parts && !work->parts->is_final) { /* a round, and not the last */
        ns_work_advance(pipeline, work, ns_pipeline_stopping(pipeline)
                                            ? NS_ON_STOP
                                            : NS_ON_AGAIN);
        return;
    }
    /* An answer of tool calls alone has no text to look at. */
    if (work->result.status != NS_RESULT_OK || !work->result.content)
        which = 0;
    for (int i = 0; i < NS_N_VALIDATORS; i++) {
        enum ns_validator validator = (enum ns_validator)i;
        bool good = true;

        if (!(which & 1u << i))
            continue;
        work->result.validators |= 1u << i;
        if (look(&trial, validator, &good) != NS_OK) {
            work->error.code = "validator_away";
            work->blameless = true;
            ns_work_advance(pipeline, work, NS_ON_TROUBLE);
            return;
        }
        if (!good) {
            turn_down(pipeline, work, validator, &trial.reason);
            return;
        }
    }
    ns_work_advance(pipeline, work, NS_ON_FIT);
}
