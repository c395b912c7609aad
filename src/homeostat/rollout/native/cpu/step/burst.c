/* Decoding on a CPU, whole: from each row's last token to its next one, for some steps.

       enter -> layers (q k v, attention, o; gate and up, down, or experts) -> logits -> draw -> move

   A step is a row of stages (stages.h); a stage begins when all tasks of the one before are done.
   Many rows of a small model are cut into parts instead, one for each thread, which wait for
   nobody: there, passing rows from core to core takes longer than reading the weights twice.

   Each sum is made by one thread in one order: a row's bits depend on nothing but the row.
   Everything is fp32; sums over the vocabulary are in double. */

#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "drawing.h"
#include "experts.h"
#include "helpers.h"
#include "model.h"
#include "products.h"

/* Floats of a cache line, and weights that a core's caches can hold. */
#define LINE 16
#define SMALL (1 << 23)
/* Stages of a layer, the last four those of adapters, and those of its experts. */
#define STAGES 10
#define EXPERTS 6

INLINE int64_t stages_of_layer(const Model *m) { return m->moe_layers ? STAGES + EXPERTS : STAGES; }

static void layers(const Run *run, int64_t step, Stage *stage) {
  const Model *m = run->model;
  int64_t rows = run->burst.rows, threads = run->burst.threads, attended = m->heads * m->head_dim;
  int64_t heads = attended + 2 * m->kv_heads * m->head_dim, number = 0;
  for (int64_t i = 0; i < m->num_layers; i++, stage += stages_of_layer(m)) {
    const Layer *l = m->layers + i;
    int64_t inner = l->router ? m->shared_inner : m->inner;
    Product qkv = {run->x, l->qkv, l->qkv_bias, run->qkv, m->width, heads, 1, 0, 0, m->eps,
                   {l->qkv_a, l->qkv_b, run->low, m->rank, 3, attended, (heads + attended) / 2}};
    Product o = {run->mixed, l->o, l->o_bias, run->x, attended, m->width, 0, 1, 0, 0,
                 {l->o_a, l->o_b, run->low, m->rank, 1, m->width, m->width}};
    Product gate_up = {run->x, l->gate_up, l->gate_up_bias, run->inner, m->width,
                       inner, 1, 0, 1, m->eps,
                       {l->gate_up_a, l->gate_up_b, run->low, m->rank, 2, inner, inner}};
    Product down = {run->inner, l->down, l->down_bias, run->x, inner, m->width, 0, 1, 0, 0,
                    {l->down_a, l->down_b, run->low, m->rank, 1, m->width, m->width}};
    adapted_product(&qkv, rows, threads, stage + 6, stage);
    attention(run, i, stage + 1);
    adapted_product(&o, rows, threads, stage + 7, stage + 3);
    if (l->router) experts(run, l, number, step, stage + STAGES);
    if (l->gate_up) adapted_product(&gate_up, rows, threads, stage + 8, stage + 4);
    if (l->router) combine(run, number++, step, stage + STAGES + EXPERTS - 1);
    if (l->gate_up) adapted_product(&down, rows, threads, stage + 9, stage + 5);
  }
}

/* One that comes late finds stages done, and goes on to the one that is being worked at. */
static void make_steps(const Run *run) {
  const Model *m = run->model;
  int64_t rows = run->burst.rows;
  Product head = {run->x, m->head, NULL, run->logits, m->width, m->vocabulary, 1, 0, 0, m->eps,
                  {0}};
  for (int64_t step = 0; step < run->burst.steps; step++) {
    Stage *stage = run->stages + step * run->stages_per_step;
    enter(run, stage);
    layers(run, step, stage + 1);
    if (run->burst.hidden) break;
    stage += 1 + stages_of_layer(m) * m->num_layers;
    product(&head, rows, run->burst.threads, stage);
    FOR_TASKS(b, stage + 1, rows) draw_row(run, b, step);
    wait_until(&stage[1].done, rows);
    FOR_TASKS(once, stage + 2, 1) move_on(run, step);
    wait_until(&stage[2].done, 1);
    if (atomic_load(run->is_over)) break;
  }
}

static void work(Job *job) {
  if (job->num_runs == 1) {
    make_steps(job->runs);
    return;
  }
  for (long i; (i = atomic_fetch_add(&job->next, 1)) < job->num_runs;) make_steps(job->runs + i);
}

