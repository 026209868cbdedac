"""What loading a model does to the process besides: progress bars, memory that is left over.

What must not live here: models.
"""

import ctypes
import functools
import gc
import sys

from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging


def bars_on_terminals_only() -> None:
    """Keep the libraries' progress bars out of log files. Mutates their settings."""
    if sys.stderr.isatty():
        return
    logging.disable_progress_bar()
    disable_progress_bars()
    _silence_plain_bars()


@functools.cache
def _silence_plain_bars() -> None:
    """transformers' reader of GGUF draws a plain tqdm, which no setting of either reaches."""
    tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)


def give_back_memory() -> None:
    """Return to the system what loading has freed: glibc keeps it otherwise. A second at most."""
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    trim(0)
