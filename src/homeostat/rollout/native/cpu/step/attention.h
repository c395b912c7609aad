/* Attention of rows over the cached blocks of their sequences: of one new token each, or of a
   prompt's tokens. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include <math.h>
#include <string.h>

#include "model.h"

/* Rows of a prompt that a task serves: they share what comes before them. */
#define TOGETHER 4
/* Scores that a task keeps at a time, on the stack, or those of one row where they are more. */
#define SCORES (1 << 14)

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

/* The softmax's weights in place of the scores. */
static void weigh(float *scores, int64_t count) {
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
  vec factor = all(1.0f / sum_of(totals));
  for (int64_t t = 0; t < count; t += LANES) store(scores + t, load(scores + t) * factor);
}

/* Queries that look back on the same cached keys, each with `length` of them. */
typedef struct {
  const float *q;
  float *scores, *out;
  int64_t length;
} Query;

/* One key head of a sequence. */
typedef struct {
  const Model *model;
  float *keys, *values;
  const int32_t *table;
  int64_t head, block_tokens;
} Cached;

INLINE int64_t at_slot(const Cached *c, int64_t position) {
  int64_t block = c->table[position / c->block_tokens], kv_heads = c->model->kv_heads;
  int64_t slot = (block * kv_heads + c->head) * c->block_tokens + position % c->block_tokens;
  return slot * c->model->head_dim;
}

static Cached cached_of(const Run *run, int64_t index, int64_t b, int64_t head) {
  const Burst *burst = &run->burst;
  const int64_t *at = burst->stores + 2 * index;
  const int32_t *table = burst->tables + burst->sequences[b] * burst->table_width;
  return (Cached){run->model, (float *)at[0], (float *)at[1], table, head, burst->block_tokens};
}

INLINE void add_values(float *out, const float *weights, const float *values, int64_t dim) {
  int64_t i = 0;
  for (; i + 4 * LANES <= dim; i += 4 * LANES) {
    vec sums[4];
    for (int j = 0; j < 4; j++) sums[j] = load(out + i + j * LANES);
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++)
      for (int j = 0; j < 4; j++) sums[j] += weights[n] * load(values + n * dim + i + j * LANES);
    for (int j = 0; j < 4; j++) store(out + i + j * LANES, sums[j]);
  }
  for (; i + LANES <= dim; i += LANES) {
    vec sums = load(out + i);
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) sums += weights[n] * load(values + n * dim + i);
    store(out + i, sums);
  }
  for (; i < dim; i++)
    for (int n = 0; n < LANES; n++) out[i] += weights[n] * values[n * dim + i];
}

/* LANES keys or values, of which each is as long as a head. */
INLINE void ask_for(const float *from, int64_t dim) {
  for (int64_t i = 0; i < LANES * dim; i += 16) __builtin_prefetch(from + i);
}

/* A block of keys serves all queries while it is at hand, and the next one is on its way. */
static void attend(const Cached *c, Query *queries, int64_t count) {
  int64_t dim = c->model->head_dim, padded = 0;
  for (Query *q = queries; q < queries + count; q++)
    padded = q->length > padded ? q->length : padded;
  padded = (padded + LANES - 1) / LANES * LANES;
  for (int64_t t = 0; t < padded; t += LANES) {
    const float *keys = c->keys + at_slot(c, t);
    ask_for(t + LANES < padded ? c->keys + at_slot(c, t + LANES) : c->values + at_slot(c, 0), dim);
    for (Query *q = queries; q < queries + count; q++)
      store(q->scores + t, scores_of(q->q, keys, dim));
  }
  for (Query *q = queries; q < queries + count; q++) {
    for (int64_t t = q->length; t < padded; t++) q->scores[t] = -INFINITY;
    weigh(q->scores, padded);
    memset(q->out, 0, dim * sizeof(float));
  }
  for (int64_t t = 0; t < padded; t += LANES) {
    const float *values = c->values + at_slot(c, t);
    if (t + LANES < padded) ask_for(c->values + at_slot(c, t + LANES), dim);
    for (Query *q = queries; q < queries + count; q++)
      add_values(q->out, q->scores + t, values, dim);
  }
}

/* Rotates one key head of a row and its queries, these in place, and writes key and value to the
   cache. */
static void remember(const Run *run, int64_t index, int64_t b, int64_t head) {
  const Model *m = run->model;
  const Layer *layer = m->layers + index;
  int64_t dim = m->head_dim, group = m->heads / m->kv_heads, half = dim / 2;
  float *row = run->qkv + b * (m->heads + 2 * m->kv_heads) * dim;
  float *k = row + (m->heads + head) * dim;
  const float *cos = run->cos + b * half, *sin = run->sin + b * half;
  Cached c = cached_of(run, index, b, head);
  int64_t at = at_slot(&c, run->burst.positions[b]);
  turn(m, k, layer->k_norm, cos, sin, 1.0f, c.keys + at);
  memcpy(c.values + at, k + m->kv_heads * dim, dim * sizeof(float));
  for (float *q = row + head * group * dim; q < row + (head + 1) * group * dim; q += dim)
    turn(m, q, layer->q_norm, cos, sin, 1.0f / sqrtf(dim), q);
}

/* All queries of some rows of one sequence at a key head, as many at a time as there is room for
   their scores. */
static void look_back(const Run *run, int64_t index, int64_t first, int64_t last, int64_t head,
                      float *scores, int64_t room) {
  const Model *m = run->model;
  int64_t dim = m->head_dim, group = m->heads / m->kv_heads, count = 0;
  int64_t most = room / run->longest, row_size = (m->heads + 2 * m->kv_heads) * dim;
  Cached c = cached_of(run, index, first, head);
  Query queries[TOGETHER * group];
  for (int64_t b = first; b < last; b++) {
    for (int64_t n = head * group; n < (head + 1) * group; n++, count++) {
      float *out = run->mixed + (b * m->heads + n) * dim;
      float *own = scores + count % most * run->longest;
      const float *q = run->qkv + b * row_size + n * dim;
      queries[count] = (Query){q, own, out, run->burst.positions[b] + 1};
    }
  }
  for (int64_t n = 0; n < count; n += most)
    attend(&c, queries + n, count - n < most ? count - n : most);
}

/* Of a row that follows none of its own sequence, what is looked for is cached by the same task;
   rows of a prompt wait until all of them are. */
static void attention(const Run *run, int64_t index, Stage *stage) {
  const Model *m = run->model;
  const Burst *burst = &run->burst;
  int64_t is_prompt = burst->hidden != NULL, each = is_prompt ? TOGETHER : 1;
  int64_t count = (burst->rows + each - 1) / each * m->kv_heads;
  int64_t room = run->longest > SCORES ? run->longest : SCORES;
  float scores[room];
  if (is_prompt) {
    FOR_TASKS(b, stage, burst->rows)
      for (int64_t head = 0; head < m->kv_heads; head++) remember(run, index, b, head);
    wait_until(&stage->done, burst->rows);
  }
  FOR_TASKS(task, stage + 1, count) {
    int64_t head = task % m->kv_heads, first = task / m->kv_heads * each;
    int64_t end = first + each < burst->rows ? first + each : burst->rows;
    if (!is_prompt) remember(run, index, first, head);
    for (int64_t last; first < end; first = last) {
      last = first + 1;
      while (last < end && burst->sequences[last] == burst->sequences[first]) last++;
      look_back(run, index, first, last, head, scores, room);
    }
  }
  wait_until(&stage[1].done, count);
}

#endif
