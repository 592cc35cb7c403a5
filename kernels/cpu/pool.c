/* pool.c - the threads of the cpu backend.
 *
 * A pass makes some hundred small runs, so a run must cost little: workers
 * spin for a moment before they sleep, and a run does not wait for a worker
 * that came too late to find a task (its core may be busy with something
 * else), only for those that hold one.
 *
 * All is in one word, `ticket`: the number of the run above, the next task
 * below. Taking a task is one compare-and-swap on it, which fails if the run
 * has changed since the worker read what to do. Between two runs the ticket is
 * closed (its task is above every count), so that nobody can match the old run
 * with the new run's count while it is being written.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    SPINS = 2000, /* some 50 us: about the gap between two runs */
    LINE = 64,
};

#define CLOSED UINT32_MAX

typedef void run_fn(void *ctx, uint32_t task, uint32_t thread);

struct worker {
    struct pool *pool;
    uint32_t index;
    pthread_t thread;
};

struct pool {
    uint32_t n_threads;
    uint32_t n_started; /* workers that run: all but the caller */
    struct worker *workers;

    /* Each on a cache line of its own: all threads hammer the first. */
    char pad0[LINE];
    atomic_uint_least64_t ticket; /* run << 32 | next task */
    char pad1[LINE];
    atomic_uint pending; /* tasks not yet done */
    char pad2[LINE];
    /* Written while the ticket is closed, read by who then takes a task. */
    _Atomic(run_fn *) run;
    _Atomic(void *) ctx;
    atomic_uint n_tasks;

    atomic_bool stop;
    atomic_uint sleepers;    /* workers in wake */
    atomic_bool caller_waits; /* the caller in done */
    pthread_mutex_t lock;     /* only for the two waits; nothing below it */
    pthread_cond_t wake, done;
};

static inline void
spin(void)
{
    __builtin_ia32_pause();
}

/* Takes tasks of the current run until there are none left. */
static void
work(struct pool *pool, uint32_t thread)
{
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket,
                                               memory_order_acquire);
        run_fn *run = atomic_load_explicit(&pool->run, memory_order_relaxed);
        void *ctx = atomic_load_explicit(&pool->ctx, memory_order_relaxed);
        uint32_t n = atomic_load_explicit(&pool->n_tasks,
                                          memory_order_relaxed);
        uint32_t task = (uint32_t)ticket;

        if (task >= n)
            return;
        if (!atomic_compare_exchange_weak_explicit(
                &pool->ticket, &ticket, ticket + 1, memory_order_acq_rel,
                memory_order_relaxed))
            continue;
        run(ctx, task, thread);
        if (atomic_fetch_sub(&pool->pending, 1) == 1 &&
            atomic_load(&pool->caller_waits)) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static bool
has_work(struct pool *pool)
{
    uint64_t ticket = atomic_load(&pool->ticket);

    return (uint32_t)ticket < atomic_load(&pool->n_tasks);
}

static void *
worker_main(void *data)
{
    struct worker *worker = data;
    struct pool *pool = worker->pool;

    while (!atomic_load(&pool->stop)) {
        bool found = false;

        for (int i = 0; i < SPINS && !found; i++) {
            found = has_work(pool);
            spin();
        }
        if (!found) {
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleepers, 1);
            /* The caller publishes, then looks for sleepers; we say that we
             * sleep, then look: one of the two sees the other. */
            while (!has_work(pool) && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->lock);
        }
        work(pool, worker->index);
    }
    return NULL;
}

void
pool_run(struct pool *pool, uint32_t n_tasks, run_fn *run, void *ctx)
{
    uint64_t next;

    if (n_tasks <= 1 || pool->n_started == 0) {
        for (uint32_t task = 0; task < n_tasks; task++)
            run(ctx, task, 0);
        return;
    }

    next = ((atomic_load(&pool->ticket) >> 32) + 1) << 32;
    atomic_store(&pool->ticket, next | CLOSED);
    atomic_store_explicit(&pool->run, run, memory_order_relaxed);
    atomic_store_explicit(&pool->ctx, ctx, memory_order_relaxed);
    atomic_store_explicit(&pool->n_tasks, n_tasks, memory_order_relaxed);
    atomic_store_explicit(&pool->pending, n_tasks, memory_order_relaxed);
    atomic_store(&pool->ticket, next);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }

    work(pool, 0);

    for (int i = 0; i < SPINS && atomic_load(&pool->pending) > 0; i++)
        spin();
    if (atomic_load(&pool->pending) > 0) {
        pthread_mutex_lock(&pool->lock);
        atomic_store(&pool->caller_waits, true);
        while (atomic_load(&pool->pending) > 0)
            pthread_cond_wait(&pool->done, &pool->lock);
        atomic_store(&pool->caller_waits, false);
        pthread_mutex_unlock(&pool->lock);
    }
}

uint32_t
pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}

enum ns_status
pool_create(uint32_t n_threads, struct pool **out, struct ns_error *err)
{
    struct pool *pool = calloc(1, sizeof(*pool));
    sigset_t all, before;
    int code = 0;

    if (!pool)
        return ns_fail(err, NS_FATAL, "out of memory for the thread pool");
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    atomic_store(&pool->ticket, CLOSED);
    pool->n_threads = n_threads;
    pool->workers = calloc(n_threads, sizeof(*pool->workers));
    if (!pool->workers) {
        pool_destroy(pool);
        return ns_fail(err, NS_FATAL, "out of memory for %u threads",
                       n_threads);
    }

    /* Signals are the event loop's: workers are born with all blocked. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 1; i < n_threads && code == 0; i++) {
        struct worker *worker = &pool->workers[i];
        char name[16];

        worker->pool = pool;
        worker->index = i;
        code = pthread_create(&worker->thread, NULL, worker_main, worker);
        if (code == 0) {
            pool->n_started++;
            snprintf(name, sizeof(name), "ns-cpu-%u", i);
            pthread_setname_np(worker->thread, name);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        pool_destroy(pool);
        return ns_fail(err, NS_FATAL, "cannot start %u threads: %s", n_threads,
                       strerror(code));
    }
    *out = pool;
    return NS_OK;
}

void
pool_destroy(struct pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 1; i <= pool->n_started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}
