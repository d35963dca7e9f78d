"""Write the small twin of a model's config.json: ``tools/shrink_config.py configs/models/glm_5_2.json OUT.json``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megasao.config.architecture import read_architecture
from megasao.families.shrink import shrink


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="config.json of a model")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--vocabulary", type=int, default=32, help="tokens of the twin")
    given = parser.parse_args(arguments)
    twin = shrink(read_architecture(given.source), vocabulary=given.vocabulary)
    given.out.write_text(json.dumps(twin, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
