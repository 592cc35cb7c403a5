/* The fields of `nightshift`: one handler each, listed in a table. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/reader.h"
#include "connectors/job_private.h"
#include "connectors/sha256.h"

enum {
    CANVAS = 256,
    CANVAS_LEAST = 64,
    CANVAS_STEP = 16,
};

/* What the engine takes too, and in floats. */
static const double T_LEAST = 0.001;

static enum ns_status
take_mode(struct ns_parse *p, const json_t *value, const char *path)
{
    const char *word = json_string_value(value);

    if (word && ns_job_mode_from(word, &p->job->mode))
        return NS_OK;
    return ns_job_wrong_kind(p, value, path,
                             "one of auto, diffusion, ar, hybrid");
}

static enum ns_status
take_batch(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)p, (void)value, (void)path; /* taken before, with the id */
    return NS_OK;
}

static enum ns_status
take_tenant(struct ns_parse *p, const json_t *value, const char *path)
{
    return ns_job_take_name(p, value, path, &p->job->tenant);
}

/* As `nightshift dlq replay` writes it: for whoever reads the result. */
static enum ns_status
take_replay_of(struct ns_parse *p, const json_t *value, const char *path)
{
    enum { JOB_ID_BYTES = NS_JOB_BATCH_BYTES + 1 + NS_JOB_ID_BYTES };
    const char *why = "a text is needed";

    if (json_is_string(value))
        why = ns_job_bad_name(json_string_value(value),
                              json_string_length(value), JOB_ID_BYTES);
    if (why)
        return ns_refuse(p->err, "bad_param", path, "%s: %s", path, why);
    p->job->replay_of = json_string_value(value);
    return NS_OK;
}

static enum ns_status
take_priority(struct ns_parse *p, const json_t *value, const char *path)
{
    enum ns_status status;
    int64_t n = 0;

    status = ns_job_take_integer(p, value, path, -100, 100, &n);
    if (status == NS_OK)
        p->job->priority = (int32_t)n;
    return status;
}

static bool
take_digits(struct ns_reader *reader, int n, int least, int most, int *out)
{
    char digits[4];
    int x = 0;

    if (!ns_reader_take(reader, digits, (size_t)n))
        return false;
    for (int i = 0; i < n; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return false;
        x = x * 10 + (digits[i] - '0');
    }
    *out = x;
    return x >= least && x <= most;
}

static bool
take_one_of(struct ns_reader *reader, const char *set, char *out)
{
    if (ns_reader_left(reader) == 0 || *reader->at == '\0' ||
        !strchr(set, *reader->at))
        return false;
    return ns_reader_take(reader, out, 1);
}

/* Days from 1970-01-01, for years 0 to 9999 of the civil calendar: the year is
 * begun in March, so that the leap day comes last. */
static int64_t
days_from_civil(int year, int month, int day)
{
    int y = month <= 2 ? year - 1 : year;
    int era = (y >= 0 ? y : y - 399) / 400;
    int of_era = y - era * 400;
    int of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    int64_t days = (int64_t)of_era * 365 + of_era / 4 - of_era / 100 + of_year;

    return (int64_t)era * 146097 + days - 719468;
}

/* RFC 3339: "2026-12-01T06:00:00.5+01:00" to Unix milliseconds. */
static bool
parse_time(const char *text, size_t length, int64_t *out_ms)
{
    static const int month_days[] = { 31, 28, 31, 30, 31, 30,
                                      31, 31, 30, 31, 30, 31 };
    struct ns_reader reader = ns_reader_over(text, length);
    int year, month, day, hour, minute, second;
    int zone_hour = 0, zone_minute = 0, most;
    int64_t ms = 0, minutes;
    char mark;

    if (!take_digits(&reader, 4, 0, 9999, &year) ||
        !take_one_of(&reader, "-", &mark) ||
        !take_digits(&reader, 2, 1, 12, &month) ||
        !take_one_of(&reader, "-", &mark) ||
        !take_digits(&reader, 2, 1, 31, &day) ||
        !take_one_of(&reader, "Tt ", &mark) ||
        !take_digits(&reader, 2, 0, 23, &hour) ||
        !take_one_of(&reader, ":", &mark) ||
        !take_digits(&reader, 2, 0, 59, &minute) ||
        !take_one_of(&reader, ":", &mark) ||
        !take_digits(&reader, 2, 0, 60, &second))
        return false;
    most = month_days[month - 1];
    if (month == 2 && year % 4 == 0 && (year % 100 != 0 || year % 400 == 0))
        most++;
    if (day > most)
        return false;

    if (take_one_of(&reader, ".", &mark)) {
        int64_t unit = 100;
        const unsigned char *first = reader.at;

        for (; reader.at < reader.end && *reader.at >= '0' && *reader.at <= '9';
             reader.at++) {
            ms += (*reader.at - '0') * unit;
            unit /= 10; /* digits behind the third weigh nothing */
        }
        if (reader.at == first)
            return false;
    }
    if (!take_one_of(&reader, "Zz+-", &mark))
        return false;
    if (mark == '+' || mark == '-') {
        char colon;

        if (!take_digits(&reader, 2, 0, 23, &zone_hour) ||
            !take_one_of(&reader, ":", &colon) ||
            !take_digits(&reader, 2, 0, 59, &zone_minute))
            return false;
    }
    if (ns_reader_left(&reader))
        return false;

    minutes = days_from_civil(year, month, day) * 1440 + hour * 60 + minute;
    minutes -= (mark == '-' ? -1 : 1) * (zone_hour * 60 + zone_minute);
    *out_ms = (minutes * 60 + second) * 1000 + ms;
    return true;
}

