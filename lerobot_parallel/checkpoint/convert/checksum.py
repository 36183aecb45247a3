"""CRC-32 of a whole from the CRC-32s of its parts, so that workers can checksum ranges in any order.

The algebra is zlib's `crc32_combine` (https://github.com/madler/zlib/blob/master/crc32.c): a CRC is a polynomial
over GF(2) modulo `_POLYNOMIAL`, bits reflected; appending n bytes multiplies it by x^(8n).
"""

import functools
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _product(a: int, b: int) -> int:
    result = 0
    mask = _ONE
    while a:
        if a & mask:
            result ^= b
            a ^= mask
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return result


def _squares() -> list[int]:
    """x^(2^k) for k = 0 ... 31; the order of x divides 2^32 - 1, so higher k repeat."""
    power, powers = _ONE >> 1, []
    for _ in range(32):
        powers.append(power)
        power = _product(power, power)
    return powers


_SQUARES = _squares()


@functools.lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    result, bits, k = _ONE, nbytes, 3
    while bits:
        if bits & 1:
            result = _product(_SQUARES[k % 32], result)
        bits, k = bits >> 1, k + 1
    return result


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of consecutive parts, each given as its own CRC-32 and its size in bytes."""
    whole = 0
    for crc, nbytes in parts:
        whole = _product(_shift(nbytes), whole) ^ crc
    return whole
