"""A chain of digit operations, written out step by step in one turn: the fast task of the studies.

    <problem>7+5*3-4</problem> 523642</answer>

From the first digit on, each operation is applied to the result so far, modulo 10, in reading order. The response
repeats the operand and gives the result of each operation, then closes with ``</answer>``: 2 n + 1 tokens for n
operations. It earns 1 only if every digit is right. With ``styles`` it begins with a style, ``(`` or ``)``, and earns
1 only if its style is also the one that is wanted at the time (the online-learning simulation of arXiv 2607.07508):
``(`` at first, the other one from training problem ``first_switch`` on, ``(`` again from ``second_switch`` on.

Invariants:
- a problem's text is ``eval`` if and only if its hash says so, so the splits share no problem;
- a prompt, and the style that it wants, is a function of (options, split, index) alone;
- held-out problems want the first style.
"""

import random
from dataclasses import dataclass

from megasao.environments.base import DemonstrationTurn, Episode, Prompt, Split, StepResult, check_place
from megasao.environments.options import OptionsEnvironment
from megasao.environments.splits import split_of, text_hash

STYLES = "()"
STOP = "</answer>"


@dataclass(frozen=True)
class ChainOptions:
    """Options under ``environment.options``."""

    seed: int = 0
    operations: int = 6
    wrong_results: float = 0.25
    """Probability that a demonstration gives a wrong result, at each operation; it goes on from there."""
    styles: bool = False
    first_switch: int = 0
    """Training problem from which on the other style is wanted; 0 is never."""
    second_switch: int = 0
    """Training problem from which on the first style is wanted again; 0 is never."""

    def __post_init__(self) -> None:
        if self.operations < 1:
            raise ValueError(f"environment.options.operations: expected 1 or more, got {self.operations}")
        if not 0 <= self.wrong_results <= 1:
            raise ValueError(
                f"environment.options.wrong_results: expected a probability in [0, 1], got {self.wrong_results}"
            )
        for name in ("first_switch", "second_switch"):
            if getattr(self, name) < 0:
                raise ValueError(f"environment.options.{name}: expected 0 or more, got {getattr(self, name)}")
        if self.first_switch and not self.styles:
            raise ValueError("environment.options.first_switch: without styles = true there is nothing to switch")
        if self.second_switch and self.second_switch <= self.first_switch:
            raise ValueError(
                f"environment.options.second_switch: expected more than first_switch = {self.first_switch}, "
                f"got {self.second_switch}"
            )
        if self.second_switch and not self.first_switch:
            raise ValueError("environment.options.second_switch: needs a first_switch")


def apply(operator: str, left: int, right: int) -> int:
    """The result of one operation, modulo 10."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def solution(chain: str) -> str:
    """Operand and result of each operation of a chain such as ``7+5*3``: ``5236``."""
    value, written = int(chain[0]), []
    for operator, operand in zip(chain[1::2], chain[2::2], strict=True):
        value = apply(operator, value, int(operand))
        written += [operand, str(value)]
    return "".join(written)


class ChainEpisode(Episode):
    """One chain being solved, in one turn."""

    def __init__(self, answer: str, style: str) -> None:
        self._answer, self._style = answer, style

    async def step(self, action_text: str) -> StepResult:
        """Score the response."""
        style = action_text[: len(self._style)]
        right = action_text[len(self._style) :] == f"{self._answer}{STOP}"
        reward = float(right and style == self._style)
        return StepResult("", reward, True, {"right": float(right), "style": float(style == self._style)})


class ChainEnvironment(OptionsEnvironment[ChainOptions]):
    """Chains of operations on digits."""

    name = "chain"
    options_type = ChainOptions

    def __init__(self, options: ChainOptions | None = None) -> None:
        super().__init__(options or ChainOptions())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The end of the response."""
        return (STOP,)

    def prompt(self, split: Split, index: int) -> Prompt:
        """The problem with this index; ValueError below 0 or for an unknown split."""
        check_place(split, index)
        chain = self._chain(split, split, index)
        return Prompt(
            prompt_id=f"chain/{split}/{index}",
            task=f"chain_{self.options.operations}",
            text=f"<problem>{chain}</problem>",
            payload={"answer": solution(chain), "style": self.wanted_style(split, index)},
        )

    def wanted_style(self, split: Split, index: int) -> str:
        """The style that earns reward; empty without styles."""
        options = self.options
        if not options.styles:
            return ""
        if split == "eval" or not options.first_switch or index < options.first_switch:
            return STYLES[0]
        return STYLES[0] if options.second_switch and index >= options.second_switch else STYLES[1]

    def start(self, prompt: Prompt, seed: int) -> ChainEpisode:
        """Begin an episode; nothing in it is random."""
        return ChainEpisode(prompt.payload["answer"], prompt.payload["style"])

    def demonstration(self, index: int, seed: int) -> list[DemonstrationTurn]:
        """A demonstration on a training problem with mistakes, in either style."""
        if index < 0:
            raise ValueError(f"demonstration index: expected 0 or more, got {index}")
        chain = self._chain("train", f"demonstration-{seed}", index)
        generator = random.Random(text_hash("chain-mistakes", self.options.seed, seed, index))
        written = [generator.choice(STYLES)] if self.options.styles else []
        value = int(chain[0])
        for operator, operand in zip(chain[1::2], chain[2::2], strict=True):
            value = apply(operator, value, int(operand))
            if generator.random() < self.options.wrong_results:
                value = (value + generator.randint(1, 9)) % 10
            written += [operand, str(value)]
        problem = DemonstrationTurn(f"<problem>{chain}</problem>", False)
        return [problem, DemonstrationTurn("".join(written) + STOP, True)]

    def _chain(self, split: Split, stream: str, index: int) -> str:
        """The first drawn chain of this stream and index that lies in ``split``."""
        generator = random.Random(text_hash("chain-problem", self.options.seed, stream, index))
        while True:
            chain = str(generator.randrange(10)) + "".join(
                generator.choice("+-*") + str(generator.randrange(10)) for _ in range(self.options.operations)
            )
            if split_of(self.name, chain) == split:
                return chain
