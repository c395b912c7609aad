/* Attention of one new token per row over its cached blocks. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include <math.h>
#include <string.h>

#include "model.h"

static void enter(const Run *run, Stage *stage) {
  const Model *m = run->model;
  const Burst *burst = &run->burst;
  int64_t half = m->head_dim / 2;
  FOR_TASKS(b, stage, burst->rows) {
    const float *from = m->embedding + (int64_t)burst->tokens[b] * m->width;
    memcpy(run->x + b * m->width, from, m->width * sizeof(float));
    for (int64_t f = 0; f < half; f++) {
      float angle = (float)burst->positions[b] * m->frequencies[f];
      run->cos[b * half + f] = cosf(angle) * m->attention_factor;
      run->sin[b * half + f] = sinf(angle) * m->attention_factor;
    }
  }
  wait_until(&stage->done, burst->rows);
}

/* A head, normed where the model does so, rotated, and scaled. */
static void turn(const Model *m, const float *head, const float *norm, const float *cos,
                 const float *sin, float scale, float *to) {
  int64_t half = m->head_dim / 2;
  float turned[m->head_dim];
  memcpy(turned, head, sizeof turned);
  if (norm) {
    float squares = 0;
    for (int64_t i = 0; i < m->head_dim; i++) squares += head[i] * head[i];
    float factor = 1.0f / sqrtf(squares / m->head_dim + m->eps);
    for (int64_t i = 0; i < m->head_dim; i++) turned[i] *= factor * norm[i];
  }
  for (int64_t f = 0; f < half; f++) {
    to[f] = (turned[f] * cos[f] - turned[f + half] * sin[f]) * scale;
    to[f + half] = (turned[f + half] * cos[f] + turned[f] * sin[f]) * scale;
  }
}

/* Scores of LANES keys that lie one after the other. A head may be wider than whole vectors. */
INLINE vec scores_of(const float *q, const float *keys, int64_t dim) {
  vec sums[LANES];
  for (int t = 0; t < LANES; t++) sums[t] = all(0.0f);
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) {
    vec part = load(q + i);
#pragma GCC unroll 16
    for (int t = 0; t < LANES; t++) sums[t] += part * load(keys + t * dim + i);
  }
  vec scores = sums_of(sums);
  for (; i < dim; i++)
    for (int t = 0; t < LANES; t++) scores[t] += q[i] * keys[t * dim + i];
  return scores;
}

/* The softmax's weights in place of the scores, and one over their sum. */
static float weigh(float *scores, int64_t count) {
  vec tops = load(scores), totals = all(0.0f);
  for (int64_t t = LANES; t < count; t += LANES) {
    vec now = load(scores + t);
    tops = pick(now > tops, now, tops);
  }
  vec top = all(max_of(tops));
  for (int64_t t = 0; t < count; t += LANES) {
    vec weights = exp_of(load(scores + t) - top);
    store(scores + t, weights);
    totals += weights;
  }
  return 1.0f / sum_of(totals);
}

typedef struct {
  const float *keys, *values;
  const int32_t *table;
  int64_t head, length, padded, block_tokens;
} Seen;

INLINE int64_t slot_of(const Model *m, const Seen *seen, int64_t position) {
  int64_t block = seen->table[position / seen->block_tokens];
  return (block * m->kv_heads + seen->head) * seen->block_tokens + position % seen->block_tokens;
}

/* One query head over all that its row has cached. */
static void attend(const Model *m, const Seen *seen, const float *q, float *scores, float *out) {
  int64_t dim = m->head_dim;
  for (int64_t t = 0; t < seen->padded; t += LANES)
    store(scores + t, scores_of(q, seen->keys + slot_of(m, seen, t) * dim, dim));
  for (int64_t t = seen->length; t < seen->padded; t++) scores[t] = -INFINITY;
  float factor = weigh(scores, seen->padded);
  memset(out, 0, dim * sizeof(float));
  for (int64_t t = 0; t < seen->padded; t += LANES) {
    const float *values = seen->values + slot_of(m, seen, t) * dim;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
      vec sums = load(out + i);
#pragma GCC unroll 16
      for (int n = 0; n < LANES; n++) sums += scores[t + n] * load(values + n * dim + i);
      store(out + i, sums);
    }
    for (; i < dim; i++)
      for (int n = 0; n < LANES; n++) out[i] += scores[t + n] * values[n * dim + i];
  }
  for (int64_t i = 0; i < dim; i++) out[i] *= factor;
}

static void attention(const Run *run, int64_t index, Stage *stage) {
  const Model *m = run->model;
  const Burst *burst = &run->burst;
  const Layer *layer = m->layers + index;
  int64_t dim = m->head_dim, group = m->heads / m->kv_heads, half = dim / 2;
  int64_t row_size = (m->heads + 2 * m->kv_heads) * dim, count = burst->rows * m->kv_heads;
  float q[dim], scores[run->longest];
  FOR_TASKS(task, stage, count) {
    int64_t b = task / m->kv_heads, h = task % m->kv_heads, position = burst->positions[b];
    const float *row = run->qkv + b * row_size, *k = row + (m->heads + h) * dim;
    const float *cos = run->cos + b * half, *sin = run->sin + b * half;
    const int64_t *at = burst->stores + 2 * index;
    float *keys = (float *)at[0], *values = (float *)at[1];
    Seen seen = {keys, values, burst->tables + b * burst->table_width, h, position + 1,
                 (position + LANES) / LANES * LANES, burst->block_tokens};
    int64_t slot = slot_of(m, &seen, position);
    turn(m, k, layer->k_norm, cos, sin, 1.0f, keys + slot * dim);
    memcpy(values + slot * dim, k + m->kv_heads * dim, dim * sizeof(float));
    for (int64_t n = h * group; n < (h + 1) * group; n++) {
      turn(m, row + n * dim, layer->q_norm, cos, sin, 1.0f / sqrtf(dim), q);
      attend(m, &seen, q, scores, run->mixed + (b * m->heads + n) * dim);
    }
  }
  wait_until(&stage->done, count);
}

#endif
