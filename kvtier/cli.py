"""The command `kvtier`: dispatches to the entry points of the group `kvtier.commands`.

A subcommand is a callable `(argv) -> exit status`; it is imported only when called, so the command
line imports nothing upward and costs nothing for the services that are not asked for. What must
not live here: any subcommand.
"""

import sys
from importlib.metadata import EntryPoint, entry_points

from kvtier import __version__
from kvtier.errors import KvtierError

GROUP = "kvtier.commands"
USAGE_STATUS = 2


def commands() -> dict[str, EntryPoint]:
    """All installed subcommands by name. Loads none of them."""
    return {point.name: point for point in entry_points(group=GROUP)}


def usage() -> str:
    names = "\n".join(f"  {name}" for name in sorted(commands()))
    return f"usage: kvtier COMMAND [ARGUMENTS]\n       kvtier --version\n\ncommands:\n{names}\n"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status; errors of ours print one line and give 1."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help"}:
        sys.stdout.write(usage())
        return 0 if arguments else USAGE_STATUS
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        sys.stdout.write(f"kvtier {__version__}\n")
        return 0
    point = commands().get(name)
    if point is None:
        sys.stderr.write(f"kvtier: no command {name!r}\n\n{usage()}")
        return USAGE_STATUS
    try:
        status: int = point.load()(rest)
    except KvtierError as error:
        sys.stderr.write(f"kvtier {name}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return status
