"""The checksum of a whole from those of its parts."""

import os
import zlib

import pytest

from lerobot_parallel.checkpoint.convert.checksum import combined


@pytest.mark.parametrize("sizes", [[], [0], [1], [5, 0, 7], [1] * 20, [65536, 1, 3_000_001], [4 << 20, 4 << 20, 13]])
def test_parts_combine_to_what_zlib_gives_for_the_whole(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    assert combined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def test_order_matters() -> None:
    one, two = (zlib.crc32(b"one"), 3), (zlib.crc32(b"two!"), 4)
    assert combined([one, two]) != combined([two, one])
