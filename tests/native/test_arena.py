"""The arena's directory: native and twin agree to the byte; damaged memory is never followed."""

import mmap
import struct
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.tiers.arena.directory import (
    ANY_LENGTH,
    NATIVE,
    PURE,
    ArenaOperations,
    DirectoryLayout,
    ReadStatus,
    close_directory,
    format_directory,
    located,
    packed_block,
    packed_name,
    packed_names,
    parsed_name,
    read_layout,
    reads,
)
from kvtier.types import Fingerprint

ENTRIES = 8
SLOT_BYTES = 64
LAYOUT = DirectoryLayout(epoch=0x1234, entries_count=ENTRIES, slots_bytes=ENTRIES * SLOT_BYTES)


def name_of(number: int) -> FrameName:
    return FrameName(
        KeyKind.PREFIX_KEY, number.to_bytes(32, "little"), Fingerprint(b"n" * 32), number % 2
    )


def payload_of(number: int, size: int = SLOT_BYTES) -> bytes:
    return bytes([number % 256]) * size


@dataclass
class Arena:
    """Directory and slots in anonymous memory, worked on by one kind of operations."""

    operations: ArenaOperations
    layout: DirectoryLayout = LAYOUT

    def __post_init__(self) -> None:
        self.directory = memoryview(mmap.mmap(-1, self.layout.directory_bytes))
        self.slots = memoryview(mmap.mmap(-1, max(1, self.layout.slots_bytes)))
        format_directory(self.directory, self.layout)

    def publish(self, entry: int, number: int, size: int = SLOT_BYTES) -> int:
        start = entry * (self.layout.slots_bytes // self.layout.entries_count)
        payload = payload_of(number, size)
        self.slots[start : start + size] = payload
        block = packed_block(entry, start, 7, size, checksum(payload))
        packed = self.operations.publish(self.directory, packed_name(name_of(number)), block)
        return int.from_bytes(packed, "little")

    def remove(self, entry: int, number: int) -> None:
        self.operations.remove(self.directory, [entry], packed_name(name_of(number)))

    def read(self, numbers: list[int], length: int = ANY_LENGTH) -> tuple[bytes, list[bytearray]]:
        targets = [bytearray(SLOT_BYTES) for _ in numbers]
        names = packed_names([name_of(number) for number in numbers])
        lengths = np.full(len(numbers), length, np.uint64)
        return self.operations.read(self.directory, self.slots, names, lengths, targets), targets

    def status(self, number: int, length: int = ANY_LENGTH) -> ReadStatus:
        return reads(self.read([number], length)[0])[0].status


both = pytest.mark.parametrize("operations", [NATIVE, PURE], ids=["native", "pure"])


@both
def test_a_published_block_is_found_and_read_verified(operations: ArenaOperations) -> None:
    arena = Arena(operations)
    generation = arena.publish(3, 42)
    records, (target,) = arena.read([42])
    (read,) = reads(records)
    assert read.status is ReadStatus.HIT
    assert (read.entry, read.generation, read.writer_id) == (3, generation, 7)
    assert read.payload_bytes == SLOT_BYTES
    assert target == payload_of(42)
    (place,) = located(operations.find(arena.directory, packed_name(name_of(42))))
    assert place is not None
    assert (place.entry, place.generation, place.payload_bytes) == (3, generation, SLOT_BYTES)


@both
def test_a_removed_block_is_a_miss_and_its_generation_never_comes_back(
    operations: ArenaOperations,
) -> None:
    arena = Arena(operations)
    seen = set()
    for number in range(20):
        generation = arena.publish(3, number)
        assert operations.unchanged(arena.directory, [3], [generation]) == b"\1"
        arena.remove(3, number)
        assert operations.unchanged(arena.directory, [3], [generation]) == b"\0"
        assert arena.status(number) is ReadStatus.MISS
        seen.add(generation)
    assert len(seen) == 20


@both
def test_an_entry_that_is_being_changed_is_a_miss(operations: ArenaOperations) -> None:
    arena = Arena(operations)
    generation = arena.publish(3, 42)
    at = LAYOUT.entry_at(3)
    arena.directory[at : at + 8] = (generation + 1).to_bytes(8, "little")
    assert arena.status(42) is ReadStatus.MISS
    assert operations.find(arena.directory, packed_name(name_of(42)))[:8] == b"\xff" * 8
    assert operations.unchanged(arena.directory, [3], [generation + 1]) == b"\0"


@both
def test_a_closed_directory_gives_nothing(operations: ArenaOperations) -> None:
    arena = Arena(operations)
    generation = arena.publish(0, 1)
    close_directory(arena.directory)
    assert arena.status(1) is ReadStatus.MISS
    assert operations.unchanged(arena.directory, [0], [generation]) == b"\0"


@both
def test_every_damaged_bit_of_header_or_payload_is_seen(operations: ArenaOperations) -> None:
    arena = Arena(operations)
    arena.publish(0, 42)
    frame = LAYOUT.frame_at(0)
    for bit in range(0, 8 * 128, 5):
        arena.directory[frame + bit // 8] ^= 1 << bit % 8
        assert arena.status(42) is ReadStatus.NOT_THE_NAME, bit
        arena.directory[frame + bit // 8] ^= 1 << bit % 8
    for bit in range(0, 8 * SLOT_BYTES, 5):
        arena.slots[bit // 8] ^= 1 << bit % 8
        assert arena.status(42) is ReadStatus.PAYLOAD, bit
        arena.slots[bit // 8] ^= 1 << bit % 8
    assert arena.status(42) is ReadStatus.HIT


@both
def test_lengths_are_held_against_what_was_asked(operations: ArenaOperations) -> None:
    arena = Arena(operations)
    arena.publish(0, 1, 33)
    assert arena.status(1, 33) is ReadStatus.HIT
    assert arena.status(1, 34) is ReadStatus.LENGTH
    short = operations.read(
        arena.directory, arena.slots, packed_name(name_of(1)), [ANY_LENGTH], [bytearray(32)]
    )
    assert reads(short)[0].status is ReadStatus.BUFFER_SHORT


@both
def test_a_full_table_still_finds_every_block_and_misses_every_other(
    operations: ArenaOperations,
) -> None:
    arena = Arena(operations)
    for entry in range(ENTRIES):
        assert arena.publish(entry, entry) != 0
    assert [arena.status(n) for n in range(ENTRIES)] == [ReadStatus.HIT] * ENTRIES
    assert [arena.status(n) for n in range(100, 200)] == [ReadStatus.MISS] * 100


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 30)), max_size=40))
def test_native_and_twin_leave_the_same_bytes_and_read_the_same(
    steps: list[tuple[int, int]],
) -> None:
    arenas = [Arena(NATIVE), Arena(PURE)]
    held: dict[int, int] = {}
    for entry, number in steps:
        if entry in held:
            for arena in arenas:
                arena.remove(entry, held[entry])
            del held[entry]
        elif number not in held.values():
            generations = {arena.publish(entry, number, number % 64 + 1) for arena in arenas}
            assert len(generations) == 1
            held[entry] = number
        native, twin = (bytes(arena.directory) for arena in arenas)
        assert native == twin
    numbers = list(range(31))
    answers = [arena.read(numbers) for arena in arenas]
    assert [one.status for one in reads(answers[0][0])] == [
        one.status for one in reads(answers[1][0])
    ]
    assert answers[0][1] == answers[1][1]
    hits = {n for n, one in zip(numbers, reads(answers[0][0]), strict=True) if not one.status}
    assert hits == set(held.values())
    names = packed_names([name_of(n) for n in numbers])
    assert NATIVE.find(arenas[0].directory, names) == PURE.find(arenas[1].directory, names)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, LAYOUT.directory_bytes // 8 - 1),
    st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63, 2**64 - 1, 1 << 32])),
)
def test_a_directory_with_any_word_overwritten_is_refused_or_read_within_its_memory(
    position: int, word: int
) -> None:
    arena = Arena(NATIVE)
    for entry in range(ENTRIES):
        arena.publish(entry, entry)
    arena.directory[8 * position : 8 * position + 8] = struct.pack("<Q", word)
    try:
        records, targets = arena.read(list(range(ENTRIES)))
    except ValueError:
        return
    for number, (read, target) in enumerate(zip(reads(records), targets, strict=True)):
        if read.status is ReadStatus.HIT:
            assert target == payload_of(number)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=200, max_size=2000), st.integers(0, 2**32))
