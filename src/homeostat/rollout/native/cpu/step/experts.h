/* Blocks of experts: scores, the choice of each row, and the products of the experts that are hit.

       router -> choose -> spread -> gate and up -> down -> combine

   The shared expert, where there is one, reads the same inputs: its gate and up come before the
   last stage, which adds to them.

   Rows of an expert are laid side by side first, one for each (row, slot) pair, so that its panels
   are read once for all of them. A row's result depends on nothing but the row: the definition of
   its choice is that of ops/routing.py, and its slots are added up in their order. */

#ifndef EXPERTS_H
#define EXPERTS_H

#include <math.h>
#include <string.h>

#include "model.h"
#include "products.h"

/* Softmax or sigmoid of a row's logits, in place. */
static void score(const Model *m, float *scores) {
  float top = -INFINITY, total = 0;
  if (m->is_sigmoid) top = 0;
  else for (int64_t e = 0; e < m->experts; e++) top = scores[e] > top ? scores[e] : top;
  for (int64_t e = 0; e < m->experts; e += LANES) {
    int64_t count = m->experts - e < LANES ? m->experts - e : LANES;
    vec z = all(0.0f);
    memcpy(&z, scores + e, count * sizeof(float));
    z = m->is_sigmoid ? 1.0f / (1.0f + exp_of(-z)) : exp_of(z - top);
    memcpy(scores + e, &z, count * sizeof(float));
  }
  if (m->is_sigmoid) return;
  for (int64_t e = 0; e < m->experts; e++) total += scores[e];
  for (int64_t e = 0; e < m->experts; e++) scores[e] /= total;
}

/* The largest of some values, the first of equal ones; it is ruled out for the next call. */
static int64_t take_best(float *values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++) best = values[i] > values[best] ? i : best;
  values[best] = -INFINITY;
  return best;
}

/* Only experts of the best groups can be chosen. A group's score: that of its two best experts. */
static void rule_out_groups(const Model *m, float *wanted) {
  int64_t size = m->experts / m->groups;
  float sums[m->groups], left[size];
  int is_kept[m->groups];
  for (int64_t g = 0; g < m->groups; g++) {
    is_kept[g] = 0, sums[g] = 0;
    memcpy(left, wanted + g * size, sizeof left);
    for (int64_t n = 0; n < 2 && n < size; n++) {
      float best = -INFINITY;
      for (int64_t i = 0; i < size; i++) best = left[i] > best ? left[i] : best;
      sums[g] += best;
      take_best(left, size);
    }
  }
  for (int64_t n = 0; n < m->groups_kept; n++) is_kept[take_best(sums, m->groups)] = 1;
  for (int64_t e = 0; e < m->experts; e++)
    if (!is_kept[e / size]) wanted[e] = -INFINITY;
}

