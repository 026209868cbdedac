"""`kvtier router` with the fake brain, for tests of the front in a process of its own."""

import sys

from kvtier.config import load
from kvtier_router.config import RouterConfig
from kvtier_router.main import run_processes
from tests.router.front.fake_brain import fake_brain

if __name__ == "__main__":
    sys.exit(run_processes(load(RouterConfig, sys.argv[1:]).config, fake_brain))
