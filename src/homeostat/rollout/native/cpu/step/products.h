/* Linear maps of some rows, with what comes before and after them.

   Weights come in panels: PANEL outputs side by side for each input, so that a product reads them
   once, in the order in which they lie in memory, whatever the number of rows. A norm's weight is
   multiplied in beforehand; what is left of the norm is one factor per row. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include <math.h>

#include "stages.h"

#define PANEL (2 * LANES)
/* Rows at a time: as many as registers hold. A row has two vectors of sums; two of weights and one
   of inputs come on top. AVX-512 and NEON have 32 registers, of which 8 rows take 19: enough sums
   in flight to hide the latency of a multiply-add, and the rest is for the compiler. AVX2 and SSE
   have 16, of which 6 rows take 15. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8
#else
#define ROWS 6
#endif
/* How far ahead of use weights are asked for, in floats: a product of few rows waits for memory. */
#define AHEAD 1024
/* What a task reads of the weights, in floats, where that leaves enough tasks: long stretches are
   read faster than short ones. */
#define STRETCH (1 << 16)

/* `count` rows of x, all of whose inputs are multiplied by one panel. Meanwhile `asked` lines that
   begin at `ask` are asked for with each input, `step` floats further each time. */
INLINE void multiply(int count, const float *x, int64_t stride, const float *panel, int64_t inputs,
                     const float *ask, int64_t step, int asked, vec found[ROWS][2]) {
  vec sums[ROWS][2];
  for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = all(0.0f);
  for (int64_t k = 0; k < inputs; k++) {
    for (int n = 0; n < asked; n++) __builtin_prefetch(ask + k * step + n * LANES);
    vec left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
      vec input = all(x[r * stride + k]);
      sums[r][0] += input * left;
      sums[r][1] += input * right;
    }
  }
  for (int r = 0; r < count; r++) found[r][0] = sums[r][0], found[r][1] = sums[r][1];
}

/* A constant number of rows keeps all sums in registers. */
static int multiply_rows(int64_t left, const float *x, int64_t stride, const float *panel,
                         int64_t inputs, vec sums[ROWS][2]) {
#define MULTIPLY(count) \
  multiply(count, x, stride, panel, inputs, panel + AHEAD, PANEL, 2, sums); \
  return count
  if (left >= ROWS) {
    MULTIPLY(ROWS);
  }
  switch (left) {
#if ROWS == 8
    case 7: MULTIPLY(7);
    case 6: MULTIPLY(6);
#endif
    case 5: MULTIPLY(5);
    case 4: MULTIPLY(4);
    case 3: MULTIPLY(3);
    case 2: MULTIPLY(2);
    default: MULTIPLY(1);
  }
#undef MULTIPLY
}

/* Adapters of the maps that share a product, unmerged: low = A x of all of them, `rank` columns
   each, and B low is added to the sums. `a` and `b` are panels; B's have the scale multiplied in,
   and are zero except in the columns of an output's own map. The second and third map begin at
   outputs `second` and `third`. Without an adapter `a` is NULL. */
typedef struct {
  const float *a, *b;
  float *low;
  int64_t rank, maps, second, third;
} Adapter;

/* out = (or +=) factor * (x @ panels) + bias, for all rows. A norm's factors are made by each
   thread for itself: they cost less than waiting for them. */
typedef struct {
  const float *x, *panels, *bias;
  float *out;
  int64_t inputs, outputs;
  int is_normed, is_added, is_gated;
  float eps;
  Adapter adapter;
} Product;

static void norm_factors(const Product *p, int64_t rows, float *factors) {
  for (int64_t b = 0; b < rows; b++) {
    const float *x = p->x + b * p->inputs;
    vec squares = all(0.0f);
    int64_t k = 0;
    for (; k + LANES <= p->inputs; k += LANES) squares += load(x + k) * load(x + k);
    float total = sum_of(squares);
    for (; k < p->inputs; k++) total += x[k] * x[k];
    factors[b] = 1.0f / sqrtf(total / p->inputs + p->eps);
  }
}

INLINE void put(float *to, vec value, int64_t room, int is_added) {
  if (room >= LANES) {
    store(to, is_added ? load(to) + value : value);
    return;
  }
  for (int64_t i = 0; i < room; i++) to[i] = is_added ? to[i] + value[i] : value[i];
}

static void put_row(const Product *p, int64_t panel, int64_t row, vec left, vec right) {
  if (p->bias) {
    left += load(p->bias + panel * PANEL);
    right += load(p->bias + panel * PANEL + LANES);
  }
  if (p->is_gated) {
    int64_t at = panel * LANES;
    vec gated = left / (1.0f + exp_of(-left)) * right;
    put(p->out + row * p->outputs + at, gated, p->outputs - at, 0);
    return;
  }
  float *to = p->out + row * p->outputs + panel * PANEL;
  int64_t room = p->outputs - panel * PANEL;
  put(to, left, room, p->is_added);
  if (room > LANES) put(to + LANES, right, room - LANES, p->is_added);
}

/* The columns of low that some outputs read: of the maps that they are of. */
static void columns_of(const Adapter *a, int64_t first, int64_t *from, int64_t *to) {
  int64_t last = first + LANES - 1;
  *from = (first >= a->second) + (first >= a->third);
  *to = (last >= a->second) + (last >= a->third);
  if (*to >= a->maps) *to = a->maps - 1;
  *from *= a->rank, *to = (*to + 1) * a->rank;
}

