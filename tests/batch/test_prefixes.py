"""Keys of prefixes, the walk that says who waits for whom, and estimates, against naive twins."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.batch.estimate import Engines, TextCache
from kvtier.batch.prefixes import PLACES, Walk, depth_of, key_of, pieces_of, shared_bytes

PARTS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12)
PIECE = 128


def text_of(parts: list[bytes]) -> bytes:
    return b"".join(part * PIECE for part in parts)


def naive_shared(one: bytes, other: bytes) -> int:
    most = min(len(one), len(other))
    same = next((at for at in range(most) if one[at] != other[at]), most)
    return max((place for place in PLACES if place <= same), default=0)


@given(PARTS, PARTS, st.binary(max_size=200))
def test_two_keys_share_what_their_texts_share_down_to_a_whole_piece(
    one: list[bytes], other: list[bytes], tail: bytes
) -> None:
    first, second = text_of(one) + tail, text_of(other) + tail
    assert shared_bytes(key_of(first), key_of(second)) == naive_shared(first, second)


@given(PARTS, st.binary(max_size=200))
def test_a_key_says_how_deep_it_goes_and_its_pieces_add_up(one: list[bytes], tail: bytes) -> None:
    text = text_of(one) + tail
    key = key_of(text)
    assert depth_of(key) == naive_shared(text, text)
    assert sum(size for _, size in pieces_of(key)) == depth_of(key)


def test_places_grow_so_that_a_megabyte_needs_few() -> None:
    assert len(key_of(bytes(1 << 20))) <= 4 * 80
    assert key_of(b"x" * 127) == b""
    assert len(key_of(bytes(16 << 20))) == 4 * len(PLACES)


@given(st.lists(PARTS, max_size=40))
def test_the_walk_names_the_first_that_has_what_a_prompt_shares_with_the_one_before(
    prompts: list[list[bytes]],
) -> None:
    keys = sorted(key_of(text_of(parts)) for parts in prompts)
    walk: Walk[int] = Walk()
    before = b""
    for at, key in enumerate(keys):
        shared = shared_bytes(before, key)
        first = walk.enter(shared, depth_of(key), at)
        having = [n for n, other in enumerate(keys[:at]) if shared_bytes(other, key) >= shared]
        assert first == (having[0] if shared else None)
        before = key


def naive_found(prompts: list[bytes], bytes_max: int) -> int:
    """The same cache as a list, least recently used first."""
    held: list[bytes] = []
    found = 0
    for text in prompts:
        prefixes = [text[:place] for place in PLACES if place <= len(text)]
        sizes = {prefix: len(prefix) - len(text[: len(prefix) - PIECE]) for prefix in prefixes}
        for prefix in prefixes:
            if prefix not in held:
                break
            found += sizes[prefix]
        for prefix in reversed(prefixes):
            if prefix in held:
                held.remove(prefix)
            held.append(prefix)
        while len(held) * PIECE > bytes_max:
            held.pop(0)
    return found


@given(st.lists(st.lists(st.sampled_from([b"a", b"b"]), max_size=7), max_size=30))
def test_an_estimate_is_what_a_least_recently_used_cache_finds(prompts: list[list[bytes]]) -> None:
    texts = [text_of(parts) for parts in prompts]
    for pieces in (2, 5, 100):
        cache = TextCache(pieces * PIECE)
        for text in texts:
            cache.take(key_of(text), len(text))
        assert cache.found_bytes == naive_found(texts, pieces * PIECE)
        assert cache.text_bytes == sum(map(len, texts))


def test_engines_that_take_turns_find_less_than_one_cache_of_all_of_them() -> None:
    engines = Engines([TextCache(1 << 20), TextCache(1 << 20)])
    whole = TextCache(2 << 20)
    for _ in range(3):
        for engine in (engines, whole):
            engine.take(key_of(b"x" * 1024), 1024)
    assert (engines.found_bytes, whole.found_bytes) == (1024, 2048)
