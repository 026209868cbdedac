"""`kvtier batch`: an offline batch on the command line. What must not live here: what it does."""

import json
import sys
from typing import Final

from kvtier.batch.running import run
from kvtier.batch.settings import BatchConfig
from kvtier.batch.summary import summary_of
from kvtier.config import describe, load

FAILED_ROWS: Final = 3


def command(argv: list[str]) -> int:
    """Entry point of `kvtier batch`. Exit status 0: every row was answered, 3: some failed, which
    results and summary tell; 1: it ended early and can be started again."""
    loaded = load(BatchConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    ended = run(loaded.config, tell)
    sys.stdout.write(json.dumps(summary_of(ended, loaded.config), indent=1) + "\n")
    return FAILED_ROWS if ended.totals.failed else 0


def tell(text: str) -> None:
    """A line of progress, to standard error."""
    sys.stderr.write(f"kvtier batch: {text}\n")
    sys.stderr.flush()
