/* Vectors as wide as the processor's, in the compiler's own notation. */

#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef double dvec __attribute__((vector_size(8 * LANES), aligned(8)));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec pick(ivec where, vec yes, vec no) {
  return (vec)((where & (ivec)yes) | (~where & (ivec)no));
}

INLINE float sum_of(vec value) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += value[i];
  return total;
}

INLINE float max_of(vec value) {
  float top = value[0];
  for (int i = 1; i < LANES; i++) top = value[i] > top ? value[i] : top;
  return top;
}

/* Within 2 units in the last place; 0 where exp is below the smallest normal number. */
INLINE vec exp_of(vec x) {
  const vec low = all(-87.33654f), high = all(88.72283f);
  vec y = pick(x < low, low, x);
  y = pick(y > high, high, y);
  /* Adding 1.5 * 2^23 rounds to a whole number. */
  vec n = y * 1.44269504f + 12582912.0f;
  n -= 12582912.0f;
  vec r = y - n * 0.693359375f;
  r -= n * -2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  /* In two factors: 2^128 has no float. */
  ivec k = __builtin_convertvector(n, ivec), half = k >> 1;
  p = p * (vec)((half + 127) << 23) * (vec)((k - half + 127) << 23);
  return pick(x < low, all(0.0f), p);
}

/* Every second element of two vectors, from the first or from the second on. */
#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* The sums of LANES vectors as one vector: neighbours are added, again and again. */
INLINE vec sums_of(vec *v) {
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++)
      v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVEN) + SHUFFLE(v[2 * i], v[2 * i + 1], ODD);
  return v[0];
}

#endif