/* Rows of each run: all, or as many as make a thread's part. */
static int64_t rows_of_run(const Model *m, const Burst *burst) {
  int64_t heads = (2 * m->heads + 2 * m->kv_heads) * m->head_dim;
  int64_t dense = m->num_layers - m->moe_layers;
  int64_t inner = dense * m->inner + m->moe_layers * (m->experts * m->expert_inner + m->shared_inner);
  int64_t weights = m->width * (m->num_layers * heads + 3 * inner + m->vocabulary);
  int64_t part = (burst->rows + burst->threads - 1) / burst->threads;
  int is_cut = weights <= SMALL && part >= ROWS && !burst->hidden;
  return is_cut ? (part + ROWS - 1) / ROWS * ROWS : burst->rows;
}

/* The part of a burst that begins with a row. */
static Burst part_of(const Model *m, const Burst *burst, int64_t first, int64_t rows) {
  Burst part = *burst;
  part.rows = rows < burst->rows - first ? rows : burst->rows - first;
  part.threads = rows < burst->rows ? 1 : burst->threads;
  part.tokens += first, part.positions += first, part.made += first;
  part.sequences += first;
  part.greedy += first, part.scale += first, part.noise += first;
  part.drawn += first, part.logps += first;
  if (part.routes) part.routes += first * m->moe_layers * m->top_k;
  if (part.route_weights) part.route_weights += first * m->moe_layers * m->top_k;
  if (part.top_k) {
    part.is_cut += first, part.top_k += first, part.top_p += first, part.min_p += first;
    part.sampled_logps += first, part.sizes += first, part.kept += first * part.width;
  }
  return part;
}

/* Memory for a run; whether there was any. */
static int prepare(Run *run) {
  const Model *m = run->model;
  int64_t rows = run->burst.rows, dim = m->head_dim, attended = m->heads * dim;
  int64_t is_prompt = run->burst.hidden != NULL, pairs = rows * m->top_k;
  int64_t inner = m->inner > m->shared_inner ? m->inner : m->shared_inner;
  if (m->top_k * m->expert_inner > inner) inner = m->top_k * m->expert_inner;
  int64_t sizes[] = {is_prompt ? 0 : rows * m->width, rows * (attended + 2 * m->kv_heads * dim),
                     rows * attended, rows * inner, is_prompt ? 0 : rows * m->vocabulary,
                     rows * dim / 2,  rows * dim / 2,
                     rows * m->experts, pairs, pairs * m->width,
                     pairs * m->moe_layers * run->burst.steps, rows * 3 * m->rank};
  float *ids, **parts[] = {&run->x,      &run->qkv,    &run->mixed,   &run->inner,
                           &run->logits, &run->cos,    &run->sin,
                           &run->scores, &run->weights, &run->spread, &ids, &run->low};
  int count = sizeof sizes / sizeof *sizes;
  int64_t total = 0, longest = 0;
  run->stages_per_step = 4 + stages_of_layer(m) * m->num_layers;
  for (int i = 0; i < count; i++) total += sizes[i] = (sizes[i] + LINE - 1) / LINE * LINE;
  for (int64_t b = 0; b < rows; b++)
    longest = run->burst.positions[b] > longest ? run->burst.positions[b] : longest;
  run->longest = longest + run->burst.steps + LANES;
  run->room = aligned_alloc(64, total * sizeof(float));
  run->stages = aligned_alloc(64, run->burst.steps * run->stages_per_step * sizeof(Stage));
  if (!run->room || !run->stages) return 0;
  memset(run->stages, 0, run->burst.steps * run->stages_per_step * sizeof(Stage));
  for (int64_t i = 0, at = 0; i < count; at += sizes[i++]) *parts[i] = run->room + at;
  run->ids = (int32_t *)ids;
  if (is_prompt) run->x = run->burst.hidden;
  return 1;
}

int64_t panel_width(void) { return PANEL; }

/* Steps until a row ends, or as many as are asked for; -1 where there is no memory for them. */
int64_t run_burst(const Model *model, const Burst *burst) {
  int64_t rows = rows_of_run(model, burst), count = (burst->rows + rows - 1) / rows, is_ready = 1;
  Run runs[count];
  Job job = {runs, count, burst->threads, 0, 0, 0};
  memset(runs, 0, sizeof runs);
  for (int64_t i = 0; i < count; i++) {
    runs[i].model = model;
    runs[i].burst = part_of(model, burst, i * rows, rows);
    runs[i].is_over = &job.is_over;
    runs[i].is_out_of_memory = &job.is_out_of_memory;
    is_ready &= prepare(runs + i);
  }
  if (is_ready) {
    pthread_mutex_lock(&one_at_a_time);
    if (burst->threads > 1) work_with_helpers(&job);
    else work(&job);
    pthread_mutex_unlock(&one_at_a_time);
  }
  for (int64_t i = 0; i < count; i++) free(runs[i].room), free(runs[i].stages);
  return is_ready && !atomic_load(&job.is_out_of_memory) ? 0 : -1;
}
