#include "daemon/jobstate.h"

struct arrow {
    enum ns_job_phase next;
    enum ns_job_action action; /* NS_DO_NOTHING: there is no such arrow */
};

/* A fenced job that is prepared or runs goes by the sink, too: behind its own
 * blocks, and the store says once more that the claim is someone else's. */
/* clang-format off */
static const struct arrow arrows[NS_N_PHASES][NS_N_EVENTS] = {
    [NS_PHASE_RECEIVED] = {
        [NS_ON_PARSED]  = { NS_PHASE_CLAIMING, NS_DO_CLAIM },
        [NS_ON_REFUSED] = { NS_PHASE_REFUSING, NS_DO_REFUSE },
        [NS_ON_STOP]    = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
    [NS_PHASE_CLAIMING] = {
        [NS_ON_CLAIM_RUN]      = { NS_PHASE_PREPARING, NS_DO_PREPARE },
        [NS_ON_CLAIM_WAIT]     = { NS_PHASE_PARKED, NS_DO_PARK },
        [NS_ON_CLAIM_FINAL]    = { NS_PHASE_ENDED, NS_DO_ACKNOWLEDGE },
        [NS_ON_CLAIM_CONFLICT] = { NS_PHASE_REFUSING, NS_DO_REFUSE },
        [NS_ON_LOST]           = { NS_PHASE_ENDED, NS_DO_RELEASE },
        [NS_ON_STOP]           = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
    [NS_PHASE_PARKED] = {
        [NS_ON_DUE]  = { NS_PHASE_CLAIMING, NS_DO_CLAIM },
        [NS_ON_STOP] = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
    [NS_PHASE_PREPARING] = {
        [NS_ON_PREPARED]  = { NS_PHASE_RUNNING, NS_DO_RUN },
        [NS_ON_UNFIT]     = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_EXPIRED]   = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_CANCELLED] = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_TROUBLE]   = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_STOP]      = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_FENCED]    = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
    },
    [NS_PHASE_RUNNING] = {
        [NS_ON_BLOCK]     = { NS_PHASE_RUNNING, NS_DO_CHECKPOINT },
        [NS_ON_DONE]      = { NS_PHASE_CHECKING, NS_DO_CHECK },
        [NS_ON_UNFIT]     = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_EXPIRED]   = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_CANCELLED] = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_TROUBLE]   = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_STOP]      = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_FENCED]    = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
    },
    [NS_PHASE_CHECKING] = {
        [NS_ON_FIT]     = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_UNFIT]   = { NS_PHASE_FINISHING, NS_DO_FINISH },
        [NS_ON_AGAIN]   = { NS_PHASE_PREPARING, NS_DO_PREPARE },
        [NS_ON_TROUBLE] = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_STOP]    = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
        [NS_ON_FENCED]  = { NS_PHASE_GIVING_BACK, NS_DO_GIVE_BACK },
    },
    [NS_PHASE_FINISHING] = {
        [NS_ON_STORED] = { NS_PHASE_ENDED, NS_DO_ACKNOWLEDGE },
        [NS_ON_FENCED] = { NS_PHASE_PARKED, NS_DO_PARK },
        [NS_ON_LOST]   = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
    [NS_PHASE_REFUSING] = {
        [NS_ON_STORED] = { NS_PHASE_ENDED, NS_DO_ACKNOWLEDGE },
        [NS_ON_FENCED] = { NS_PHASE_PARKED, NS_DO_PARK },
        [NS_ON_LOST]   = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
    [NS_PHASE_GIVING_BACK] = {
        [NS_ON_STORED] = { NS_PHASE_PARKED, NS_DO_PARK },
        [NS_ON_FENCED] = { NS_PHASE_PARKED, NS_DO_PARK },
        [NS_ON_LOST]   = { NS_PHASE_ENDED, NS_DO_RELEASE },
    },
};
/* clang-format on */

enum ns_job_action
ns_jobstate_step(struct ns_jobstate *state, enum ns_job_event event)
{
    struct arrow arrow;

    if (state->phase >= NS_N_PHASES || event >= NS_N_EVENTS)
        return NS_DO_NOTHING;
    arrow = arrows[state->phase][event];
    if (arrow.action == NS_DO_NOTHING)
        return NS_DO_NOTHING;
    if (event == NS_ON_STOP)
        state->stopping = true;
    if (event == NS_ON_TROUBLE && state->troubles < UINT32_MAX)
        state->troubles++;
    if (event == NS_ON_BLOCK)
        state->troubles = 0;
    /* There is no later to park for. */
    if (arrow.action == NS_DO_PARK && state->stopping)
        arrow = (struct arrow){ NS_PHASE_ENDED, NS_DO_RELEASE };
    state->phase = arrow.next;
    return arrow.action;
}

int64_t
ns_backoff_ms(uint32_t n_failures, int64_t base_ms, int64_t cap_ms,
              uint32_t random)
{
    int64_t most = base_ms < cap_ms ? base_ms : cap_ms;

    for (uint32_t i = 1; i < n_failures && most < cap_ms; i++)
        most = most > cap_ms / 2 ? cap_ms : most * 2;
    return (int64_t)((uint64_t)most * random >> 32);
}

const char *
ns_job_phase_name(enum ns_job_phase phase)
{
    static const char *const names[NS_N_PHASES] = {
        "received",  "claiming",    "parked", "preparing", "running",
        "checking",  "finishing", "refusing", "giving_back", "ended",
    };

    return phase < NS_N_PHASES ? names[phase] : "unknown";
}