/* Both halves of a panel read as many columns, each its own. */
INLINE void add_columns(int count, const float *left_low, const float *right_low, int64_t width,
                        const float *left_b, const float *right_b, int64_t columns,
                        vec found[ROWS][2]) {
  vec sums[ROWS][2];
  for (int r = 0; r < count; r++) sums[r][0] = found[r][0], sums[r][1] = found[r][1];
  for (int64_t k = 0; k < columns; k++) {
    vec left = load(left_b + k * PANEL), right = load(right_b + k * PANEL);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
      sums[r][0] += all(left_low[r * width + k]) * left;
      sums[r][1] += all(right_low[r * width + k]) * right;
    }
  }
  for (int r = 0; r < count; r++) found[r][0] = sums[r][0], found[r][1] = sums[r][1];
}

/* Add B low of some rows to a panel's sums. */
static void add_low(const Product *p, int64_t panel, int64_t row, int count, vec sums[ROWS][2]) {
  const Adapter *a = &p->adapter;
  int64_t width = a->maps * a->rank, from[2] = {0, a->rank}, to[2] = {a->rank, 2 * a->rank};
  const float *b = a->b + panel * width * PANEL, *low = a->low + row * width;
  if (!p->is_gated)
    for (int half = 0; half < 2; half++)
      columns_of(a, panel * PANEL + half * LANES, from + half, to + half);
  int64_t columns = to[0] - from[0];
  if (columns == to[1] - from[1]) {
    const float *left_b = b + from[0] * PANEL, *right_b = b + from[1] * PANEL + LANES;
    const float *left = low + from[0], *right = low + from[1];
    if (count == ROWS) add_columns(ROWS, left, right, width, left_b, right_b, columns, sums);
    else if (count == 1) add_columns(1, left, right, width, left_b, right_b, columns, sums);
    else add_columns(count, left, right, width, left_b, right_b, columns, sums);
    return;
  }
  /* A map ends within one half. */
  for (int half = 0; half < 2; half++)
    for (int64_t k = from[half]; k < to[half]; k++) {
      vec weights = load(b + k * PANEL + half * LANES);
      for (int r = 0; r < count; r++) sums[r][half] += all(low[r * width + k]) * weights;
    }
}

/* Panels that make up a task: a long stretch of weights where few rows wait for memory; of many
   rows one panel is work enough, and who is done first waits for less. */
static int64_t panels_of_task(int64_t panels, int64_t rows, int64_t inputs, int64_t threads) {
  int64_t blocks = (rows + ROWS - 1) / ROWS, most = panels / (2 * threads);
  int64_t wanted = STRETCH / (inputs * PANEL * blocks);
  int64_t least = wanted < most ? wanted : most;
  return least > 1 ? least : 1;
}

/* Rows after the first ROWS find the panel in the cache: while they are multiplied, memory has time
   for the next one. `step`: floats of it that each of their inputs must ask for. */
static void product_of_panel(const Product *p, int64_t panel, int64_t next, int64_t rows,
                             const float *factors) {
  const float *weights = p->panels + panel * p->inputs * PANEL;
  const float *ask = p->panels + next * p->inputs * PANEL;
  int64_t later = rows / ROWS - 1, step = later > 1 ? (PANEL + later - 1) / later : 0;
  vec sums[ROWS][2];
  for (int64_t b = 0; b < rows;) {
    const float *x = p->x + b * p->inputs;
    int n = ROWS;
    if (step && b > 0 && b + ROWS <= rows) {
      multiply(ROWS, x, p->inputs, weights, p->inputs, ask, step, 1, sums);
      ask += p->inputs * step;
    } else {
      n = multiply_rows(rows - b, x, p->inputs, weights, p->inputs, sums);
    }
    if (p->is_normed)
      for (int r = 0; r < n; r++) sums[r][0] *= factors[b + r], sums[r][1] *= factors[b + r];
    if (p->adapter.a) add_low(p, panel, b, n, sums);
    for (int r = 0; r < n; r++) put_row(p, panel, b + r, sums[r][0], sums[r][1]);
    b += n;
  }
}

static void product(const Product *p, int64_t rows, int64_t threads, Stage *stage) {
  int64_t width = p->is_gated ? LANES : PANEL, panels = (p->outputs + width - 1) / width;
  int64_t each = panels_of_task(panels, rows, p->inputs, threads);
  int64_t count = (panels + each - 1) / each;
  float factors[rows];
  int has_factors = 0;
  FOR_TASKS(task, stage, count) {
    if (p->is_normed && !has_factors) norm_factors(p, rows, factors), has_factors = 1;
    int64_t end = (task + 1) * each < panels ? (task + 1) * each : panels;
    for (int64_t panel = task * each; panel < end; panel++) {
      /* The next task is taken by whoever comes first; in turns, most often. */
      int64_t next = panel + 1 < end ? panel + 1 : (task + threads) * each;
      product_of_panel(p, panel, next < panels ? next : panel, rows, factors);
    }
  }
  wait_until(&stage->done, count);
}

/* A product with its adapter, which is a stage of its own before it: `low`. */
static void adapted_product(const Product *p, int64_t rows, int64_t threads, Stage *low,
                            Stage *stage) {
  if (p->adapter.a) {
    Product a = {p->x, p->adapter.a, 0, p->adapter.low, p->inputs,
                 p->adapter.maps * p->adapter.rank, p->is_normed, 0, 0, p->eps, {0}};
    product(&a, rows, threads, low);
  }
  product(p, rows, threads, stage);
}

#endif