static enum ns_status
take_deadline(struct ns_parse *p, const json_t *value, const char *path)
{
    int64_t ms, most;

    if (!json_is_string(value) ||
        !parse_time(json_string_value(value), json_string_length(value), &ms))
        return ns_job_wrong_kind(p, value, path,
                                 "a time like 2026-12-01T06:00:00Z (RFC 3339)");
    most = p->options->now_ms + (int64_t)NS_JOB_DEADLINE_DAYS * 86400000;
    if (p->options->now_ms && ms > most) {
        ns_job_warn(p->job, "%s: cut to %d days from now", path,
                    NS_JOB_DEADLINE_DAYS);
        ms = most;
    }
    p->job->has_deadline = true;
    p->job->deadline_ms = ms;
    return NS_OK;
}

static enum ns_status
take_budget(struct ns_parse *p, const json_t *value, const char *path)
{
    p->has_budget = true;
    return ns_job_take_u32(p, value, path, 0, NS_JOB_MOST_TOKENS,
                           &p->job->thinking_budget);
}

static enum ns_status
take_canvas(struct ns_parse *p, const json_t *value, const char *path)
{
    uint32_t most = p->options->canvas_length;
    enum ns_status status;
    uint32_t n;

    if (!most)
        most = CANVAS;
    status = ns_job_take_u32(p, value, path,
                             CANVAS_LEAST < most ? CANVAS_LEAST : most, most,
                             &n);
    if (status != NS_OK)
        return status;
    if (n % CANVAS_STEP)
        return ns_refuse(p->err, "bad_param", path,
                         "%s: %u is not a multiple of %d", path, n,
                         CANVAS_STEP);
    p->job->canvas_length = n;
    return NS_OK;
}

static enum ns_status
take_t_min(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_t_min = true;
    return ns_job_take_number(p, value, path, T_LEAST, false, 10,
                              &p->job->t_min);
}

static enum ns_status
take_t_max(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_t_max = true;
    return ns_job_take_number(p, value, path, T_LEAST, false, 10,
                              &p->job->t_max);
}

static enum ns_status
take_entropy_bound(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_entropy_bound = true;
    return ns_job_take_number(p, value, path, 0, false, 1000,
                              &p->job->entropy_bound);
}

static enum ns_status
take_steps(struct ns_parse *p, const json_t *value, const char *path)
{
    return ns_job_take_u32(p, value, path, 1, 1000,
                           &p->job->max_denoising_steps);
}

static enum ns_status
take_stability(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_stability_threshold = true;
    return ns_job_take_u32(p, value, path, 0, 1000,
                           &p->job->stability_threshold);
}

static enum ns_status
take_confidence(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_confidence_threshold = true;
    return ns_job_take_number(p, value, path, 0, false, 100,
                              &p->job->confidence_threshold);
}

/* A word, or an object {"type": word} with options of the task's own. Of
 * those none is built: a long document is summarised in one pass. */
