/* Stages of a step: tasks that any thread may do in any order.

   Threads take tasks one by one, so that one that the system does not run holds up the others for
   a task at most, and never a whole stage. */

#ifndef STAGES_H
#define STAGES_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

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

/* Who waits spins first: a stage takes microseconds. Then it gives its core to whoever wants it. */
static void wait_until(atomic_long *value, long wanted) {
  for (long spins = 0; atomic_load_explicit(value, memory_order_acquire) < wanted; spins++) {
    if (spins < 2000) rest();
    else sched_yield();
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
