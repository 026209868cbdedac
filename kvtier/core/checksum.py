"""The checksum of block payloads and headers: XXH3-64 with seed 0.

It finds accidents (a flipped bit, a torn write, a swapped block), not forgeries: whoever may write
a tier can make any checksum fit. What must not live here: frames, and copies
(kvtier.core.block_copy).
"""

from kvtier import _native
from kvtier.errors import CallerError
from kvtier.types import BytesLike


def checksum(buffer: BytesLike) -> int:
    """XXH3-64 of all bytes of a C-contiguous buffer, as u64; mutates nothing.

    Releases the GIL for more than some 10 KiB. Raises CallerError for what is not such a buffer.
    """
    try:
        return _native.checksum(buffer)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error


# The twin, written from the public specification, "xxHash fast digest algorithm" 0.2.0.

_U64 = 2**64 - 1
_U32 = 2**32 - 1
_PRIME32_1 = 0x9E3779B1
_PRIME32_2 = 0x85EBCA77
_PRIME32_3 = 0xC2B2AE3D
_PRIME64_1 = 0x9E3779B185EBCA87
_PRIME64_2 = 0xC2B2AE3D27D4EB4F
_PRIME64_3 = 0x165667B19E3779F9
_PRIME64_4 = 0x85EBCA77C2B2AE63
_PRIME64_5 = 0x27D4EB2F165667C5
_PRIME_MX1 = 0x165667919E3779F9
_PRIME_MX2 = 0x9FB21C651E98DF25
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE_BYTES = 64


def pure_checksum(buffer: BytesLike) -> int:
    """Twin of `_native.checksum`, its oracle in tests: the same value, some 10,000 times slower."""
    data = bytes(buffer)
    if len(data) > 240:
        return _long(data)
    if len(data) > 16:
        return _medium(data)
    return _small(data)


def _word(data: bytes, offset: int, size: int = 8) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def _key(offset: int) -> int:
    return _word(_SECRET, offset)


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _U64) ^ (product >> 64)


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _U64


def _avalanche(x: int) -> int:
    x = (x ^ (x >> 37)) * _PRIME_MX1 & _U64
    return x ^ (x >> 32)


def _avalanche_strong(x: int) -> int:
    x = (x ^ (x >> 33)) * _PRIME64_2 & _U64
    x = (x ^ (x >> 29)) * _PRIME64_3 & _U64
    return x ^ (x >> 32)


def _small(data: bytes) -> int:
    size = len(data)
    if size == 0:
        return _avalanche_strong(_key(56) ^ _key(64))
    if size <= 3:
        combined = data[-1] | size << 8 | data[0] << 16 | data[size >> 1] << 24
        return _avalanche_strong(_word(_SECRET, 0, 4) ^ _word(_SECRET, 4, 4) ^ combined)
    if size <= 8:
        combined = _word(data, size - 4, 4) | _word(data, 0, 4) << 32
        value = _key(8) ^ _key(16) ^ combined
        value ^= _rotated(value, 49) ^ _rotated(value, 24)
        value = value * _PRIME_MX2 & _U64
        value = (value ^ ((value >> 35) + size)) * _PRIME_MX2 & _U64
        return value ^ (value >> 28)
    low = _key(24) ^ _key(32) ^ _word(data, 0)
    high = _key(40) ^ _key(48) ^ _word(data, size - 8)
    swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
    return _avalanche((size + swapped + high + _fold(low, high)) & _U64)


def _mix(data: bytes, offset: int, key_offset: int) -> int:
    return _fold(
        _word(data, offset) ^ _key(key_offset), _word(data, offset + 8) ^ _key(key_offset + 8)
    )


def _medium(data: bytes) -> int:
    size = len(data)
    total = size * _PRIME64_1
    if size <= 128:
        for i in range((size - 1) // 32 + 1):
            total += _mix(data, 16 * i, 32 * i) + _mix(data, size - 16 * i - 16, 32 * i + 16)
        return _avalanche(total & _U64)
    total += sum(_mix(data, 16 * i, 16 * i) for i in range(8))
    total = _avalanche(total & _U64)
    total += sum(_mix(data, 16 * i, 16 * (i - 8) + 3) for i in range(8, size // 16))
    total += _mix(data, size - 16, 119)
    return _avalanche(total & _U64)


def _long(data: bytes) -> int:
    size = len(data)
    lanes = [
        _PRIME32_3,
        _PRIME64_1,
        _PRIME64_2,
        _PRIME64_3,
        _PRIME64_4,
        _PRIME32_2,
        _PRIME64_5,
        _PRIME32_1,
    ]
    for stripe in range((size - 1) // _STRIPE_BYTES):
        position = stripe % 16
        _mix_stripe(lanes, data, _STRIPE_BYTES * stripe, 8 * position)
        if position == 15:  # a round is over; never the last one
            for i, lane in enumerate(lanes):
                keyed = lane ^ (lane >> 47) ^ _key(len(_SECRET) - _STRIPE_BYTES + 8 * i)
                lanes[i] = keyed * _PRIME32_1 & _U64
    _mix_stripe(lanes, data, size - _STRIPE_BYTES, len(_SECRET) - _STRIPE_BYTES - 7)
    total = size * _PRIME64_1
    for i in range(4):
        total += _fold(lanes[2 * i] ^ _key(11 + 16 * i), lanes[2 * i + 1] ^ _key(19 + 16 * i))
    return _avalanche(total & _U64)


def _mix_stripe(lanes: list[int], data: bytes, offset: int, key_offset: int) -> None:
    for i in range(8):
        word = _word(data, offset + 8 * i)
        keyed = word ^ _key(key_offset + 8 * i)
        lanes[i] = (lanes[i] + (keyed & _U32) * (keyed >> 32)) & _U64
        lanes[i ^ 1] = (lanes[i ^ 1] + word) & _U64
