/* Decoding on a CPU, whole: from each row's last token to its next one, for some steps.

       enter -> layers (q k v, attention, o; gate and up, down) -> logits -> draw -> move

   A step is a row of stages (stages.h); a stage begins when all tasks of the one before are done.
   Each sum is made by one thread in one order: a row's bits depend on nothing but the row.
   Everything is fp32; sums over the vocabulary are in double. */

#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "drawing.h"
#include "helpers.h"
#include "model.h"
#include "products.h"

static void layers(const Run *run, Stage *stage) {
  const Model *m = run->model;
  int64_t rows = run->burst->rows, threads = run->burst->threads, attended = m->heads * m->head_dim;
  int64_t heads = attended + 2 * m->kv_heads * m->head_dim;
  for (int64_t i = 0; i < m->num_layers; i++, stage += 5) {
    const Layer *l = m->layers + i;
    Product qkv = {run->x, l->qkv, l->qkv_bias, run->qkv, m->width, heads, 1, 0, 0, m->eps};
    Product o = {run->mixed, l->o, l->o_bias, run->x, attended, m->width, 0, 1, 0, 0};
    Product gate_up = {run->x, l->gate_up, l->gate_up_bias, run->inner, m->width,
                       m->inner, 1, 0, 1, m->eps};
    Product down = {run->inner, l->down, l->down_bias, run->x, m->inner, m->width, 0, 1, 0, 0};
    product(&qkv, rows, threads, stage);
    attention(run, i, stage + 1);
    product(&o, rows, threads, stage + 2);
    product(&gate_up, rows, threads, stage + 3);
    product(&down, rows, threads, stage + 4);
  }
}

/* What every thread does. One that comes late finds stages done, and goes on to the one that is
   being worked at. */
static void work(Run *run) {
  const Model *m = run->model;
  int64_t rows = run->burst->rows;
  Product head = {run->x, m->head, NULL, run->logits, m->width, m->vocabulary, 1, 0, 0, m->eps};
  for (int64_t step = 0; !atomic_load(&run->is_over); step++) {
    Stage *stage = run->stages + step * run->stages_per_step;
    enter(run, stage);
    layers(run, stage + 1);
    stage += 1 + 5 * m->num_layers;
    product(&head, rows, run->burst->threads, stage);
    FOR_TASKS(b, stage + 1, rows) draw_row(run, b, step);
    wait_until(&stage[1].done, rows);
    FOR_TASKS(once, stage + 2, 1) move_on(run, step);
    wait_until(&stage[2].done, 1);
  }
}

int64_t panel_width(void) { return PANEL; }

/* Steps until a row ends, or as many as are asked for: how many were made; -1 where there is no
   memory for them. */
int64_t run_burst(const Model *model, const Burst *burst) {
  int64_t rows = burst->rows, dim = model->head_dim, attended = model->heads * dim;
  int64_t sizes[] = {rows * model->width, rows * (attended + 2 * model->kv_heads * dim),
                     rows * attended,     rows * model->inner, rows * model->vocabulary,
                     rows * dim / 2,      rows * dim / 2};
  int64_t total = 0, per_step = 4 + 5 * model->num_layers, longest = 0;
  for (int i = 0; i < 7; i++) total += sizes[i] = (sizes[i] + LANES - 1) / LANES * LANES;
  for (int64_t b = 0; b < rows; b++)
    longest = burst->positions[b] > longest ? burst->positions[b] : longest;
  Run run = {model, burst, NULL, per_step, longest + burst->steps + LANES, 0, 0};
  float *room = aligned_alloc(64, total * sizeof(float));
  run.stages = aligned_alloc(64, burst->steps * per_step * sizeof(Stage));
  if (room && run.stages) {
    memset(run.stages, 0, burst->steps * per_step * sizeof(Stage));
    float **parts[] = {&run.x, &run.qkv, &run.mixed, &run.inner, &run.logits, &run.cos, &run.sin};
    for (int64_t i = 0, at = 0; i < 7; at += sizes[i++]) *parts[i] = room + at;
    pthread_mutex_lock(&one_at_a_time);
    if (burst->threads > 1) run_with_helpers(&run);
    else work(&run);
    pthread_mutex_unlock(&one_at_a_time);
  }
  int64_t made = room && run.stages ? atomic_load(&run.made) : -1;
  free(room);
  free(run.stages);
  return made;
}
