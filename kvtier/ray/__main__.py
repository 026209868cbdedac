"""`python -m kvtier.ray`."""

import sys

from kvtier.errors import KvtierError
from kvtier.ray.command import command

if __name__ == "__main__":
    try:
        sys.exit(command(sys.argv[1:]))
    except KvtierError as error:
        sys.stderr.write(f"kvtier.ray: {error}\n")
        sys.exit(1)
