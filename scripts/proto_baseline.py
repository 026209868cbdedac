"""Write proto/baseline.json, what readers of the committed protos rely on; refuse to break it."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.wire.test_descriptors import BASELINE, breaks, described  # noqa: E402


def main() -> int:
    new = described()
    if BASELINE.exists():
        found = breaks(json.loads(BASELINE.read_text(encoding="utf-8")), new)
        for line in found:
            sys.stderr.write(f"breaking change: {line}\n")
        if found:
            return 1
    BASELINE.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
