/* What a burst is given, and what its threads share. */

#ifndef MODEL_H
#define MODEL_H

#include <stdatomic.h>
#include <stdint.h>

#include "stages.h"

typedef struct {
  const float *qkv, *qkv_bias, *o, *o_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  const float *q_norm, *k_norm;
} Layer;

typedef struct {
  int64_t num_layers, width, heads, kv_heads, head_dim, inner, vocabulary;
  float eps, attention_factor;
  const float *embedding, *head, *frequencies;
  const Layer *layers;
} Model;

/* `tokens`: the last token of each row, which is not cached; `drawn` and `logps` are [steps, rows].
   A burst ends with the step in which a row draws one of `stops`. */
typedef struct {
  int64_t rows, steps, table_width, block_tokens, num_stops, threads;
  int32_t *tokens, *positions;
  const int32_t *tables, *greedy, *stops;
  const int64_t *stores;
  const float *scale;
  const double *noise;
  int32_t *drawn;
  float *logps;
} Burst;

typedef struct {
  const Model *model;
  const Burst *burst;
  Stage *stages;
  int64_t stages_per_step, longest;
  atomic_long made;
  atomic_int is_over;
  float *x, *qkv, *mixed, *inner, *logits, *cos, *sin;
} Run;

#endif
