"""What the bench between stores makes of its measurements, and the far end it compares with."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.bench.peers_raw import Area, Hashing, RawPeer
from kvtier.bench.peers_split import SMOLLM2, Measured, results_of
from kvtier.bench.report import Bar

KIB = 1 << 10


@pytest.fixture(scope="module")
def raw() -> Iterator[RawPeer]:
    argv = [sys.executable, "-m", "kvtier.bench.peers_raw", str(512 * KIB)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    peer = RawPeer(int(process.stdout.readline()), process.pid)
    try:
        yield peer
    finally:
        peer.close()
        process.wait(60)
        process.stdout.close()


def areas(value: int) -> list[Area]:
    return list(np.full((4, 64 * KIB), value, np.uint8))


@pytest.mark.parametrize("hashing", list(Hashing))
def test_raw_tcp_takes_bytes_and_gives_them_back(raw: RawPeer, hashing: Hashing) -> None:
    raw.put(areas(7), hashing)
    into = areas(0)
    raw.get(areas(0), Hashing.NONE)  # the far end goes round in its memory
    raw.get(into, hashing)
    assert all((part == 7).all() for part in into)


def test_only_pairs_whose_prompt_came_from_the_other_node_are_compared() -> None:
    measured = Measured(shares=[1.0, 0.0, 1.0], uncounted=1)
    measured.pairs.add(1.0, 2.0)
    measured.pairs.add(1.2, 2.0)
    ratio, split, one, share, left_out, differing = results_of(SMOLLM2, measured)
    assert (ratio.value, ratio.bar, ratio.kind) == (0.55, 1.15, Bar.AT_MOST)
    assert (split.value, one.value) == (1100.0, 2000.0)
    assert (share.value, left_out.value) == (1.0, 1.0)
    assert differing.ok


def test_a_split_answer_with_other_tokens_misses_a_bar() -> None:
    measured = Measured(shares=[1.0], differing=1)
    measured.pairs.add(1.0, 1.0)
    assert not all(result.ok for result in results_of(SMOLLM2, measured))
