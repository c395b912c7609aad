/* What a burst is given, and what its threads share. */

#ifndef MODEL_H
#define MODEL_H

#include <stdatomic.h>
#include <stdint.h>

#include "stages.h"

typedef struct {
  const float *qkv, *qkv_bias, *o, *o_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  const float *q_norm, *k_norm;
  const float *router, *router_bias, *experts_gate_up, *experts_down;
  const float *qkv_a, *qkv_b, *o_a, *o_b, *gate_up_a, *gate_up_b, *down_a, *down_b;
} Layer;

/* Of a layer with a router, `gate_up` and `down` are the shared expert's, or NULL. `moe_layers`:
   how many have one. `rank`: of the adapters (products.h); where a product has none, its a and b
   are NULL. */
typedef struct {
  int64_t num_layers, width, heads, kv_heads, head_dim, inner, vocabulary;
  int64_t moe_layers, experts, top_k, expert_inner, shared_inner, groups, groups_kept;
  int64_t is_sigmoid, is_normalised, rank;
  float eps, attention_factor, scaling;
  const float *embedding, *head, *frequencies;
  const Layer *layers;
} Model;

/* `tokens`: the last token of each row, which is not cached; `noise`, `drawn` and `logps` are
   [steps, stride], of which `made` steps of each row are filled in the end. A burst ends with the
   step in which a row draws one of `stops`. `sequences`: the row of `tables` that is each one's.

   With `hidden` rows are tokens of prompts, those of a sequence one after the other: one step,
   which leaves their hidden states there, and nothing is drawn.

   `routes` [steps, stride, moe_layers, top_k]: the experts of the tokens that were run, or NULL;
   `route_weights`: the weights of their outputs, or NULL.

   Where a row is cut (cutting.h), `is_cut`, `top_k`, `top_p` and `min_p` say how each is, and
   `sampled_logps` and `sizes` [steps, stride] and `kept` [steps, stride, width] are filled with the
   log-prob over what was kept, its number of ids (0: all), and the first of these. Else NULL. */
typedef struct {
  int64_t rows, stride, steps, table_width, block_tokens, num_stops, threads, width;
  int32_t *tokens, *positions;
  const int32_t *sequences, *tables, *greedy, *stops;
  const int64_t *stores;
  const float *scale;
  const double *noise;
  int32_t *drawn;
  float *logps;
  int32_t *made;
  float *hidden;
  int32_t *routes;
  float *route_weights;
  const int32_t *is_cut, *top_k;
  const double *top_p, *min_p;
  float *sampled_logps;
  int32_t *sizes, *kept;
} Burst;

/* Rows that are computed together: by all threads, stage by stage, or by one. */
typedef struct {
  const Model *model;
  Burst burst;
  Stage *stages;
  int64_t stages_per_step, longest;
  atomic_int *is_over, *is_out_of_memory;
  float *room, *x, *qkv, *mixed, *inner, *logits, *cos, *sin, *low;
  /* Per row: scores of the experts, and of those chosen ids, weights, inputs and outputs. */
  float *scores, *weights, *spread;
  int32_t *ids;
} Run;

/* All runs of a burst. */
typedef struct {
  Run *runs;
  int64_t num_runs, threads;
  atomic_long next;
  atomic_int is_over, is_out_of_memory;
} Job;

#endif
