/* Threads that help with a burst, and sleep between bursts. */

#ifndef HELPERS_H
#define HELPERS_H

#include <pthread.h>

#include "model.h"

/* What every thread does. */
static void work(Job *job);

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER;
static long num_helpers, generation;
static atomic_long num_entered, num_left;
static _Atomic(Job *) open_job;

static void *help(void *argument) {
  long number = (long)argument, seen = 0;
  for (;;) {
    pthread_mutex_lock(&mutex);
    while (generation == seen) pthread_cond_wait(&begun, &mutex);
    seen = generation;
    pthread_mutex_unlock(&mutex);
    /* Who enters is waited for; a job that was closed before is not touched. */
    atomic_fetch_add(&num_entered, 1);
    Job *job = atomic_load(&open_job);
    if (job && number < job->threads) work(job);
    atomic_fetch_add(&num_left, 1);
  }
  return NULL;
}

/* A forked child has none of its parent's threads. */
static void forget_helpers(void) {
  num_helpers = 0;
  atomic_store(&num_entered, 0);
  atomic_store(&num_left, 0);
  atomic_store(&open_job, NULL);
  pthread_mutex_init(&one_at_a_time, NULL);
  pthread_mutex_init(&mutex, NULL);
  pthread_cond_init(&begun, NULL);
}

static void want_helpers(long wanted) {
  static int is_watching;
  if (!is_watching) pthread_atfork(NULL, NULL, forget_helpers), is_watching = 1;
  while (num_helpers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, (void *)(num_helpers + 1)) != 0) return;
    pthread_detach(thread);
    num_helpers++;
  }
}

/* Until all who entered have left; who enters now finds no job. Leavers are counted first: at that
   moment nobody was inside if the numbers agree. */
static void wait_for_helpers(void) {
  for (;;) {
    long left = atomic_load(&num_left);
    if (left == atomic_load(&num_entered)) return;
    sched_yield();
  }
}

static void work_with_helpers(Job *job) {
  want_helpers(job->threads - 1);
  atomic_store(&open_job, job);
  pthread_mutex_lock(&mutex);
  generation++;
  pthread_cond_broadcast(&begun);
  pthread_mutex_unlock(&mutex);
  work(job);
  atomic_store(&open_job, NULL);
  wait_for_helpers();
}

#endif
