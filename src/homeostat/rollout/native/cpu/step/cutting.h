/* What top-k, top-p and min-p leave of a row's words: the definition is that of ops/cut.py.

   Nothing is sorted. Words that may be kept are gathered in the order of their ids, each with its
   logit. A cut keeps a beginning of the order by logits, so it is known by its least logit, and by
   how many words with just this logit it keeps: the first ones. Both are found by partitions. */

#ifndef CUTTING_H
#define CUTTING_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

/* Words that are looked at together: where none of them is large enough, none is touched. */
#define BLOCK 64

/* `spare` and `spare_weights` are for partitions, which change the order. */
typedef struct {
  int64_t count;
  int32_t *ids;
  float *z, *weights, *spare, *spare_weights;
} Words;

/* The order by logits is kept down to words with this logit, of which `ties` are kept. */
typedef struct {
  float least;
  int64_t ties;
} Bound;

INLINE vec words(const float *logits, int64_t at, int64_t vocabulary) {
  if (at + LANES <= vocabulary) return load(logits + at);
  vec z = all(-INFINITY);
  for (int64_t i = at; i < vocabulary; i++) z[i - at] = logits[i];
  return z;
}

static int make_room(Words *w, int64_t size) {
  size = (size + LANES) / LANES * LANES;
  float *room = malloc(size * 5 * sizeof(float));
  w->count = 0;
  w->z = room;
  if (!room) return 0;
  w->weights = room + size, w->spare = room + 2 * size, w->spare_weights = room + 3 * size;
  w->ids = (int32_t *)(room + 4 * size);
  return 1;
}

/* The number of values above a pivot; they come first then, and those equal to it next. */
static int64_t partition(float *z, float *weights, int64_t n, float pivot, int64_t *num_equal) {
  int64_t above = 0, at = 0, below = n;
  while (at < below) {
    int64_t to = z[at] > pivot ? above++ : z[at] == pivot ? at : --below;
    float value = z[at], weight = weights[at];
    z[at] = z[to], weights[at] = weights[to];
    z[to] = value, weights[to] = weight;
    /* What came from the end has not been looked at. */
    if (to < below) at++;
  }
  *num_equal = at - above;
  return above;
}

INLINE float middle(const float *z, int64_t n) {
  float a = z[0], b = z[n / 2], c = z[n - 1];
  if (a > b) { float swap = a; a = b; b = swap; }
  return c < a ? a : c > b ? b : c;
}

/* The bound of the first of `n` words in the order: of so many, or of as few as have a sum of weights
   of at least `mass`, whatever their number (`wanted` < 0). `spare` holds the words. */
static Bound bound_of(const Words *w, int64_t n, int64_t wanted, double mass) {
  float *z = w->spare, *weights = w->spare_weights;
  int64_t num_before = 0;
  double before = 0;
  Bound bound = {-INFINITY, 0};
  while (n > 0) {
    int64_t equal, above;
    double sum = 0, sum_equal = 0;
    float pivot = middle(z, n);
    above = partition(z, weights, n, pivot, &equal);
    if (wanted < 0) {
      for (int64_t i = 0; i < above; i++) sum += weights[i];
      for (int64_t i = above; i < above + equal; i++) sum_equal += weights[i];
    }
    if (wanted < 0 ? before + sum >= mass : num_before + above >= wanted) {
      n = above;
      continue;
    }
    if (wanted < 0 ? before + sum + sum_equal >= mass : num_before + above + equal >= wanted) {
      int64_t ties = wanted - num_before - above;
      if (wanted < 0) ties = (int64_t)ceil((mass - before - sum) / (sum_equal / equal));
      bound.least = pivot;
      bound.ties = ties < 1 ? 1 : ties > equal ? equal : ties;
      return bound;
    }
    /* Without any number among the logits nothing is equal to the pivot. */
    if (above + equal == 0) break;
    before += sum + sum_equal, num_before += above + equal;
    z += above + equal, weights += above + equal, n -= above + equal;
  }
  bound.ties = w->count;
  return bound;
}

/* Keep the words within a bound, in the order of their ids. */
static void keep_within(Words *w, Bound bound) {
  int64_t kept = 0;
  for (int64_t i = 0; i < w->count; i++) {
    int is_in = w->z[i] > bound.least || (w->z[i] == bound.least && bound.ties-- > 0);
    w->ids[kept] = w->ids[i], w->z[kept] = w->z[i], w->weights[kept] = w->weights[i];
    kept += is_in;
  }
  w->count = kept;
}

static void keep_first(Words *w, int64_t wanted) {
  if (w->count <= wanted) return;
  memcpy(w->spare, w->z, w->count * sizeof(float));
  keep_within(w, bound_of(w, w->count, wanted, 0));
}

