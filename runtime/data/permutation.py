"""A shuffle that needs no list: a keyed bijection of 0..count-1, computed where it is asked for.

A four-round Feistel network (Luby and Rackoff, 1988) permutes the next power of four, and
cycle-walking (Black and Rogaway, 2002) brings values that fall outside back in. An epoch over
billions of documents costs no memory, and a resume lands in the middle of it in constant time.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


def derive_key(*parts: object) -> NDArray[np.uint64]:
    """Round keys from anything printable; equal parts give equal keys on every machine."""
    text = "\0".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(indices: NDArray[np.int64], count: int, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Images of `indices` (each in 0..count-1) under the permutation of 0..count-1 named by `key`."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(indices.astype(np.uint64), half_bits, key)
    outside = np.flatnonzero(values >= count)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in key:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
