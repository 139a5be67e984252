"""A shuffle that needs no memory: where a window lands is computed, not looked up.

A Feistel network (Luby and Rackoff, 1988) permutes the numbers below a power of four; numbers that fall
outside the wanted range are sent through again until they fall inside ("cycle walking", Black and Rogaway,
2002), which leaves a permutation of that range. Nothing but 64-bit integer arithmetic is used, so the order
is the same for every numpy version and machine (numpy promises that for no shuffling method), and a rank
keeps no index: sorting random keys would hold 8 bytes per window on devices whose memory is small.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def permute(indices: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Image of each index in [0, size) under the permutation of [0, size) that `key` chooses.

    indices: int64, any shape. key: any integers; equal keys give equal permutations.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    image = _feistel(indices.astype(np.uint64), half, round_keys)
    # Ends: the network is a permutation of a finite domain, so walking on from an index in range returns
    # to that range. The domain is less than four times the range, so few rounds are needed.
    while (outside := image >= np.uint64(size)).any():
        image[outside] = _feistel(image[outside], half, round_keys)
    return image.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, round_keys: list[int]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(round_key)) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, 2014): each input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> list[int]:
    """SplitMix64's sequence, restarted by each integer of the key from where the last one left it."""
    state = 0
    for part in key:
        state = _mix_int((state + part + 0x9E3779B97F4A7C15) & _MASK64)
    return [_mix_int((state + n * 0x9E3779B97F4A7C15) & _MASK64) for n in range(1, _ROUNDS + 1)]


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value], dtype=np.uint64))[0])
