"""The benchmarks by name: where each is published, how it is asked, how often, and where its answer is found.

Invariant: the table in docs/evaluation.md is the one that ``markdown_table`` writes.
"""

from dataclasses import dataclass

from megasao.config.rollout import BenchmarksConfig
from megasao.environments.mathematics import BOXED_PROMPT
from megasao.environments.swebench.environment import NOTE

SAO = "arXiv 2607.07508"
ASYMPO = "arXiv 2606.03070"


@dataclass(frozen=True)
class Benchmark:
    """``published``: its data set at Hugging Face; ``samples``: responses a problem; ``setup``: where that stands.

    ``answer``: where it is found in a response, or ``tests``: hidden tests judge the work of up to ``turns`` turns.
    """

    name: str
    published: str
    samples: int
    setup: str
    answer: str = "boxed"
    template: str = BOXED_PROMPT
    turns: int = 1


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("aime2025", "MathArena/aime_2025", 16, SAO),
        Benchmark("beyondaime", "ByteDance-Seed/BeyondAIME", 4, SAO),
        Benchmark("hmmt_nov_2025", "MathArena/hmmt_nov_2025", 16, SAO),
        Benchmark("imoanswerbench", "Hwilner/imo-answerbench", 16, SAO),
        Benchmark("math500", "HuggingFaceH4/MATH-500", 8, ASYMPO),
        Benchmark("gsm8k", "openai/gsm8k", 8, ASYMPO),
        Benchmark("aime24", "HuggingFaceH4/aime_2024", 8, ASYMPO),
        Benchmark("amc23", "math-ai/amc23", 8, ASYMPO),
        Benchmark("minerva", "math-ai/minervamath", 8, ASYMPO),
        Benchmark("swebench_verified", "princeton-nlp/SWE-bench_Verified", 16, SAO, "tests", NOTE, 300),
    )
}


def markdown_table() -> str:
    """One line a benchmark; prompt ``boxed`` asks for the final answer in a box, ``agent`` says how to work."""
    lines = [
        "| name | published as | prompt | samples | turns | T, top-p | tokens | answer | set-up of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    longest = BenchmarksConfig.model_fields["max_tokens"].default
    for one in BENCHMARKS.values():
        prompt = "boxed" if one.template == BOXED_PROMPT else "agent"
        numbers = f"{one.samples} | {one.turns} | 1, 1 | {longest}"
        lines.append(f"| {one.name} | {one.published} | {prompt} | {numbers} | {one.answer} | {one.setup} |")
    return "\n".join(lines)
