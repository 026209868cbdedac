"""Nodes, links and their faults; needs the right to make network namespaces."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import netns
from tests.harness.netns import Cut, Network, Node
from tests.harness.processes import Launch, ProcessRunner, python_module
from tests.harness.proxy import Direction, Faults, Flow, TcpProxy
from tests.harness.readiness import http_ready
from tests.harness.rights import requires_netns, requires_tbf, run_command
from tests.harness.waiting import eventually

pytestmark = requires_netns

PING = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    s.sendto(bytes(1000), (sys.argv[1], 9000))
"""
COUNTER = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 9000))
print("bound", flush=True)
while True:
    _, (host, _) = s.recvfrom(2000)
    print("from", host, flush=True)
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


def send(source: Node, target: Node, count: int = 1) -> None:
    """Send datagrams; whether they arrive is the link's affair."""
    source.run(*python(PING, target.address, str(count)))


def start_counters(processes: ProcessRunner, *nodes: Node) -> None:
    for node in nodes:
        process = processes.spawn(Launch(node.name, python(COUNTER), prefix=node.prefix))
        eventually(lambda p=process: "bound" in p.log_text(), 10, f"{node.name} listens")  # type: ignore[misc]


def heard(processes: ProcessRunner, node: Node, source: Node) -> int:
    return processes[node.name].log_text().count(f"from {source.address}\n")


def test_nodes_reach_each_other_until_one_direction_is_cut(
    network: Network, processes: ProcessRunner
) -> None:
    a, b, c = (network.add_node(name) for name in "abc")
    start_counters(processes, a, b, c)
    send(a, b)
    send(b, a)
    eventually(lambda: heard(processes, b, a) == 1 and heard(processes, a, b) == 1, 10, "both hear")

    network.cut(a, b)
    assert network.is_cut(a, b)
    assert not network.is_cut(b, a)
    sent_before = a.counters().tx_packets
    send(a, b, 5)
    send(b, a, 2)
    send(a, c)
    eventually(lambda: heard(processes, a, b) == 3, 10, "the open direction works")
    eventually(lambda: heard(processes, c, a) == 1, 10, "the other link works")
    assert a.counters().tx_packets - sent_before >= 6, "the lost packets were sent"
    assert heard(processes, b, a) == 1

    network.heal(a, b)
    send(a, b)
    eventually(lambda: heard(processes, b, a) == 2, 10, "it is healed")


@pytest.mark.parametrize("kind", [Cut.BLACKHOLE, Cut.UNREACHABLE])
def test_a_cut_by_route_tells_the_sender(network: Network, kind: Cut) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    network.cut(a, b, kind)
    with pytest.raises(OSError, match=r"(Invalid argument|No route to host)"):
        send(a, b)
    send(b, a)
    network.heal_all()
    send(a, b)
    assert not network.is_cut(a, b)


def test_a_partition_cuts_every_link_between_two_sides(
    network: Network, processes: ProcessRunner
) -> None:
    a, b, c = (network.add_node(name) for name in "abc")
    start_counters(processes, b, c)
    network.partition([a], [b, c])
    assert all(network.is_cut(*pair) for pair in ((a, b), (b, a), (a, c), (c, a)))
    assert not network.is_cut(b, c)
    send(a, b)
    send(c, b)
    eventually(lambda: heard(processes, b, c) == 1, 10, "the same side hears")
    assert heard(processes, b, a) == 0
    network.heal_all()
    send(a, c)
    eventually(lambda: heard(processes, c, a) == 1, 10, "healed")


def test_an_unplugged_node_hears_nothing_until_it_is_plugged(
    network: Network, processes: ProcessRunner
) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    start_counters(processes, b)
    send(a, b)
    eventually(lambda: heard(processes, b, a) == 1, 10, "plugged in")
    network.unplug(b)
    before = b.counters().rx_packets
    send(a, b, 3)
    assert b.counters().rx_packets == before
    network.plug(b)

    def arrives() -> bool:
        send(a, b)
        return heard(processes, b, a) > 1

    eventually(arrives, 10, "plugged in again")