def test_a_directory_of_noise_behind_its_header_is_never_followed(noise: bytes, seed: int) -> None:
    arena = Arena(NATIVE)
    rest = arena.directory[4096:]
    rest[:] = np.random.default_rng(seed).bytes(len(rest))
    rest[: len(noise)] = noise[: len(rest)]
    records, _ = arena.read(list(range(20)))
    assert ReadStatus.HIT not in {read.status for read in reads(records)}


def test_other_memory_is_refused_as_a_directory() -> None:
    arena = Arena(NATIVE)
    name = packed_name(name_of(1))
    with pytest.raises(ValueError, match="aligned"):
        NATIVE.find(arena.directory[8:], name)
    with pytest.raises(ValueError, match="smaller"):
        NATIVE.find(arena.directory[: LAYOUT.directory_bytes - 64], name)
    with pytest.raises(ValueError, match="smaller"):
        NATIVE.find(arena.directory[:64], name)
    with pytest.raises(ValueError, match="slots"):
        NATIVE.read(arena.directory, arena.slots[:-1], name, [1], [bytearray(1)])
    for at, complaint in ((0, "not the directory"), (8, "another version"), (12, "version")):
        arena.directory[at] ^= 1
        with pytest.raises(ValueError, match=complaint):
            NATIVE.find(arena.directory, name)
        with pytest.raises(CallerError):
            read_layout(arena.directory)
        arena.directory[at] ^= 1
    for at in (32, 40):
        arena.directory[at : at + 8] = b"\xff" * 8
        with pytest.raises(ValueError, match="impossible"):
            NATIVE.find(arena.directory, name)


