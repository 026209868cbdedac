"""The wheel of this tree, built once a run, with the native module of the tests' environment.

The native core takes a minute to build and is built already. What must not live here: what a test
expects of a wheel.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kvtier import _native
from tests.harness.processes import REPOSITORY

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kvtier", "services", "router")
"""Of the repository's root: all that a wheel is made of."""
BUILD_S = 170.0


def built_wheel(factory: pytest.TempPathFactory) -> Path:
    """The path of the wheel, which is made of SOURCES alone.

    Test processes that run side by side share it. The first call takes some seconds.
    """
    base = factory.getbasetemp()
    # With pytest-xdist each process has a folder of its own below the run's.
    root = base.parent if base.name.startswith("popen-") else base
    home = root / "this-wheel"
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "ready").exists():
            _build(home)
            (home / "ready").touch()
    [wheel] = (home / "dist").glob("*.whl")
    return wheel


def _build(home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home) as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for name in SOURCES:
            at = REPOSITORY / name
            if at.is_dir():
                left_out = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(at, source / name, ignore=left_out)
            else:
                shutil.copyfile(at, source / name)
        argv = [sys.executable, "-m", "pip", "wheel", str(source), "--quiet", "--no-deps"]
        argv += ["--no-index", "--no-build-isolation", "--wheel-dir", str(home / "dist")]
        argv += ["-C", "wheel.cmake=false", "-C", f"build-dir={folder}/build"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_S, check=False)
        assert done.returncode == 0, done.stderr
    [wheel] = (home / "dist").glob("*.whl")
    native = Path(str(_native.__file__))
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_STORED) as archive:
        archive.write(native, f"kvtier/{native.name}")
