"""Write a tiny random Qwen3-MoE checkpoint, an ordinary Hugging Face directory, for the laptop demo.

    python tools/make_laptop_model.py OUT [--seed 0] [--hidden 128] [--layers 2] [--experts 8] [--moe-hidden 96]

Every tag and every character of the environments is one token of its 32-token vocabulary.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasao.studies.tiny_model import write_model, write_tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--experts", type=int, default=8, help="routed experts (2 are used for each token); 0: dense")
    parser.add_argument("--moe-hidden", type=int, default=96, help="hidden size of one expert")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(given.out)
    write_model(
        given.out,
        seed=given.seed,
        hidden=given.hidden,
        layers=given.layers,
        experts=given.experts,
        moe_hidden=given.moe_hidden,
    )


if __name__ == "__main__":
    main()
