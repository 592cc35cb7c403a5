/* judge.h - the pool's last stage: may an answer be final?
 *
 * The validators that a job names, or the configuration for it, look at the
 * answer. One that is turned down is not final: the job runs again with another
 * seed, at most `retries` times, and then fails with code `invalid_output`, the
 * last text beside. The seed of attempt k is a draw of the job's own seed and k,
 * the same everywhere and after every restart.
 *
 * Only the first attempt leaves blocks behind. A job that is taken up again
 * begins with it, comes to the same text, and so to the same end: a crash gives
 * no job more attempts, and blocks of two attempts never meet. Where another
 * seed can not change the text (ar, and so hybrid, that take the argmax) there
 * is one attempt.
 */
#ifndef NS_DAEMON_JUDGE_H
#define NS_DAEMON_JUDGE_H

#include "daemon/work.h"

/* In NS_PHASE_CHECKING; hands the work on. */
void ns_judge(struct ns_pipeline *pipeline, struct ns_work *work);

/* The seed of the work's present attempt. */
uint64_t ns_judge_seed(const struct ns_work *work);

/* Whether what the job asks for can be done here. NS_REJECT: unsupported, where
 * a tool is not configured. */
enum ns_status ns_judge_check(const struct ns_judge_options *options,
                              const struct ns_job *job, struct ns_error *err);

/* Keeps in the work which control strings the job itself has, while the
 * documents that it names stand in its messages. NS_FATAL: memory. */
enum ns_status ns_judge_hear(const struct ns_judge_options *options,
                             const struct ns_tokenizer *tokenizer,
                             struct ns_work *work, struct ns_error *err);

#endif
