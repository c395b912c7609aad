/* The next token of each row, by its own noise. */

#ifndef DRAWING_H
#define DRAWING_H

#include <math.h>

#include "model.h"

/* Words of the vocabulary that are summed up at a time. */
#define WORDS 1024

INLINE vec words(const float *logits, int64_t at, int64_t vocabulary) {
  if (at + LANES <= vocabulary) return load(logits + at);
  vec z = all(-INFINITY);
  for (int64_t i = at; i < vocabulary; i++) z[i - at] = logits[i];
  return z;
}

/* What is not a number compares with nothing; it comes out in the sum. */
static float largest(const float *logits, int64_t vocabulary) {
  vec tops = all(-INFINITY);
  for (int64_t v = 0; v < vocabulary; v += LANES) {
    vec z = words(logits, v, vocabulary);
    tops = pick(z > tops, z, tops);
  }
  return max_of(tops);
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
