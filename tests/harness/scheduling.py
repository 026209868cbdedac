"""Which test process gets which file: whole files, and those that start services in one of two.

Tests that start processes mostly wait; tests of the core mostly compute. Side by side they use two
cores well, and at most one crowd of services runs at a time. What must not live here: what a test
may rely on. Each passes alone, in any order, and on a machine of any speed.
"""

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

WAITING = frozenset(
    {
        "batch", "bench", "bridge", "deploy", "faults", "front", "harness_tests", "local",
        "peers", "ray", "services", "split", "telemetry", "ui", "versions", "vllm", "worker",
        "worker_http",
    }
)  # fmt: skip
"""Folders of tests most of whose time goes by in processes that they start."""

LONGEST = (
    "tests/versions/test_mixed_versions.py",
    "tests/services/test_rolling.py",
    "tests/local/test_demo.py",
    "tests/local/test_faults.py",
    "tests/deploy/test_kubernetes_pods.py",
    "tests/batch/test_batch_run.py",
    "tests/ray/test_ray_fleet.py",
    "tests/deploy/test_docker.py",
    "tests/split/test_split_requests.py",
    "tests/services/test_whole_path_tries.py",
    "tests/faults/test_store_processes.py",
    "tests/faults/test_peer_network.py",
    "tests/bench/test_cluster.py",
    "tests/local/test_up.py",
    "tests/services/test_whole_path.py",
    "tests/faults/test_index_lifecycle.py",
    "tests/worker/test_faults.py",
)
"""Files that begin first, so that none of them is left for the end."""


def order_of(path: str) -> int:
    """Where a test file comes in its queue: the smaller, the sooner."""
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)


def is_waiting(path: str) -> bool:
    """Whether a test file, named from the repository's root, starts services."""
    return not WAITING.isdisjoint(PurePosixPath(path).parts)


class TwoQueues(LoadFileScheduling):  # type: ignore[misc]
    """Files that start services go to every other test process first, the rest to the others."""

    def _assign_work_unit(self, node: object) -> None:
        """Give a process the next file of its queue, or of the other where that is empty."""
        wants_waiting = self.nodes.index(node) % 2 == 0
        chosen = min(
            self.workqueue, key=lambda path: (is_waiting(path) != wants_waiting, order_of(path))
        )
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