/* The experts of a row, best first, and the weights of what they give. */
static void choose(const Model *m, const float *scores, const float *bias, int32_t *ids,
                   float *weights) {
  float wanted[m->experts], total = 0;
  for (int64_t e = 0; e < m->experts; e++) wanted[e] = bias ? scores[e] + bias[e] : scores[e];
  if (m->groups > 1) rule_out_groups(m, wanted);
  for (int64_t k = 0; k < m->top_k; k++) {
    ids[k] = (int32_t)take_best(wanted, m->experts);
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  /* A sum of sigmoids can be 0, one of softmax values cannot. */
  if (m->is_sigmoid) total += 1e-20f;
  for (int64_t k = 0; k < m->top_k; k++)
    weights[k] = (m->is_normalised ? weights[k] / total : weights[k]) * m->scaling;
}

/* The experts of all rows in a layer of a step. Each has its own: a thread that lags behind reads
   them while the others have chosen those of later layers, and must count the same tasks. */
static int32_t *ids_of(const Run *run, int64_t number, int64_t step) {
  const Model *m = run->model;
  return run->ids + (step * m->moe_layers + number) * run->burst.rows * m->top_k;
}

/* Sorts (row, slot) pairs by expert: those of expert e have places first[e] to first[e + 1] - 1.
   Each thread does so for itself: that costs less than waiting for it. */
static void sort_pairs(const Run *run, const int32_t *ids, int32_t *first, int32_t *places) {
  int64_t experts = run->model->experts, pairs = run->burst.rows * run->model->top_k;
  int32_t next[experts];
  memset(first, 0, (experts + 1) * sizeof *first);
  for (int64_t i = 0; i < pairs; i++) first[ids[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
  memcpy(next, first, sizeof next);
  for (int64_t i = 0; i < pairs; i++) places[i] = next[ids[i]]++;
}

/* A row, normed, in the place of each of its slots. */
static void spread_row(const Run *run, int64_t b, const int32_t *places) {
  const Model *m = run->model;
  const float *x = run->x + b * m->width;
  Product row = {.x = x, .inputs = m->width, .eps = m->eps};
  float factor;
  norm_factors(&row, 1, &factor);
  for (int64_t k = 0; k < m->top_k; k++) {
    float *to = run->spread + places[b * m->top_k + k] * m->width;
    for (int64_t i = 0; i < m->width; i++) to[i] = x[i] * factor;
  }
}

/* One product per expert that is hit. `like`: that of the first expert, whose rows come first. */
static void products_of_experts(const Run *run, const Product *like, const int32_t *first,
                                Stage *stage) {
  int64_t experts = run->model->experts, threads = run->burst.threads, num_hit = 0, hit[experts];
  int64_t width = like->is_gated ? LANES : PANEL, panels = (like->outputs + width - 1) / width;
  for (int64_t e = 0; e < experts; e++)
    if (first[e + 1] > first[e]) hit[num_hit++] = e;
  int64_t rows_of_each = first[experts] / num_hit;
  int64_t each = panels_of_task(num_hit * panels, rows_of_each, like->inputs, threads);
  if (each > panels) each = panels;
  int64_t tasks = (panels + each - 1) / each, count = num_hit * tasks;
  FOR_TASKS(task, stage, count) {
    int64_t e = hit[task / tasks], start = task % tasks * each;
    int64_t end = start + each < panels ? start + each : panels, rows = first[e + 1] - first[e];
    Product p = *like;
    p.x += first[e] * p.inputs, p.out += first[e] * p.outputs;
    p.panels += e * panels * p.inputs * PANEL;
    for (int64_t panel = start; panel < end; panel++)
      product_of_panel(&p, panel, panel + 1 < panels ? panel + 1 : panel, rows, NULL);
  }
  wait_until(&stage->done, count);
}

/* Adds to a row what its experts give, slot by slot. */
static void combine_row(const Run *run, int64_t b, const int32_t *places) {
  const Model *m = run->model;
  const float *weights = run->weights + b * m->top_k;
  float *x = run->x + b * m->width, total[m->width];
  memset(total, 0, sizeof total);
  for (int64_t k = 0; k < m->top_k; k++) {
    const float *out = run->spread + places[b * m->top_k + k] * m->width;
    for (int64_t i = 0; i < m->width; i++) total[i] += out[i] * weights[k];
  }
  for (int64_t i = 0; i < m->width; i++) x[i] += total[i];
}

static void combine(const Run *run, int64_t number, int64_t step, Stage *stage) {
  int64_t rows = run->burst.rows;
  int32_t first[run->model->experts + 1], places[rows * run->model->top_k];
  sort_pairs(run, ids_of(run, number, step), first, places);
  FOR_TASKS(b, stage, rows) combine_row(run, b, places);
  wait_until(&stage->done, rows);
}

/* Writes the experts of a row, and their weights, where the burst asks for them. */
static void note_routes(const Run *run, int64_t b, int64_t number, int64_t step) {
  const Burst *burst = &run->burst;
  int64_t top_k = run->model->top_k;
  int64_t at = ((step * burst->stride + b) * run->model->moe_layers + number) * top_k;
  const int32_t *ids = ids_of(run, number, step) + b * top_k;
  const float *weights = run->weights + b * top_k;
  if (burst->routes) memcpy(burst->routes + at, ids, top_k * sizeof *ids);
  if (burst->route_weights) memcpy(burst->route_weights + at, weights, top_k * sizeof *weights);
}

/* All but the last stage. `number`: of the layer among those with experts. */
static void experts(const Run *run, const Layer *l, int64_t number, int64_t step, Stage *stage) {
  const Model *m = run->model;
  const Burst *burst = &run->burst;
  int64_t rows = burst->rows, top_k = m->top_k;
  int32_t first[m->experts + 1], places[rows * top_k], *ids = ids_of(run, number, step);
  Product router = {run->x, l->router, NULL, run->scores, m->width, m->experts, 1, 0, 0, m->eps};
  Product gate_up = {run->spread, l->experts_gate_up, NULL, run->inner, m->width,
                     m->expert_inner, 0, 0, 1, 0};
  Product down = {run->inner, l->experts_down, NULL, run->spread, m->expert_inner,
                  m->width, 0, 0, 0, 0};
  product(&router, rows, burst->threads, stage);
  FOR_TASKS(b, stage + 1, rows) {
    float *scores = run->scores + b * m->experts;
    score(m, scores);
    choose(m, scores, l->router_bias, ids + b * top_k, run->weights + b * top_k);
    note_routes(run, b, number, step);
  }
  wait_until(&stage[1].done, rows);
  sort_pairs(run, ids, first, places);
  FOR_TASKS(b, stage + 2, rows) spread_row(run, b, places);
  wait_until(&stage[2].done, rows);
  products_of_experts(run, &gate_up, first, stage + 3);
  products_of_experts(run, &down, first, stage + 4);
}

#endif
