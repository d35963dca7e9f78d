"""Mathematical answers through the real verifiers: 500 adversarial ones, and how answers are found in a text."""

import asyncio

import pytest

from megasao.environments.answers import MAX_ANSWER, find_answer
from megasao.environments.verifiers.pool import Limits, VerifierError, VerifierPool
from tests.verifiers.adversarial import FAMILIES, cases

MODULE = ["megasao.environments.verifiers.mathematics"]


def verdicts(pairs, limits):
    """right, wrong or excluded for each (answer, reference)."""

    async def one(pool, answer, reference):
        try:
            return "right" if await pool.grade("math", answer=answer, reference=reference) else "wrong"
        except VerifierError:
            return "excluded"

    async def body():
        async with VerifierPool(MODULE, limits) as pool:
            return await asyncio.gather(*(one(pool, *pair) for pair in pairs))

    return asyncio.run(body())


def test_500_adversarial_answers(tmp_path):
    canary = tmp_path / "canary"
    found = cases(str(canary))
    assert len(found) == sum(count for _, count, _ in FAMILIES) == 500
    verdict_of = {}
    # What is expensive may be stopped by its time; the others have more than the slowest machine needs for them.
    for expensive, seconds in ((True, 1.0), (False, 60.0)):
        part = [case for case in found if (case.family == "expensive") is expensive]
        limits = Limits(2, time_limit_s=seconds, memory_bytes=1 << 29)
        verdict_of |= zip(part, verdicts([(case.answer, case.reference) for case in part], limits), strict=True)
    bad = [(case, verdict) for case, verdict in verdict_of.items() if verdict not in case.verdicts]
    assert not bad
    assert not canary.exists()
    assert {"right", "wrong", "excluded"} == set(verdict_of.values())


def test_a_grader_by_text_alone_fails_the_same_cases(tmp_path):
    """Negative control: comparing texts, or looking for the reference in the answer, gets families wrong."""
    found = cases(str(tmp_path / "canary"))
    for grader in (lambda a, r: a == r, lambda a, r: r in a):
        wrong = {c.family for c in found if ("right" if grader(c.answer, c.reference) else "wrong") not in c.verdicts}
        assert wrong


@pytest.mark.parametrize(
    ("text", "rule", "answer"),
    [
        (r"So \boxed{1} no, \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\fbox{3}", "boxed", "3"),
        (r"\boxed{\{1, 2\}}", "boxed", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right\}}<|im_end|>", "boxed", r"\left\{1\right\}"),
        (r"\boxed{1} and \boxed{2", "boxed", None),
        (r"\boxed{}", "boxed", None),
        (r"\boxed{" + "1" * (MAX_ANSWER + 1) + "}", "boxed", None),
        (r"<think>\boxed{1}</think> The answer is 2", "boxed", None),
        (r"<think>\boxed{1}</think> \boxed{2}", "boxed", "2"),
        (r"<think>\boxed{1}", "boxed", "1"),
        ("<answer>1</answer> <answer> 2 </answer>", "tag", "2"),
        ("<answer>1", "tag", None),
        ("1</answer>", "tag", None),
        ("He has 3.\n#### 1,234\n", "hashes", "1,234"),
        ("no hashes", "hashes", None),
        *((f"So\n#### -1/2{end}", "hashes", "-1/2") for end in ("<|im_end|>", "</s>", " <end_of_turn>\n", "<a><b>")),
        ("#### x < 3", "hashes", "x < 3"),
        ("#### <5>", "hashes", "<5>"),
        ("#### 5 > 3", "hashes", "5 > 3"),
        ("#### x<5 >", "hashes", "x<5 >"),
        (f"#### 5{' <a>' * 50_000}", "hashes", "5"),
        (f"#### {'<a>' * 50_000}x", "hashes", None),  # half a minute and more, if it were tried from each of them
        ("3<|im_end|>", "number", "3"),
        ("it is <5>", "number", "5"),
        ("3 apples and $1,234.50 more.", "number", "1,234.50"),
        ("-3/4", "number", "-3/4"),
        ("none", "number", None),
    ],
)
def test_the_answer_is_found_by_rule(text, rule, answer):
    assert find_answer(text, rule) == answer
