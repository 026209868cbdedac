"""The version before this one, built from its tag, beside the one under test.

Its wheel is made once from the sources in git and kept in `.previous/`; it runs on the third-party
packages of the tests' own environment. What must not live here: what a test expects of it.
"""

import fcntl
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from tests.harness.processes import REPOSITORY

TAG = "v0.1.0"
COMMIT = "973ab95e599c843ecea645c42d81cdfec5afa449"
"""What the tag names: a clone may come without tags."""
BUILD_S = 600.0
_ROOT = REPOSITORY / ".previous"


def why_not() -> str | None:
    """Why it cannot be built here; None where it can."""
    known = _git("cat-file", "-e", f"{COMMIT}^{{tree}}").returncode == 0
    return None if known else f"the commit of {TAG} is not in this clone: fetch all of its history"


def previous_command() -> Path:
    """The `kvtier` of the version before; built at the first call, which takes a minute or two."""
    home = _ROOT / COMMIT[:12]
    command = home / "env" / "bin" / "kvtier"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may want it at once
        if not (home / "ready").exists():
            _build(home, command)
            (home / "ready").touch()
    return command


def _build(home: Path, command: Path) -> None:
    source, wheels = home / "source", home / "wheels"
    source.mkdir(exist_ok=True)
    archive = _git("archive", "--format=tar", COMMIT)
    archive.check_returncode()
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    argv = [sys.executable, "-m", "pip", "wheel", str(source), "--quiet", "--no-deps"]
    argv += ["--no-index", "--no-build-isolation", "--wheel-dir", str(wheels)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=BUILD_S, env=os.environ | {"PATH": path}
    )
    assert done.returncode == 0, done.stderr
    venv.create(home / "env", clear=True, symlinks=True)
    [packages] = (home / "env" / "lib").glob("python*/site-packages")
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_of_it:
        archive_of_it.extractall(packages)
    shared = [entry for entry in sys.path if entry.endswith("site-packages")]
    (packages / "tests_environment.pth").write_text("\n".join(shared) + "\n")
    python = home / "env" / "bin" / "python"
    command.write_text(
        f"#!{python}\nimport sys\n\nfrom kvtier.cli import main\n\nsys.exit(main())\n"
    )
    command.chmod(0o755)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, timeout=60, check=False
    )