def test_each_node_has_its_own_shm_and_data_and_shares_them_among_its_processes(
    network: Network,
) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    a.run("sh", "-c", "echo shm > /dev/shm/mark && echo data > mark")
    assert a.run("cat", "/dev/shm/mark", "mark") == "shm\ndata\n"
    assert b.run("sh", "-c", "ls /dev/shm; ls") == ""
    assert not Path("/dev/shm/mark").exists()
    assert a.data_directory == b.data_directory
    assert (a.host_data_directory / "mark").read_text() == "data\n"
    assert not list(b.host_data_directory.iterdir())


def test_a_server_in_a_node_is_reached_from_outside_through_a_proxy(
    network: Network, processes: ProcessRunner
) -> None:
    a = network.add_node("a")
    argv = python_module("http.server", "--bind", "127.0.0.1", "8000")
    with TcpProxy(a.dial(8000)) as proxy:
        ready = http_ready(f"http://{proxy.address}/")
        server = processes.start(Launch("web", argv, prefix=a.prefix, ready=ready))
        assert not http_ready("http://127.0.0.1:8000/")(), "it must not listen outside its node"
        proxy.set(Direction.TO_SERVER, Faults(flow=Flow.HOLD))
        assert not ready()
        proxy.heal()
        assert ready()
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"http.server" in command, "the pid is the command's own"
        server.kill()
        assert not ready()


@requires_tbf
def test_a_bandwidth_limit_is_in_force_and_can_be_lifted(
    network: Network, processes: ProcessRunner
) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    start_counters(processes, b)
    network.limit_egress(a, 100_000)
    network.limit_ingress(b, 100_000)
    network.limit_ingress(b, 200_000)
    assert "rate 800Kbit" in a.run("tc", "qdisc", "show", "dev", "eth0")
    send(a, b, 500)
    assert a.counters().tx_packets < 250, "the queue holds 0.2 s, the rest is dropped"
    network.unlimit(a)
    network.unlimit(b)
    assert "tbf" not in a.run("tc", "qdisc", "show", "dev", "eth0")
    before = a.counters().tx_packets
    send(a, b, 500)
    assert a.counters().tx_packets - before >= 500


def test_counters_tell_the_bytes_of_the_link(network: Network) -> None:
    a, b = network.add_node("a"), network.add_node("b")
    send(a, b)
    before = a.counters()
    send(a, b, 10)
    after = a.counters()
    datagram_bytes = 1000 + 8 + 20 + 14
    # Besides, the node may answer an ARP probe or two.
    assert 10 <= after.tx_packets - before.tx_packets <= 12
    assert 0 <= after.tx_bytes - before.tx_bytes - 10 * datagram_bytes < datagram_bytes


def test_nothing_is_left_after_a_failure_inside(tmp_path: Path) -> None:
    class OnPurposeError(Exception):
        pass

    seen: list[str] = []
    strays: list[subprocess.Popen[bytes]] = []

    def run() -> None:
        with Network(tmp_path) as network:
            node = network.add_node("a")
            seen.extend(netns.our_namespaces())
            stray = subprocess.Popen([*node.prefix, "sleep", "600"])
            strays.append(stray)
            eventually(
                lambda: str(stray.pid) in run_command("ip", "netns", "pids", node.namespace),
                10,
                "the stray runs in the node",
            )
            raise OnPurposeError

    with pytest.raises(OnPurposeError):
        run()
    assert len(seen) == 2, "the node and the switch"
    assert strays[0].wait(10) == -signal.SIGKILL
    assert netns.our_namespaces() == []
    assert not (tmp_path / "data-of-a").exists()


def test_namespaces_of_a_dead_test_process_are_swept(network: Network) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"kvt-{dead.pid}-0-left"
    run_command("ip", "netns", "add", name)
    assert name in netns.sweep_dead_owners()
    assert not Path(f"/run/netns/{name}").exists()
    assert netns.our_namespaces() != [], "those of the living stay"


def test_names_that_cannot_be_nodes_are_refused(network: Network) -> None:
    network.add_node("a")
    for name in ("a", "switch", "", "../x", "A"):
        with pytest.raises(ValueError, match="node"):
            network.add_node(name)
