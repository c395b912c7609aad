/* Stages of a step: tasks that any thread may do in any order.

   Threads take tasks one by one, so that one that the system does not run holds up the others for
   a task at most, and never a whole stage. */

#ifndef STAGES_H
#define STAGES_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "vectors.h"

typedef struct {
  _Alignas(64) atomic_long next;
  atomic_long done;
} Stage;

INLINE void rest(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Who waits spins first: a stage takes microseconds. Then it gives its core to whoever wants it.
   After a millisecond the thread that is waited for has no core, because there are more threads than
   cores: only sleeping leaves it one for sure. */
static void wait_until(atomic_long *value, long wanted) {
  const struct timespec nap = {0, 50000};
  int64_t yielding_since = 0;
  for (long spins = 0; atomic_load_explicit(value, memory_order_acquire) < wanted; spins++) {
    if (spins < 2000) {
      rest();
      continue;
    }
    if (!yielding_since) yielding_since = nanoseconds();
    if (nanoseconds() - yielding_since < 1000000) sched_yield();
    else nanosleep(&nap, 0);
  }
}

static int64_t take(Stage *stage, int64_t count) {
  long task = atomic_fetch_add_explicit(&stage->next, 1, memory_order_relaxed);
  return task < count ? task : -1;
}

static void give(Stage *stage) { atomic_fetch_add_explicit(&stage->done, 1, memory_order_release); }

#define FOR_TASKS(task, stage, count)                                                              \
  for (int64_t task = take(stage, count); task >= 0; give(stage), task = take(stage, count))

#endif
