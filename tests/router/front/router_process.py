"""`kvtier router` with the fake brain, for tests of the front in a process of its own."""

import asyncio
import sys

from kvtier.config import load
from kvtier_router.config import RouterConfig
from kvtier_router.main import run
from tests.router.front.fake_brain import fake_brain

if __name__ == "__main__":
    asyncio.run(run(load(RouterConfig, sys.argv[1:]).config, fake_brain))
