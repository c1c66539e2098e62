"""Prints the polynomial coefficients of math.inl (needs mpmath): near-minimax fits, rounded to fp32."""

import struct
from collections.abc import Callable

import mpmath


def to_fp32(value: mpmath.mpf) -> float:
    return float(struct.unpack("f", struct.pack("f", float(value)))[0])


def print_fit(
    name: str, function: Callable[[mpmath.mpf], mpmath.mpf], interval: list[mpmath.mpf], terms: int
) -> None:
    coefficients, error = mpmath.chebyfit(function, interval, terms, error=True)
    print(f"{name}: absolute error {float(error):.1e}, highest power first")
    for coefficient in coefficients:
        print(f"  {to_fp32(coefficient).hex()}")


def exponential_rest(r: mpmath.mpf) -> mpmath.mpf:
    """(e^r - 1 - r) / r^2, by its series where that cancels."""
    if abs(r) < mpmath.mpf(10) ** -12:
        return mpmath.mpf(1) / 2 + r / 6
    return (mpmath.exp(r) - 1 - r) / r**2


OFFSET = mpmath.mpf("2.5")
LARGEST = 16  # Phi(-16) is zero in fp32


def position(a: mpmath.mpf) -> mpmath.mpf:
    return (a - OFFSET) / (a + OFFSET)


def scaled_mills_ratio(t: mpmath.mpf) -> mpmath.mpf:
    """Phi(-a) e^(a^2 / 2) (a + OFFSET) for the a at position t."""
    a = OFFSET * (1 + t) / (1 - t)
    return mpmath.erfc(a / mpmath.sqrt(2)) * mpmath.exp(a**2 / 2) / 2 * (a + OFFSET)


def main() -> None:
    mpmath.mp.prec = 150
    ln2 = mpmath.log(2)
    print(f"1 / ln 2: {to_fp32(1 / ln2).hex()}")
    print(f"ln 2: {to_fp32(ln2).hex()} + {to_fp32(ln2 - to_fp32(ln2)).hex()}")
    reach = ln2 / 2 * mpmath.mpf("1.0001")
    slope = 2 * mpmath.sqrt(2 / mpmath.pi)
    print(f"gelu_tanh: {to_fp32(slope).hex()} {to_fp32(slope * mpmath.mpf('0.044715')).hex()}")
    print_fit("exponential", exponential_rest, [-reach, reach], 5)
    print_fit("normal_distribution", scaled_mills_ratio, [position(mpmath.mpf(0)), position(LARGEST)], 10)


if __name__ == "__main__":
    main()
