"""`kvtier bench NAME [--json] ...`: every performance figure of the project comes from here.

Each bench is a module of this package with `run(arguments) -> list[Result]` and `add_arguments(parser)`.
"""

from kvtier.bench.report import command

__all__ = ["command"]
