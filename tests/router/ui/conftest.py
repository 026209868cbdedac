"""The rigs of the front's tests."""

from tests.router.front.conftest import rig

__all__ = ["rig"]
