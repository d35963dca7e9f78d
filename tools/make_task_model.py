"""Write a tiny random Qwen3-MoE checkpoint whose vocabulary is that of a config's task, at the config's ``model.path``.

    python tools/make_task_model.py CONFIG [CHANGE ...] [--seed 0] [--spaces-apart] [--hidden 128] [--layers 2]

A token is a tag, a line break with the indentation after it, a word or digit with the space before it, or any other
character, as they occur in the first problems and demonstrations of the task. What did not occur there is written in
characters; one that is not ASCII, and did not occur, is an error when it comes up. With --spaces-apart a word is one
token, whether a space stands before it or not, so that a name can be copied from anywhere.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from megasao.config.load import load_config
from megasao.environments.base import Environment
from megasao.environments.registry import make_environment
from megasao.studies.tiny_model import SPECIAL, write_model, write_tokenizer

PIECES = r"</?[a-z_]+>|\n *| ?[A-Za-z_]+| ?[0-9]|[\s\S]"
SPACES_APART = PIECES.replace(" ?", "")
ASCII = "\n" + "".join(map(chr, range(32, 127)))
DRAWS = 3000
ALIGNMENT = 8
"""The vocabulary's size is a multiple of this, so that it can be split over ranks."""


def vocabulary(environment: Environment, pieces: str) -> list[str]:
    """Every piece of the task's text, after the special tokens, in order of first appearance."""
    texts = [*environment.stop_strings, *(f"{space}{digit}" for space in ("", " ") for digit in range(10))]
    for index in range(DRAWS):
        texts += [environment.prompt(split, index).text for split in ("train", "eval")]
        texts += [turn.text for turn in environment.demonstration(index, 0)]
    found = dict.fromkeys(piece for text in texts for piece in re.findall(pieces, text))
    return [*SPECIAL, *found, *(character for character in ASCII if character not in found)]


def longest_first(tokens: Sequence[str]) -> str:
    """The pattern that cuts text into the longest of these tokens, and what is in none of them into characters."""
    known = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return "|".join([*map(re.escape, known), r"[\s\S]"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config file")
    parser.add_argument("changes", nargs="*", help="changes to it, key.path=value")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--spaces-apart", action="store_true", help="a space is a token of its own")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--experts", type=int, default=8, help="routed experts (2 are used for each token); 0: dense")
    given = parser.parse_args(arguments)
    config = load_config(given.config, given.changes)
    out = Path(config.model.path)
    out.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary(make_environment(config.environment), SPACES_APART if given.spaces_apart else PIECES)
    tokens += [f"<reserved{number}>" for number in range(-len(tokens) % ALIGNMENT)]
    write_tokenizer(out, tokens, longest_first(tokens))
    write_model(
        out,
        seed=given.seed,
        hidden=given.hidden,
        layers=given.layers,
        experts=given.experts,
        moe_hidden=96,
        vocabulary_size=len(tokens),
    )
    print(f"{out}: {len(tokens)} tokens")


if __name__ == "__main__":
    main()
