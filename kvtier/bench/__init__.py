"""`kvtier bench NAME [--json] ...`: every performance figure of the project comes from here.

Each bench is a module of this package with `add_arguments(parser)` and
`run(arguments) -> list[Result]`. What must not live here: bars that a test checks; benches alone
measure time.
"""

from kvtier.bench.report import command

__all__ = ["command"]
