/* jobstate.h - where a job stands and what is to be done next: pure.
 *
 *     step(state, event) --> action
 *
 * No clock, no thread, no memory: a simulation can run it through any order of
 * events. The pipeline does what the action says and comes back with the event
 * that this led to. In each state exactly one thread holds the job.
 *
 *     RECEIVED --parsed--> CLAIMING --run--> PREPARING --prepared--> RUNNING
 *        |                  ^  |  |            |   ^               |   |
 *      refused        due   |  | final       unfit `-again--.   done|   |stop,
 *        v                  |  v  |            v            |       v   |trouble
 *     REFUSING           PARKED   |         FINISHING <-fit- CHECKING   v
 *        |                  ^     |              |               GIVING_BACK
 *        '--stored--> ENDED <-----'<--stored-----'                       |
 *                           '------------------------ stored ------------'
 *
 * A job ends acknowledged (its outcome is durable) or released (the source
 * hands it out again at the next start), never both and never neither.
 */
#ifndef NS_DAEMON_JOBSTATE_H
#define NS_DAEMON_JOBSTATE_H

#include <stdbool.h>
#include <stdint.h>

enum ns_job_phase {
    NS_PHASE_RECEIVED,    /* pool: being parsed */
    NS_PHASE_CLAIMING,    /* sink: the store is asked for it */
    NS_PHASE_PARKED,      /* event loop: to be asked for again later */
    NS_PHASE_PREPARING,   /* pool: prompt, tokens, request */
    NS_PHASE_RUNNING,     /* engine thread */
    NS_PHASE_CHECKING,    /* pool: is the answer fit to be final? */
    NS_PHASE_FINISHING,   /* sink: the final row is written */
    NS_PHASE_REFUSING,    /* sink: the dead letter is written */
    NS_PHASE_GIVING_BACK, /* sink: the claim is given back */
    NS_PHASE_ENDED,
    NS_N_PHASES,
};

enum ns_job_event {
    NS_ON_PARSED,
    NS_ON_REFUSED,
    NS_ON_CLAIM_RUN,
    NS_ON_CLAIM_WAIT,
    NS_ON_CLAIM_FINAL,
    NS_ON_CLAIM_CONFLICT,
    NS_ON_DUE,       /* parked long enough */
    NS_ON_PREPARED,
    NS_ON_BLOCK,     /* a block joined the prefix */
    NS_ON_DONE,      /* the completion, good or bad, stands in the result */
    NS_ON_FIT,       /* and may be final */
    NS_ON_AGAIN,     /* the engine is done with it, but the job is not */
    NS_ON_UNFIT,     /* this model can never run it */
    NS_ON_EXPIRED,
    NS_ON_CANCELLED,
    NS_ON_TROUBLE,   /* may pass: try again later */
    NS_ON_STORED,    /* what the sink was asked for is durable */
    NS_ON_FENCED,    /* someone newer owns the job */
    NS_ON_LOST,      /* the store is gone */
    NS_ON_STOP,      /* the daemon stops: let go without cost to the job */
    NS_N_EVENTS,
};

enum ns_job_action {
    NS_DO_NOTHING, /* the event cannot happen here: our own bug */
    NS_DO_CLAIM,
    NS_DO_PARK,
    NS_DO_PREPARE,
    NS_DO_RUN,
    NS_DO_CHECK,
    NS_DO_CHECKPOINT,
    NS_DO_FINISH,
    NS_DO_REFUSE,
    NS_DO_GIVE_BACK,
    NS_DO_ACKNOWLEDGE, /* durable: the source may forget it */
    NS_DO_RELEASE,     /* not durable: the source will hand it out again */
};

struct ns_jobstate {
    enum ns_job_phase phase;
    uint32_t troubles; /* in a row, without a block between: sets the delay */
    bool stopping;     /* a stop was seen: it will not be claimed again */
};

enum ns_job_action ns_jobstate_step(struct ns_jobstate *state,
                                    enum ns_job_event event);

/* Delay before the next try, behind `n_failures` in a row: full jitter over
 * min(cap, base * 2^(n_failures - 1)), so that those who failed together do not
 * come back together. `random` is uniform over 32 bits. */
int64_t ns_backoff_ms(uint32_t n_failures, int64_t base_ms, int64_t cap_ms,
                      uint32_t random);

const char *ns_job_phase_name(enum ns_job_phase phase);

#endif