/* Classes of weights up to 1: a weight is at most twice as large as another one of its class. */
#define CLASSES 64
INLINE int class_of(float weight) {
  int32_t bits;
  memcpy(&bits, &weight, sizeof bits);
  int class = 127 - (bits >> 23);
  return class < CLASSES ? class : CLASSES - 1;
}

/* Keep as few words as have a sum of weights of at least `mass`: all of the classes before the one
   in which it is reached, and some of that one, which alone is partitioned. */
static void keep_mass(Words *w, double mass) {
  double masses[CLASSES] = {0}, before = 0;
  int64_t n = 0;
  int last = 0;
  for (int64_t i = 0; i < w->count; i++) masses[class_of(w->weights[i])] += w->weights[i];
  while (last < CLASSES && before + masses[last] < mass) before += masses[last++];
  /* Only rounding leaves less than is wanted. */
  if (last == CLASSES) return;
  for (int64_t i = 0; i < w->count; i++) {
    w->spare[n] = w->z[i], w->spare_weights[n] = w->weights[i];
    n += class_of(w->weights[i]) == last;
  }
  keep_within(w, bound_of(w, n, -1, mass - before));
}

/* Whether any of the words of a block is at least so large. */
INLINE int has_large(const float *logits, int64_t at, int64_t vocabulary, float least) {
  vec tops = words(logits, at, vocabulary);
  for (int64_t v = at + LANES; v < at + BLOCK && v < vocabulary; v += LANES) {
    vec z = words(logits, v, vocabulary);
    tops = pick(z > tops, z, tops);
  }
  return max_of(tops) >= least;
}

/* The words with logits of at least `least`, of these the first `limit` in the order by logits.
   Returns whether there was memory. */
static int gather(Words *w, const float *logits, int64_t vocabulary, float least, int64_t limit) {
  int64_t size = 2 * limit;
  if (limit >= vocabulary) {
    size = 0;
    for (int64_t v = 0; v < vocabulary; v++) size += logits[v] >= least;
  }
  if (!make_room(w, size + BLOCK)) return 0;
  for (int64_t at = 0; at < vocabulary; at += BLOCK) {
    if (!has_large(logits, at, vocabulary, least)) continue;
    int64_t end = at + BLOCK < vocabulary ? at + BLOCK : vocabulary;
    /* Without a branch, which would often be predicted wrongly: what is not wanted is overwritten. */
    int64_t count = w->count;
    for (int64_t v = at; v < end; v++) {
      w->ids[count] = (int32_t)v, w->z[count] = logits[v];
      count += logits[v] >= least;
    }
    w->count = count;
    if (w->count > 2 * limit) {
      keep_first(w, limit);
      /* Later words that are as large as the last of these come after it. */
      least = w->z[0];
      for (int64_t i = 1; i < w->count; i++) least = w->z[i] < least ? w->z[i] : least;
      least = nextafterf(least, INFINITY);
    }
  }
  keep_first(w, limit);
  return 1;
}

/* What row `b` may draw, with weights exp((logit - top) * scale). `total`: the sum of all weights.
   Returns whether there was memory. */
static int cut_row(const Burst *burst, int64_t b, const float *logits, int64_t vocabulary,
                   float top, double total, Words *w) {
  float scale = burst->scale[b];
  double top_p = burst->top_p[b], min_p = burst->min_p[b], least = 0;
  int64_t top_k = burst->top_k[b] < vocabulary ? burst->top_k[b] : vocabulary;
  /* Words of smaller weights are never kept: all of these together have less than what top-p may
     leave out. A hundredth more covers the rounding of exp. */
  if (top_p < 1 && top_k >= vocabulary) least = (1 - top_p) * total / (double)vocabulary;
  /* Of the first k words all are needed, because shares are of their sum. */
  if (min_p > least && (top_p >= 1 || top_k >= vocabulary)) least = min_p;
  float floor = least > 0 ? top + (float)(log(least) - 0.01) / scale : -INFINITY;
  if (!gather(w, logits, vocabulary, floor, top_k)) return 0;
  for (int64_t i = 0; i < w->count; i += LANES)
    store(w->weights + i, exp_of((load(w->z + i) - top) * scale));
  if (top_p < 1) {
    double mass = total;
    if (top_k < vocabulary) {
      mass = 0;
      for (int64_t i = 0; i < w->count; i++) mass += w->weights[i];
    }
    keep_mass(w, top_p * mass);
  }
  int64_t kept = 0;
  for (int64_t i = 0; min_p > 0 && i < w->count; i++) {
    w->ids[kept] = w->ids[i], w->z[kept] = w->z[i], w->weights[kept] = w->weights[i];
    kept += w->weights[i] >= min_p;
  }
  if (min_p > 0) w->count = kept;
  return 1;
}

#endif
