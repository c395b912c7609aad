/* The next token of each row, by its own noise. */

#ifndef DRAWING_H
#define DRAWING_H

#include <math.h>

#include "cutting.h"
#include "model.h"

/* Words of the vocabulary that are summed up at a time. */
#define WORDS 1024

/* What is not a number compares with nothing; it comes out in the sum. */
static float largest(const float *logits, int64_t vocabulary) {
  vec tops = all(-INFINITY);
  for (int64_t v = 0; v < vocabulary; v += LANES) {
    vec z = words(logits, v, vocabulary);
    tops = pick(z > tops, z, tops);
  }
  return max_of(tops);
}

/* The same among the words that a cut leaves: they, their number and the log-prob over them are
   noted, too. */
static int32_t draw_kept(const Run *run, int64_t b, int64_t step, float top, double total) {
  const Burst *burst = &run->burst;
  int64_t vocabulary = run->model->vocabulary, at = step * burst->stride + b, width = burst->width;
  Words kept;
  if (!cut_row(burst, b, run->logits + b * vocabulary, vocabulary, top, total, &kept)) {
    atomic_store(run->is_out_of_memory, 1);
    return 0;
  }
  double sum = 0, before = 0;
  for (int64_t i = 0; i < kept.count; i++) sum += kept.weights[i];
  double wanted = burst->noise[at] * sum;
  int64_t token = 0;
  for (int64_t i = 0; i < kept.count && before <= wanted; i++) {
    before += kept.weights[i];
    if (kept.weights[i] > 0) token = i;
  }
  /* Only where nothing is a number is nothing kept; the engine refuses the log-prob. */
  int32_t id = kept.count ? kept.ids[token] : 0;
  float z = kept.count ? (kept.z[token] - top) * burst->scale[b] : NAN;
  burst->sampled_logps[at] = (float)((double)z - log(sum));
  burst->sizes[at] = kept.count < vocabulary ? (int32_t)kept.count : 0;
  memcpy(burst->kept + at * width, kept.ids,
         (kept.count < width ? kept.count : width) * sizeof(int32_t));
  free(kept.z);
  return id;
}

/* The first word whose share of the sum of weights is above the noise: the definition is that of
   native/sampler.py. Weights are exp(logits * scale - top). */
static void draw_row(const Run *run, int64_t b, int64_t step) {
  const Burst *burst = &run->burst;
  int64_t vocabulary = run->model->vocabulary, count = (vocabulary + WORDS - 1) / WORDS;
  const float *logits = run->logits + b * vocabulary;
  float scale = burst->scale[b], top = largest(logits, vocabulary);
  double sums[count], total = 0;
  for (int64_t c = 0; c < count; c++) {
    int64_t end = (c + 1) * WORDS < vocabulary ? (c + 1) * WORDS : vocabulary;
    dvec found = {0};
    for (int64_t v = c * WORDS; v < end; v += LANES) {
      vec weights = exp_of((words(logits, v, vocabulary) - top) * scale);
      found += __builtin_convertvector(weights, dvec);
    }
    sums[c] = 0;
    for (int i = 0; i < LANES; i++) sums[c] += found[i];
    total += sums[c];
  }
  int64_t token = 0;
  if (burst->greedy[b]) {
    while (token < vocabulary - 1 && logits[token] != top) token++;
  } else if (burst->top_k && burst->is_cut[b]) {
    token = draw_kept(run, b, step, top, total);
  } else {
    double wanted = burst->noise[step * burst->stride + b] * total, before = 0;
    int64_t c = 0;
    while (c < count - 1 && before + sums[c] <= wanted) before += sums[c++];
    int64_t end = (c + 1) * WORDS < vocabulary ? (c + 1) * WORDS : vocabulary;
    token = c * WORDS;
    for (int64_t v = token; v < end && before <= wanted; v++) {
      float weight = exp_of(all((logits[v] - top) * scale))[0];
      before += weight;
      if (weight > 0) token = v;
    }
  }
  int64_t at = step * burst->stride + b;
  burst->drawn[at] = (int32_t)token;
  burst->logps[at] = (float)((double)((logits[token] - top) * scale) - log(total));
  if (burst->top_k && !burst->is_cut[b]) {
    burst->sampled_logps[at] = burst->logps[at];
    burst->sizes[at] = 0;
  }
}

/* The drawn tokens are the next inputs. Nothing more is computed for a row that has ended. */
static void move_on(const Run *run, int64_t step) {
  const Burst *burst = &run->burst;
  int is_over = 0;
  for (int64_t b = 0; b < burst->rows; b++) {
    int32_t token = burst->drawn[step * burst->stride + b];
    burst->tokens[b] = token;
    burst->positions[b]++;
    burst->made[b]++;
    for (int64_t i = 0; i < burst->num_stops; i++) is_over |= token == burst->stops[i];
  }
  if (is_over) atomic_store(run->is_over, 1);
}

#endif
