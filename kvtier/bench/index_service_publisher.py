"""A worker process of the index service bench: holds chains, publishes them, answers to signals.

`python -m kvtier.bench.index_service_publisher TARGET NAME BLOCKS SEED` says `port=0` on its
standard error once every block is acknowledged. Its chains are those that `chains` makes of SEED.
"""

import argparse
import signal
import sys
from typing import Final

import numpy as np

from kvtier.bench.index_service_processes import BenchError
from kvtier.bench.index_service_streams import CHAIN, Blocks, random_blocks, worker
from kvtier.core.event_columns import NO_PARENT
from kvtier.publisher import Publisher
from kvtier.sections import DialConfig
from kvtier.types import Tier

READY_S_MAX: Final = 60.0


def chains(seed: int, blocks: int) -> Blocks:
    """u64[n, 64]: what a worker of that seed holds."""
    return random_blocks(np.random.default_rng(seed), blocks // CHAIN, CHAIN)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("name")
    parser.add_argument("blocks", type=int)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Publisher(worker(arguments.name), DialConfig(targets=(arguments.target,))) as publisher:
        for chain in chains(arguments.seed, arguments.blocks):
            publisher.store(Tier.GPU, NO_PARENT, chain)
        if not publisher.flush(READY_S_MAX):
            raise BenchError("the index did not acknowledge everything")
        sys.stderr.write("ready port=0\n")
        sys.stderr.flush()
        while True:
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
