"""Make the support table in docs/vllm.md of what tests have shown.

    make test-vllm && make support-table

Results of a version replace what was known of it; those of others stay
(docs/measurements/support.json).
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.engine_support import Shown, rendered  # noqa: E402

KNOWN = ROOT / "docs" / "measurements" / "support.json"
PAGE = ROOT / "docs" / "vllm.md"
BEGIN = "<!-- support: made by scripts/vllm_support_table.py -->\n"
END = "<!-- end of support -->\n"


def read(folder: Path) -> list[Shown]:
    """All results of a folder."""
    return [Shown(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def known() -> list[Shown]:
    """What is written down."""
    return [Shown(**one) for one in json.loads(KNOWN.read_text())] if KNOWN.exists() else []


def main(folder: str) -> None:
    """See the module."""
    new = read(Path(folder))
    anew = {(one.engine, one.version, one.kind) for one in new}
    kept = [one for one in known() if (one.engine, one.version, one.kind) not in anew]
    results = sorted([*kept, *new], key=lambda one: tuple(asdict(one).values()))
    text = json.dumps([asdict(one) for one in results], indent=1)
    KNOWN.write_text(text + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}{rendered(results)}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
