/* options.h - nightshift.conf: one table of keys, over libinih.
 *
 *     [engine]                     the table says for "engine.model":
 *     model = /srv/models/demo     kind, field, default, range, reload, meaning
 *
 * The table drives parsing, defaults, ranges, reload, --print-config and the
 * test that nightshift.conf(5) names every key. An unknown key, a key set
 * twice, a value out of range: each is an error that names file and line. The
 * section [kafka] is kept verbatim, in order, for librdkafka to judge.
 *
 * The other layers never see this struct: daemon/ hands each of them the plain
 * struct of options that the layer itself declares.
 *
 * Owns:   its texts. Thread: one at a time.
 */
#ifndef NS_CONFIG_OPTIONS_H
#define NS_CONFIG_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/error.h"

/* Choices, in the order in which the table spells them. */
enum ns_mode_choice { NS_CHOOSE_AUTO, NS_CHOOSE_DIFFUSION, NS_CHOOSE_AR,
                      NS_CHOOSE_HYBRID };

enum ns_auto_choice { NS_AUTO_FIXED, NS_AUTO_THROUGHPUT };

struct ns_setting { /* a line of a section that is kept verbatim */
    const char *key, *value;
};

struct ns_options {
    struct {
        const char *model;       /* NULL: none given */
        const char *model_names; /* comma list; NULL: any */
        const char *backend;     /* "cpu", "cuda" */
        uint32_t device;         /* of the cards that the process sees */
        uint32_t mode;           /* enum ns_mode_choice */
        uint32_t auto_by;        /* enum ns_auto_choice */
        uint64_t seed;
        uint32_t pass_tokens, max_sequences, reserve_tokens;
        uint64_t memory_bytes, kv_bytes; /* 0: the engine's own choice */
        uint64_t age_step_ms;
        bool prefix_sharing, compact_kv;
    } engine;
    struct {
        uint32_t threads;       /* 0: all that the process may use */
        const char *isa;        /* "auto": the best there is */
        const char *arithmetic; /* "fp32", "bf16" */
    } cpu;
    struct {
        const char *arithmetic; /* "auto", "fp32", "bf16" */
    } cuda;
    struct {
        const char *spool; /* NULL: none given */
        uint32_t window;   /* jobs taken in and not yet stored */
        uint64_t window_bytes;
        uint64_t poll_ms; /* how often in/ is looked at */
        bool allow_nfs;
        const char *topics; /* comma list; NULL: none given */
        uint32_t span;
        const char *id_from; /* NULL: the body alone */
        bool tombstone_cancels, allow_plaintext;
        const char *results_topic, *dead_letter_topic; /* NULL: none */
    } intake;
    struct {
        const char *conninfo, *password_file; /* NULL: none given */
        uint64_t connect_ms, answer_ms, lease_ms;
        bool notify, allow_async_commit, allow_plaintext;
    } postgres;
    struct {
        uint32_t default_max_tokens;
        uint32_t summary_chunk; /* tokens; 0: what fits the context */
        uint64_t message_bytes; /* one job, expanded */
        uint32_t tenant_jobs;   /* 0: any number */
    } limits;
    struct {
        uint64_t drain_ms, checkpoint_ms, pass_limit_ms, retry_ms,
            store_retry_ms;
        uint32_t prepare_threads;
        uint32_t log_level; /* 0 error, 1 warning, 2 info, 3 debug */
    } daemon;
    struct {
        const char *roots; /* comma list; NULL: no files */
        const char *url_hosts, *url_networks; /* comma lists; NULL: none */
        uint64_t url_bytes, url_time_ms;
        uint32_t url_redirects, url_jobs;
    } images;
    struct {
        const char *roots; /* comma list; NULL: no files */
        uint64_t limit_bytes, cache_bytes, wait_ms;
    } documents;
    struct {
        const char *checks; /* comma list; NULL: none */
        uint32_t retries;
        const char *python, *cc; /* NULL: none given */
    } validators;
    struct {
        const char *listen; /* host:port; NULL: no web server */
    } http;
    const struct ns_setting *kafka;
    size_t n_kafka;

    struct ns_arena *arena; /* owned: all texts and settings */
};

/* The defaults alone. */
enum ns_status ns_options_create(struct ns_options **out,
                                 struct ns_error *err);
/* The defaults, then the file. NS_REJECT names file and line. A file that its
 * group or the world may write is refused: who may write it may run as us. */
enum ns_status ns_options_load(const char *path, struct ns_options **out,
                               struct ns_error *err);
/* The same from memory; `name` stands in errors. */
enum ns_status ns_options_parse(const char *text, size_t length,
                                const char *name, struct ns_options **out,
                                struct ns_error *err);
void ns_options_destroy(struct ns_options *options); /* takes NULL */

/* One key, "engine.model", as the command line gives it. */
enum ns_status ns_options_set(struct ns_options *options, const char *key,
                              const char *value, struct ns_error *err);

/* Takes over from `fresh` what may change while running. `report`, which may
 * be NULL, is told of each key that changed: taken, or in need of a restart.
 * On failure `live` is as it was. Texts that others borrowed from `live` stay
 * valid until it is destroyed. */
enum ns_status ns_options_adopt(struct ns_options *live,
                                const struct ns_options *fresh,
                                void (*report)(void *data, const char *key,
                                               bool taken),
                                void *data, struct ns_error *err);

/* All settings as a file that reads back to the same; secrets as "***". */
void ns_options_print(const struct ns_options *options, FILE *file);

/* The table, for tests and manuals. False behind the last. */
struct ns_option_info {
    const char *key, *fallback, *meaning;
    bool reload;
};
bool ns_option_at(size_t index, struct ns_option_info *out);

#endif
