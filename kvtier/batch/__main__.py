"""`python -m kvtier.batch`, where the command line is not installed."""

import sys

from kvtier.batch.command import command
from kvtier.errors import KvtierError

if __name__ == "__main__":
    try:
        sys.exit(command(sys.argv[1:]))
    except KvtierError as error:
        sys.stderr.write(f"kvtier batch: {error}\n")
        sys.exit(1)