static enum ns_status
take_task(struct ns_parse *p, const json_t *value, const char *path)
{
    const json_t *type = value;
    const char *key, *word;
    json_t *option;
    char at[64];

    if (json_is_object(value)) {
        type = json_object_get(value, "type");
        json_object_foreach((json_t *)value, key, option)
        {
            if (strcmp(key, "type") == 0)
                continue;
            snprintf(at, sizeof(at), "%s.%.32s", path, key);
            if (strcmp(key, "chunk_tokens") != 0)
                return ns_job_unsupported(p, at, "an option of a task");
            if (ns_job_take_u32(p, option, at, 128, 1 << 20,
                                &p->job->chunk_tokens) != NS_OK)
                return NS_REJECT;
        }
    }
    word = json_string_value(type);
    if (word && strcmp(word, "code") == 0)
        p->job->task = NS_JOB_TASK_CODE;
    else if (word && strcmp(word, "summarize") == 0)
        p->job->task = NS_JOB_TASK_SUMMARIZE;
    else
        return ns_job_wrong_kind(p, type ? type : value, path,
                                 "one of code, summarize");
    if (p->job->chunk_tokens && p->job->task != NS_JOB_TASK_SUMMARIZE)
        return ns_job_unsupported(p, path, "chunk_tokens but of summarize");
    return NS_OK;
}

static enum ns_status
take_unbuilt(struct ns_parse *p, const json_t *value, const char *path)
{
    (void)value;
    return ns_job_unsupported(p, path, "the field");
}

static enum ns_status
take_draft(struct ns_parse *p, const json_t *value, const char *path)
{
    if (!json_is_string(value) || json_string_length(value) == 0)
        return ns_job_wrong_kind(p, value, path, "a text that is not empty");
    p->job->draft = json_string_value(value);
    p->job->draft_length = json_string_length(value);
    return NS_OK;
}

static enum ns_status
take_image_tokens(struct ns_parse *p, const json_t *value, const char *path)
{
    static const uint32_t budgets[] = { 70, 140, 280, 560, 1120 };
    enum ns_status status;

    if (!p->options->images)
        return take_unbuilt(p, value, path);
    status = ns_job_take_u32(p, value, path, budgets[0], budgets[4],
                             &p->job->image_tokens);
    for (int i = 0; i < 5 && status == NS_OK; i++)
        if (p->job->image_tokens == budgets[i])
            return NS_OK;
    return status != NS_OK
               ? status
               : ns_job_wrong_kind(p, value, path,
                                   "one of 70, 140, 280, 560, 1120");
}

/* A name, or {"schema": S}. */
static enum ns_status
take_validator(struct ns_parse *p, const json_t *value, const char *path)
{
    const json_t *schema = json_object_get(value, "schema");
    enum ns_validator which;

    if (schema && json_object_size(value) == 1 &&
        (json_is_object(schema) || json_is_boolean(schema))) {
        p->job->answer_schema = schema;
        which = NS_VALIDATOR_SCHEMA;
    } else if (!json_is_string(value) ||
               !ns_validator_from(json_string_value(value), &which)) {
        return ns_job_wrong_kind(p, value, path,
                                 "one of control, repetition, fence, json, "
                                 "schema, python, c, or {\"schema\": ...}");
    }
    p->job->validators |= 1u << which;
    return NS_OK;
}

static enum ns_status
take_validators(struct ns_parse *p, const json_t *value, const char *path)
{
    enum ns_status status = NS_OK;

    if (!json_is_array(value))
        return ns_job_wrong_kind(p, value, path, "a list of validators");
    p->job->has_validators = true;
    for (size_t i = 0; i < json_array_size(value) && status == NS_OK; i++) {
        char item[64];

        snprintf(item, sizeof(item), "%.40s[%zu]", path, i);
        status = take_validator(p, json_array_get(value, i), item);
    }
    return status;
}

static enum ns_status
take_retries(struct ns_parse *p, const json_t *value, const char *path)
{
    p->job->has_retries = true;
    return ns_job_take_u32(p, value, path, 0, NS_JOB_RETRIES,
                           &p->job->retries);
}

static const struct ns_job_field nightshift_fields[] = {
    { "mode", take_mode },
    { "batch", take_batch },
    { "tenant", take_tenant },
    { "priority", take_priority },
    { "replay_of", take_replay_of },
    { "deadline", take_deadline },
    { "thinking_budget", take_budget },
    { "canvas_length", take_canvas },
    { "t_min", take_t_min },
    { "t_max", take_t_max },
    { "entropy_bound", take_entropy_bound },
    { "max_denoising_steps", take_steps },
    { "stability_threshold", take_stability },
    { "confidence_threshold", take_confidence },
    { "task", take_task },
    { "image_tokens", take_image_tokens },
    { "draft", take_draft },
    { "validators", take_validators },
    { "retries", take_retries },
    { NULL, NULL },
};

enum ns_status
ns_job_take_ours(struct ns_parse *p, const json_t *nightshift)
{
    return ns_job_take_fields(p, nightshift, "nightshift.", nightshift_fields,
                              true);
}