def test_arguments_that_do_not_fit_together_are_refused_and_change_nothing() -> None:
    arena = Arena(NATIVE)
    name = packed_name(name_of(1))
    block = packed_block(0, 0, 7, SLOT_BYTES, 0)
    before = bytes(arena.directory)
    for names, blocks in (
        (name[:-1], block),
        (name, block * 2),
        (name, block[:-1]),
        (name, packed_block(ENTRIES, 0, 7, 1, 0)),
        (name, packed_block(0, LAYOUT.slots_bytes, 7, 1, 0)),
        (name, packed_block(0, 1, 7, 2**64 - 1, 0)),
    ):
        with pytest.raises(ValueError, match=r"names|blocks"):
            NATIVE.publish(arena.directory, names, blocks)
    with pytest.raises(ValueError, match="entries"):
        NATIVE.remove(arena.directory, [ENTRIES], name)
    with pytest.raises(ValueError, match="entries"):
        NATIVE.unchanged(arena.directory, [0, 1], [2])
    with pytest.raises(ValueError, match="part of the arena"):
        NATIVE.read(arena.directory, arena.slots, name, [1], [arena.slots[:8]])
    with pytest.raises(ValueError, match="writable"):
        NATIVE.read(arena.directory, arena.slots, name, [1], [bytes(8)])
    with pytest.raises(ValueError, match="lengths"):
        NATIVE.read(arena.directory, arena.slots, name, [], [bytearray(8)])
    with pytest.raises(TypeError):
        NATIVE.read(arena.directory, arena.slots, name, [1], bytearray(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writable"):
        NATIVE.publish(arena.directory.toreadonly(), name, block)
    assert bytes(arena.directory) == before


def test_a_name_survives_packing_and_any_other_bytes_are_refused() -> None:
    name = FrameName(KeyKind.ENGINE_DIGEST, b"12345678", Fingerprint(b"x" * 32), 2**32 - 1)
    packed = packed_name(name)
    assert parsed_name(packed) == name
    for at in (0, 8, 10, 12, 14, 20, 24, 45, 50):
        damaged = bytearray(packed)
        damaged[at] ^= 0xFF
        with pytest.raises(CallerError):
            parsed_name(bytes(damaged))
    with pytest.raises(CallerError):
        parsed_name(packed[:-1])


def test_readers_never_see_wrong_bytes_while_a_writer_reuses_the_slots() -> None:
    # Blocks large enough that the native reader lets go of the GIL while the writer runs.
    slot_bytes, blocks, rounds = 1 << 18, 4, 150
    layout = DirectoryLayout(9, blocks, slot_bytes * blocks)
    arena = Arena(NATIVE, layout)
    wrong: list[int] = []
    statuses: set[ReadStatus] = set()
    done = threading.Event()

    def reader() -> None:
        target = np.zeros(slot_bytes, np.uint8)
        while not done.is_set():
            for number in range(8):
                name = packed_name(name_of(number))
                record = NATIVE.read(arena.directory, arena.slots, name, [slot_bytes], [target])
                (read,) = reads(record)
                statuses.add(read.status)
                if read.status is ReadStatus.HIT and not (target == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    held: list[int] = [-1] * blocks
    for step in range(rounds):
        entry, number = step % blocks, step % 8
        if held[entry] >= 0:
            arena.remove(entry, held[entry])
        arena.publish(entry, number, slot_bytes)
        held[entry] = number
    done.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert ReadStatus.HIT in statuses
    assert statuses <= {ReadStatus.HIT, ReadStatus.MISS}
