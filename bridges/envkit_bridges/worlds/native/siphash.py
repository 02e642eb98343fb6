"""SipHash-2-4, a 64-bit hash, of rows of int64 numbers on any array namespace, and of bytes by way of those.

Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012. The key is that of the paper's test
vectors: hashes are the same in every process and on every machine, and do not prevent a search for collisions.

Conventions
    word  int64, the bits of an unsigned number; sums wrap around.
    tail  the last word: the bytes that fill no word, and the number of all bytes in its highest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from array_api_compat import array_namespace


def siphash(words: Any, tail: int | None = None) -> Any:
    """Hash each row of words.

    Args:
        words: int64, shape (*batch, n); n may be 0.
        tail: see `words_of`; None where the words are the whole message.

    Returns:
        int64, shape (*batch,).
    """
    xp, (*batch, count) = array_namespace(words), words.shape
    tail = _signed((8 * count & 0xFF) << 56) if tail is None else tail
    zero = xp.zeros((*batch, 1), dtype=words.dtype, device=words.device)
    state = tuple(zero + _signed(number) for number in _BEGIN)
    for word in _columns(words, zero + tail):
        a, b, c, d = state
        a, b, c, d = _round(_round((a, b, c, d ^ word)))
        state = a ^ word, b, c, d
    a, b, c, d = state
    a, b, c, d = _round(_round(_round(_round((a, b, c ^ 0xFF, d)))))
    return (a ^ b ^ c ^ d)[..., 0]


def words_of(message: bytes) -> tuple[list[int], int]:
    """Cut a message into words, and what is left over and its length into the tail."""
    end = len(message) - len(message) % 8
    words = [int.from_bytes(message[at : at + 8], "little") for at in range(0, end, 8)]
    tail = int.from_bytes(message[end:], "little") | (len(message) & 0xFF) << 56
    return [_signed(word) for word in words], _signed(tail)


def _columns(words: Any, tail: Any) -> Iterator[Any]:
    """Yield one word of every row after the other, shape (*batch, 1): the tail comes last."""
    for index in range(words.shape[-1]):
        yield words[..., index : index + 1]
    yield tail


def _round(state: tuple[Any, ...]) -> tuple[Any, ...]:
    a, b, c, d = state
    a, c = a + b, c + d
    b, d = _rotated(b, 13) ^ a, _rotated(d, 16) ^ c
    a, c = _rotated(a, 32) + d, c + b
    b, d = _rotated(b, 17) ^ c, _rotated(d, 21) ^ a
    return a, b, _rotated(c, 32), d


def _rotated(word: Any, bits: int) -> Any:
    """Rotate to the left; a shift to the right of int64 brings its sign in, which is masked."""
    return word << bits | word >> 64 - bits & (1 << bits) - 1


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_KEY = [int.from_bytes(range(at, at + 8), "little") for at in (0, 8)]
_BEGIN = (
    _KEY[0] ^ 0x736F6D6570736575,
    _KEY[1] ^ 0x646F72616E646F6D,
    _KEY[0] ^ 0x6C7967656E657261,
    _KEY[1] ^ 0x7465646279746573,
)
