/* The caller computes part after part. Helpers compute parts in parallel if a core is free for them.

   OpenMP waits for all threads at the end of each region. A thread without a core, because another program computes,
   delays the pass; and threads that wait for the next region burn cores which that program could use. Here, the caller
   waits for a helper only while the helper computes a part. An idle helper yields its core every few microseconds, and
   sleeps after SPIN_NS without work: longer than a gap between the kernels of a pass, shorter than a gap between
   passes. So a frontend that wakes while the target computes gets a core within the time of a kernel.

   A caller that waits longer than SPIN_NS for a helper's part sleeps too: the helper has lost its core to another
   program, and the time that the caller does not burn is its own once the helper is back.

   A helper may wait for the caller's own core, where it computes nothing, and the kernel leaves it there for seconds:
   other cores that serve frontends are idle too briefly to take it over. So a caller that mostly computes alone sends
   its helpers to other cores. */

#define _GNU_SOURCE /* for the cores of threads */
#include "team.h"

#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HELPERS = 1023, SPIN_NS = 200000, PAUSES = 64, MANY_ALONE = 64, MOST_ALONE = 4096, SHARED_WEIGHT = 4 };

/* The current job. It changes only while no part is open or being computed, so a thread with a part may read it. */
static struct {
    part_function *compute;
    const void *work;
    int64_t num_parts, num_threads;
} job;

#define LINE __attribute__((aligned(64))) /* a separate cache line */
LINE static _Atomic uint64_t open_parts; /* high half: number of the job; low half: parts not taken yet */
LINE static _Atomic uint32_t num_done;   /* parts of the job that helpers have finished; the futex of the caller */
static _Atomic uint32_t is_awaited;      /* the caller sleeps until `num_done` changes */
LINE static _Atomic int64_t num_wanted;  /* helpers [0, num_wanted) may take part */
static _Atomic uint32_t num_signals;     /* the futex of sleeping helpers */
static _Atomic int64_t num_asleep;
static atomic_flag is_busy = ATOMIC_FLAG_INIT; /* one thread uses the helpers; another thread computes alone */
static int64_t num_helpers;
static pthread_t helpers[MAX_HELPERS];

/* Returns the part of a turn. Threads that take turns get neighbouring parts each, so that what one prefetches past the
   end of a part is its own next part. */
static int64_t part_of(int64_t turn) {
    const int64_t thread = turn % job.num_threads, each = job.num_parts / job.num_threads;
    return thread * each + min(thread, job.num_parts % job.num_threads) + turn / job.num_threads;
}

/* Computes parts of the job until no part is open. Returns their number. */
static int64_t take_parts(void) {
    int64_t num_taken = 0;
    uint64_t seen = atomic_load(&open_parts);
    while ((uint32_t)seen) {
        if (!atomic_compare_exchange_weak(&open_parts, &seen, seen - 1)) continue;
        job.compute(job.work, part_of(job.num_parts - (uint32_t)seen));
        num_taken++;
        seen = atomic_load(&open_parts);
    }
    return num_taken;
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int is_called(int64_t helper) {
    return helper < atomic_load(&num_wanted) && (uint32_t)atomic_load(&open_parts);
}

/* Returns 1 as soon as there is work, 0 after SPIN_NS without any. */
static int await_work(int64_t helper) {
    const int64_t end = nanoseconds() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (is_called(helper)) return 1;
            _mm_pause();
        }
        sched_yield();
    } while (nanoseconds() < end);
    return 0;
}

static void sleep_until_called(int64_t helper) {
    const uint32_t seen = atomic_load(&num_signals);
    atomic_fetch_add(&num_asleep, 1);
    if (!is_called(helper)) syscall(SYS_futex, &num_signals, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&num_asleep, 1);
}

