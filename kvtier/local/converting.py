"""Makes SmolLM2 in the user's cache: `python -m kvtier.local.converting [UNPACKED_WHEEL]`.

A process of its own: it needs 1.5 GB of memory, and the wheel on its path. What must not live here:
downloads.
"""

import sys


def main(argv: list[str]) -> int:
    """See the module."""
    sys.path[:0] = argv
    from kvtier.engines.transformers.sources import SMOLLM2, resolve

    resolve(SMOLLM2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
