"""What loading a model does to the process besides: progress bars, memory that is left over.

What must not live here: models.
"""

import ctypes
import gc
import sys

from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils import logging


def bars_on_terminals_only() -> None:
    """Keep the libraries' progress bars out of log files. Mutates their settings."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
        disable_progress_bars()


def give_back_memory() -> None:
    """Return to the system what loading has freed: glibc keeps it otherwise. A second at most."""
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # another C library
        return
    trim(0)
