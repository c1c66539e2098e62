// Elementary functions, written with IEEE operations only, so that every instruction set gives the same
// bits. Coefficients: coefficients.py. Errors are in units in the last place of the result (ulp) and hold
// where the result is normal; a subnormal result is off by at most one multiple of 2^-149 more.

NUMA_MOE_INLINE Vector absolute(Vector x) {
  return from_bits(bit_and(to_bits(x), broadcast_bits(0x7fffffffu)));
}

// Both keep a NaN in x.
NUMA_MOE_INLINE Vector at_most(Vector x, Vector limit) { return select(less(limit, x), limit, x); }
NUMA_MOE_INLINE Vector at_least(Vector x, Vector limit) { return select(less(x, limit), limit, x); }

// e^x, error <= 1.1 ulp (measured on every float up to |x| = 200, beyond which it is clamped); infinity from
// 88.72284 on, zero below -103.98.
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite), e^r by a polynomial.
NUMA_MOE_INLINE Vector exponential(Vector x) {
  x = at_least(at_most(x, broadcast(90.0f)), broadcast(-110.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits.
  const Vector shifter = broadcast(0x1.8p23f);
  const Vector shifted = fused_multiply_add(x, broadcast(0x1.715476p0f), shifter);
  const Vector n = subtract(shifted, shifter);
  Vector r = fused_multiply_add(n, broadcast(-0x1.62e430p-1f), x);
  r = fused_multiply_add(n, broadcast(0x1.05c610p-29f), r);
  // (e^r - 1 - r) / r^2
  Vector p = broadcast(0x1.6d110ap-10f);
  p = fused_multiply_add(p, r, broadcast(0x1.120b6ep-7f));
  p = fused_multiply_add(p, r, broadcast(0x1.55551ap-5f));
  p = fused_multiply_add(p, r, broadcast(0x1.5554dcp-3f));
  p = fused_multiply_add(p, r, broadcast(0x1.000000p-1f));
  p = fused_multiply_add(multiply(r, r), p, r);
  p = add(p, broadcast(1.0f));
  // 2^n in two factors: n may lie outside the exponents of normal numbers.
  const Bits exponent = subtract(to_bits(shifted), to_bits(shifter));
  const Bits half = shift_right_signed<1>(exponent);
  const Bits bias = broadcast_bits(127);
  const Vector first = from_bits(shift_left<23>(add(half, bias)));
  const Vector second = from_bits(shift_left<23>(add(subtract(exponent, half), bias)));
  return multiply(multiply(p, first), second);
}

// 1 / (1 + e^-x), error <= 2.5 ulp. Only e^-|x| is taken, which can't overflow.
NUMA_MOE_INLINE Vector sigmoid(Vector x) {
  const Vector one = broadcast(1.0f);
  const Vector e = exponential(subtract(zero(), absolute(x)));
  return divide(select(less(x, zero()), e, one), add(one, e));
}

// The normal distribution's Phi(x) = (1 + erf(x / sqrt 2)) / 2, error <= 5.5 ulp, in its lower tail too.
// Phi(-a) = e^(-a^2 / 2) R(a), where R(a) (a + c) is a polynomial in (a - c) / (a + c) for a >= 0 (cf.
// Shepherd and Laframboise, Math. Comp. 36, 1981), here with c = 2.5.
NUMA_MOE_INLINE Vector normal_distribution(Vector x) {
  const Vector a = at_most(absolute(x), broadcast(16.0f));
  const Vector square = multiply(a, a);
  const Vector square_rest = fused_multiply_add(a, a, subtract(zero(), square));
  const Vector minus_half = broadcast(-0.5f);
  Vector tail = exponential(multiply(square, minus_half));
  tail = fused_multiply_add(multiply(square_rest, minus_half), tail, tail);
  const Vector offset = broadcast(2.5f);
  const Vector s = divide(broadcast(1.0f), add(a, offset));
  const Vector t = multiply(subtract(a, offset), s);
  Vector p = broadcast(-0x1.5073bcp-13f);
  p = fused_multiply_add(p, t, broadcast(-0x1.4bf71ap-12f));
  p = fused_multiply_add(p, t, broadcast(0x1.673a7ep-11f));
  p = fused_multiply_add(p, t, broadcast(0x1.4b7a52p-9f));
  p = fused_multiply_add(p, t, broadcast(-0x1.a36684p-10f));
  p = fused_multiply_add(p, t, broadcast(-0x1.0c7f76p-6f));
  p = fused_multiply_add(p, t, broadcast(0x1.2ea0f4p-7f));
  p = fused_multiply_add(p, t, broadcast(0x1.0e4f48p-3f));
  p = fused_multiply_add(p, t, broadcast(-0x1.bc19c0p-2f));
  p = fused_multiply_add(p, t, broadcast(0x1.69cee6p-1f));
  tail = multiply(multiply(tail, s), p);
  return select(less(x, zero()), tail, subtract(broadcast(1.0f), tail));
}