static void finish(int64_t num_taken) {
    atomic_fetch_add(&num_done, (uint32_t)num_taken);
    if (atomic_load(&is_awaited)) syscall(SYS_futex, &num_done, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *help(void *index) {
    const int64_t helper = (int64_t)index;
    for (;;) {
        if (!await_work(helper)) sleep_until_called(helper);
        if (is_called(helper)) finish(take_parts());
    }
    return NULL;
}

static void forget_helpers(void) { /* in the child after fork(), where the helpers do not exist */
    num_helpers = 0;
    atomic_store(&open_parts, 0);
    atomic_store(&num_asleep, 0);
    atomic_flag_clear(&is_busy);
}

static void forget_after_fork(void) { pthread_atfork(NULL, NULL, forget_helpers); }

/* Starts helpers until there are `wanted`, or as many as the system allows. Helpers block all signals. */
static void start_helpers(int64_t wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, forget_after_fork);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; num_helpers < min(wanted, MAX_HELPERS); num_helpers++) {
        if (pthread_create(&thread, NULL, help, (void *)num_helpers)) break;
        pthread_detach(thread);
        helpers[num_helpers] = thread;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void call_helpers(int64_t wanted) {
    if (num_helpers < wanted) start_helpers(wanted);
    atomic_store(&num_wanted, wanted);
}

/* Returns when helpers have finished `wanted` parts. */
static void await_helpers(uint32_t wanted) {
    const int64_t end = nanoseconds() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load(&num_done) == wanted) return;
            _mm_pause();
        }
    } while (nanoseconds() < end);
    atomic_store(&is_awaited, 1);
    for (uint32_t seen; (seen = atomic_load(&num_done)) != wanted;)
        syscall(SYS_futex, &num_done, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_store(&is_awaited, 0);
}

/* Moves helpers that are on the caller's core, or wait for it, to other cores that the caller may use. */
static void move_helpers(void) {
    cpu_set_t all, others;
    if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) <= num_helpers) return;
    others = all;
    CPU_CLR(sched_getcpu(), &others);
    for (int64_t helper = 0; helper < num_helpers; helper++) {
        pthread_setaffinity_np(helpers[helper], sizeof others, &others); /* it has moved when this returns */
        pthread_setaffinity_np(helpers[helper], sizeof all, &all);
    }
}

/* Counts jobs that the caller has computed alone, and moves the helpers when they are many more than others. If that does
   not help, since the jobs are short or other programs have the cores, the next move is after twice as many. */
static void count_job(int is_shared) {
    static int64_t num_alone = 0, num_until_move = MANY_ALONE;
    num_alone = is_shared ? max(-MANY_ALONE, num_alone - SHARED_WEIGHT) : num_alone + 1;
    if (num_alone == -MANY_ALONE) num_until_move = MANY_ALONE; /* most jobs are shared */
    if (num_alone < num_until_move) return;
    num_alone = 0;
    num_until_move = min(2 * num_until_move, MOST_ALONE);
    move_helpers();
}

static void compute_together(part_function *compute, const void *work, int64_t num_parts) {
    static uint64_t number = 0;
    job.compute = compute, job.work = work, job.num_parts = num_parts, job.num_threads = atomic_load(&num_wanted) + 1;
    atomic_store(&num_done, 0);
    atomic_store(&open_parts, ++number << 32 | (uint64_t)num_parts);
    if (atomic_load(&num_asleep)) {
        atomic_fetch_add(&num_signals, 1);
        syscall(SYS_futex, &num_signals, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
    const int64_t num_others = num_parts - take_parts();
    count_job(num_others > 0);
    await_helpers((uint32_t)num_others);
}

int64_t team_size(void) { return omp_get_max_threads(); }

void share_out(part_function *compute, const void *work, int64_t num_parts) {
    const int64_t threads = team_size();
    if (threads < 2 || num_parts < 2 || num_parts > UINT32_MAX || atomic_flag_test_and_set(&is_busy)) {
        for (int64_t part = 0; part < num_parts; part++) compute(work, part);
        return;
    }
    call_helpers(threads - 1);
    compute_together(compute, work, num_parts);
    atomic_flag_clear(&is_busy);
}
