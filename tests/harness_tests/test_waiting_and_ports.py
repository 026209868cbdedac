"""The polling helpers, the port leases and the TOML writer."""

import math
import socket
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.ports import free_port
from tests.harness.processes import REPOSITORY
from tests.harness.toml_text import TomlTable, toml_text
from tests.harness.waiting import NeverHappenedError, eventually, eventually_async


def test_eventually_returns_the_first_true_value() -> None:
    values = iter([0, None, "", 7, 8])
    assert eventually(lambda: next(values), 5, "a value") == 7


def test_eventually_names_what_never_happened_and_what_it_saw_last() -> None:
    with pytest.raises(NeverHappenedError, match=r"the cat barks .*last seen: 0"):
        eventually(lambda: 0, 0.01, "the cat barks")


def test_eventually_asks_once_even_with_a_deadline_of_zero() -> None:
    assert eventually(lambda: "yes", 0, "at once") == "yes"


async def test_eventually_async_lets_the_loop_run_between_two_calls() -> None:
    asked: list[int] = []

    async def grows() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert await eventually_async(grows, 5, "three calls")
    assert len(asked) == 3


async def test_eventually_async_gives_up_at_its_deadline() -> None:
    async def never() -> bool:
        return False

    with pytest.raises(NeverHappenedError, match="pigs fly"):
        await eventually_async(never, 0.01, "pigs fly")


def test_a_free_port_can_be_bound_and_is_not_given_out_twice() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_leased_port_is_not_given_to_another_process() -> None:
    mine = free_port()
    code = (
        "import random; from tests.harness import ports\n"
        f"random.randint = iter([{mine}, {mine + 1}, {mine + 2}, {mine + 3}]).__next__\n"
        "random.randint = lambda low, high, it=random.randint: it()\n"
        "print(ports.free_port())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) != mine


def test_a_port_that_another_listens_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        after = free_port() + 1  # others may have taken some of those behind it
        offers = iter([port, *range(after, after + 50)])
        monkeypatch.setattr("random.randint", lambda _low, _high: next(offers))
        assert free_port() != port


def test_toml_of_a_nested_table_reads_back_equal() -> None:
    table: TomlTable = {
        "name": 'a "quoted"\n\x7f\\ name',
        "port": 1,
        "ratio": 0.5,
        "on": True,
        "list": ["a", "b"],
        "tls": {"cert": "x.pem", "deep.key": {"a b": -1}},
        "pools": [{"name": "p", "size": 3}],
    }
    assert tomllib.loads(toml_text(table)) == table


_scalars = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
)
_keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@settings(max_examples=50)
@given(st.dictionaries(_keys, _scalars | st.dictionaries(_keys, _scalars, max_size=3), max_size=4))
def test_any_toml_we_write_reads_back_equal(table: TomlTable) -> None:
    assert tomllib.loads(toml_text(table)) == table


def test_a_value_that_toml_lacks_is_refused() -> None:
    with pytest.raises(TypeError):
        toml_text({"a": None})  # type: ignore[dict-item]


def test_infinity_is_written_as_toml_knows_it() -> None:
    assert tomllib.loads(toml_text({"x": math.inf}))["x"] == math.inf
