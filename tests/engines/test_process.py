"""What loading leaves behind: nothing in log files."""

import subprocess
import sys

_CODE = """
from kvtier.engines.transformers.process import bars_on_terminals_only, give_back_memory
bars_on_terminals_only()
bars_on_terminals_only()
import tqdm, tqdm.auto
from transformers.utils import logging
for bar in (tqdm.tqdm, tqdm.auto.tqdm, logging.tqdm):
    assert sum(bar(range(5))) == 10
give_back_memory()
"""


def test_no_progress_bar_is_drawn_into_a_file() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, check=True, text=True)
    assert done.stderr == ""
    assert done.stdout == ""
