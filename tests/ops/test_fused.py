"""The compiled operators against the reference and against torch's own checks; each has a wrong variant that fails."""

import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasao.config.ops import OpsConfig
from megasao.ops import backend as backend_module
from megasao.ops import dis_loss, gae, ppo_clip_loss, response_loss, response_sums
from megasao.ops.backend import configure, describe, use_fused
from megasao.ops.extension import Extension, load_extension
from megasao.ops.reference import (
    dis_loss_reference,
    gae_reference,
    ppo_clip_loss_reference,
    response_loss_reference,
    response_sums_reference,
)

LOWER, UPPER = math.log(0.7), math.log(6.0)


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[None]:
    """Only the compiled operators here."""
    if load_extension().problem is not None:
        pytest.skip("no compiled operators")
    configure(OpsConfig())
    yield
    configure(OpsConfig())


def row(lengths: list[int], seed: int, dtype: torch.dtype, *, turns: int = 5) -> dict[str, Tensor]:
    """Packed sequences of alternating turns of actions and observations, with rewards anywhere."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    flips = torch.rand(tokens, generator=generator) < 1 / turns
    rewards = torch.randn(tokens, generator=generator, dtype=dtype)
    rewards[torch.rand(tokens, generator=generator) < 0.8] = 0
    return {
        "rewards": rewards,
        "values": torch.randn(tokens, generator=generator, dtype=dtype),
        "action_mask": flips.cumsum(0) % 2 == 0,
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "lam": torch.rand(len(lengths), dtype=torch.float64, generator=generator),
        "bootstrap": torch.randn(len(lengths), dtype=torch.float64, generator=generator),
    }


def dis_row(tokens: int, seed: int, dtype: torch.dtype, spread: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(tokens, dtype=dtype, generator=generator)
    return {
        "logprobs": rollout + spread * torch.randn(tokens, dtype=dtype, generator=generator),
        "rollout_logprobs": rollout,
        "advantages": torch.randn(tokens, dtype=dtype, generator=generator),
        "action_mask": torch.rand(tokens, generator=generator) < 0.6,
    }


def denominator(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1700), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 3, 40, 3000]),
    st.sampled_from([1.0, 0.9]),
)
def test_gae_equals_the_reference_over_many_groups(
    lengths: list[int], seed: int, dtype: torch.dtype, turns: int, gamma: float
) -> None:
    case = row(lengths, seed, dtype, turns=turns)
    expected = gae_reference(**case, gamma=gamma)
    tolerance = {"atol": 1e-5, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-11, "rtol": 1e-11}
    for got, wanted in zip(gae(**case, gamma=gamma), expected, strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)


def test_gae_comparison_rejects_a_reward_lost_between_groups() -> None:
    case = row([1024], 0, torch.float64) | {"lam": torch.ones(1, dtype=torch.float64)}
    case["action_mask"][505:520] = False  # the last action before token 512 is in another group
    case["rewards"][512] = 7.0
    advantages, _ = gae(**case, gamma=1.0)
    torch.testing.assert_close(advantages, gae_reference(**case, gamma=1.0)[0])
    case["rewards"][512] = 0.0
    assert not torch.allclose(advantages, gae_reference(**case, gamma=1.0)[0], atol=1.0)


DIS = {"eps_low": 0.3, "eps_high": 5.0}
LOSSES = {
    "dis": (dis_loss, dis_loss_reference, DIS),
    "ppo_clip": (ppo_clip_loss, ppo_clip_loss_reference, {"eps_low": 0.2, "eps_high": 0.3, "dual_clip": None}),
    "ppo_clip dual": (ppo_clip_loss, ppo_clip_loss_reference, {"eps_low": 0.2, "eps_high": 0.3, "dual_clip": 1.5}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 511, 8192, 8200, 40_001])
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_equal_the_reference(name: str, tokens: int, dtype: torch.dtype) -> None:
    inputs = dis_row(tokens, tokens, dtype)
    inputs["advantages"][::7] = 0
    fused, reference, options = LOSSES[name]
    results = []
    for run in (fused, reference):
        logprobs = inputs["logprobs"].clone().requires_grad_()
        loss, stats = run(**(inputs | {"logprobs": logprobs}), **options, denominator=77.0)
        loss.backward()
        results.append((loss.detach(), logprobs.grad, torch.stack([stats[name] for name in sorted(stats)])))
    loose = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-11, "rtol": 1e-12}
    tight = {"atol": 1e-9, "rtol": 3e-7} if dtype == torch.float32 else {"atol": 1e-15, "rtol": 1e-14}
    for (got, wanted), tolerance in zip(zip(*results, strict=True), (loose, tight, loose), strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)
    assert tokens < 100 or not torch.allclose(results[0][1], results[1][1] * (1 + 1e-5), **tight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [[0], [], [1], [7, 0, 8, 9], [4096, 3, 1], [100] * 50])
def test_response_ops_equal_the_reference(lengths: list[int], dtype: torch.dtype) -> None:
    case, inputs = row(lengths, 1, dtype), dis_row(sum(lengths), 2, dtype)
    fixed = {name: inputs[name] for name in ("advantages", "action_mask")} | {"cu_seqlens": case["cu_seqlens"]}
    fixed["advantages"][::5] = 0
    sums = response_sums(inputs["logprobs"], **fixed)
    got = torch.stack([sums.totals.nll, sums.totals.tokens, sums.positive, sums.negative])
    torch.testing.assert_close(got, response_sums_reference(inputs["logprobs"], **fixed), rtol=1e-13, atol=1e-13)
    assert sums.totals.tokens.sum() == inputs["action_mask"].sum() >= (sums.positive + sums.negative).sum()
    results = []
    for run in (response_loss, response_loss_reference):
        logprobs = inputs["logprobs"].clone().requires_grad_()
        loss, sides = run(logprobs, **fixed, weights=case["lam"], alpha=0.2, denominator=3.0)
        loss.backward()
        results.append((loss.detach(), logprobs.grad, sides["positive_loss"], sides["negative_loss"]))
    for got_part, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got_part, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-13)
    plain = response_loss(inputs["logprobs"], **fixed, weights=case["lam"], denominator=3.0)[0]
    assert sum(lengths) < 100 or not torch.isclose(plain, results[0][0], rtol=1e-3), "alpha must show"


def test_mean_nll_of_a_long_response_is_summed_in_float64() -> None:
    logprobs = torch.full((3_000_000,), -0.1)
    everything = torch.ones(3_000_000, dtype=torch.bool)
    sums = response_sums(logprobs, logprobs, everything, torch.tensor([0, 3_000_000], dtype=torch.int32))
    exact = float(torch.tensor(0.1).double())
    assert float(sums.totals.mean_nll) == pytest.approx(exact, rel=1e-12)
    narrow = numpy.cumsum(-logprobs.numpy(), dtype=numpy.float32)[-1] / 3_000_000
    assert float(narrow) != pytest.approx(exact, rel=1e-6), "float32 sums must fail this"


def test_kl_keeps_its_relative_accuracy_for_nearly_equal_policies() -> None:
    inputs = dis_row(4000, 0, torch.float32)
    difference = 1e-3 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
    inputs |= {"rollout_logprobs": torch.zeros(4000), "logprobs": difference}
    _, stats = dis_loss(**inputs, eps_low=0.3, eps_high=5.0, denominator=1.0)
    exact = difference[inputs["action_mask"]].double()
    exact_sum = (torch.expm1(exact) - exact).sum()
    torch.testing.assert_close(stats["kl_k3_sum"], exact_sum, rtol=1e-6, atol=0)
    naive = (difference.exp() - 1 - difference)[inputs["action_mask"]].double().sum()
    assert not torch.isclose(naive, exact_sum, rtol=1e-5, atol=0), "float32 without care must fail this bound"


def test_results_are_bitwise_equal_on_one_and_two_threads() -> None:
    inputs, case = dis_row(700_000, 3, torch.float32), row([70_000, 90_000, 3], 4, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            dis = torch.ops.megasao.dis(*inputs.values(), denominator(9.0), LOWER, UPPER)
            ppo = torch.ops.megasao.ppo_clip(*inputs.values(), denominator(9.0), 0.8, 1.3, 2.0)
            response = [x[: len(case["values"])] for x in (inputs["logprobs"], inputs["advantages"])]
            response += [case["action_mask"], case["cu_seqlens"]]
            sums = torch.ops.megasao.response_sums(*response)
            losses = torch.ops.megasao.response_loss(*response, case["lam"], denominator(9.0), 0.5)
            results.append([*dis, *ppo, sums, *losses, *torch.ops.megasao.gae(*case.values(), 0.99)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    reversed_loss = torch.ops.megasao.dis(*(x.flip(0) for x in inputs.values()), denominator(9.0), LOWER, UPPER)[2]
    assert not torch.equal(reversed_loss, results[0][2]), "another order of the sums shows in the last bits"


def test_every_instruction_set_gives_the_same_to_rounding(tmp_path: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(
        "import sys, torch\n"
        "from megasao.ops.extension import load_extension\n"
        "isa = load_extension().cpu\n"
        "g = torch.Generator().manual_seed(0)\n"
        "x, v = torch.randn(2, 3000, generator=g).unbind(0)\n"
        "m = torch.rand(3000, generator=g) < 0.7\n"
        "one = torch.ones(2, dtype=torch.float64)\n"
        "a = torch.ops.megasao.gae(x, v, m, torch.tensor([0, 1111, 3000], dtype=torch.int32), one * .9, one, 1.0)\n"
        "d = torch.ops.megasao.dis(x, v, x, m, one[0], -1.0, 1.0)\n"
        "p = torch.ops.megasao.ppo_clip(x, v, x, m, one[0], .8, 1.3, 2.0)\n"
        "c = torch.tensor([0, 1111, 3000], dtype=torch.int32)\n"
        "s = torch.ops.megasao.response_sums(x, v, m, c)\n"
        "r = torch.ops.megasao.response_loss(x, v, m, c, one, one[0], .5)\n"
        "print(isa, *(float(t.double().square().sum()) for t in (*a, *d, *p, s, *r)))\n"
    )
    lines = {}
    for isa in ("base", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "MEGASAO_ISA": isa, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        name, *numbers = done.stdout.split()
        lines[name] = [float(number) for number in numbers]
    assert "base" in lines
    for numbers in lines.values():
        assert numbers == pytest.approx(lines["base"], rel=1e-5)


def operator_calls(dtype: torch.dtype) -> dict[str, tuple[object, ...]]:
    """Arguments of every operator; those of the losses have a gradient in the first one."""
    case, inputs = row([20, 0, 13], 0, dtype), dis_row(33, 0, dtype)
    leaf = inputs["logprobs"].requires_grad_()
    response = (leaf, inputs["advantages"], inputs["action_mask"], case["cu_seqlens"])
    return {
        "gae": (*case.values(), 0.9),
        "dis": (*inputs.values(), denominator(3.0), LOWER, UPPER),
        "ppo_clip": (*inputs.values(), denominator(3.0), 0.8, 1.3, 2.0),
        "response_sums": (leaf.detach(), *response[1:]),
        "response_loss": (*response, case["lam"], denominator(3.0), 0.5),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", operator_calls(torch.float32))
def test_opcheck_and_out_variants(name: str, dtype: torch.dtype) -> None:
    arguments = operator_calls(dtype)[name]
    operator, into = getattr(torch.ops.megasao, name), getattr(torch.ops.megasao, f"{name}_out")
    torch.library.opcheck(operator, arguments)
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    expected = operator(*plain)
    expected = expected if isinstance(expected, tuple) else (expected,)
    given = [torch.full_like(tensor, 7.0) for tensor in expected]
    into(*plain, *given)
    assert all(map(torch.equal, given, expected))
    torch.library.opcheck(into, (*plain, *given))


def dis_surrogate(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """-sum f(r) A with r differentiable: another value than the DIS loss, and the same gradient."""
    log_ratio = logprobs - inputs["rollout_logprobs"]
    kept = inputs["action_mask"] & (log_ratio > LOWER) & (log_ratio < UPPER)
    return -torch.where(kept, log_ratio.exp() * inputs["advantages"], 0.0).sum() / 7.0


class Surrogate(torch.autograd.Function):
    """The value of ``dis_surrogate`` with the operator's gradient of the DIS loss, for gradcheck."""

    scale = 1.0

    @staticmethod
    def forward(ctx: object, logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            loss, _ = dis_loss(**(inputs | {"logprobs": leaf}), **DIS, denominator=7.0)
            ctx.gradient = torch.autograd.grad(loss, leaf)[0]  # type: ignore[attr-defined]
        return dis_surrogate(logprobs, inputs)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.gradient * gradient * Surrogate.scale, None  # type: ignore[attr-defined]


def test_gradcheck_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, case = dis_row(60, 5, torch.float64), row([25, 35], 5, torch.float64)
    leaf = inputs["logprobs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Surrogate.apply(x, inputs), (leaf,))
    monkeypatch.setattr(Surrogate, "scale", 1.01)
    assert not torch.autograd.gradcheck(lambda x: Surrogate.apply(x, inputs), (leaf,), raise_exception=False)
    others = [inputs[name] for name in ("rollout_logprobs", "advantages", "action_mask")]
    ppo = torch.ops.megasao.ppo_clip
    assert torch.autograd.gradcheck(lambda x: ppo(x, *others, denominator(7.0), 0.8, 1.3, 2.0)[0], (leaf,))
    rest = (*others[1:], case["cu_seqlens"], case["lam"], denominator(7.0), 0.5)
    assert torch.autograd.gradcheck(lambda x: torch.ops.megasao.response_loss(x, *rest)[0], (leaf,))


@pytest.mark.parametrize("name", ["dis", "ppo_clip", "response_loss"])
def test_torch_compile_sees_whole_graphs(name: str) -> None:
    arguments = operator_calls(torch.float32)[name]
    operator = getattr(torch.ops.megasao, name)
    compiled = torch.compile(lambda *x: operator(*x)[0] * 2, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(*arguments), arguments[0])
    (wanted,) = torch.autograd.grad(operator(*arguments)[0] * 2, arguments[0])
    assert torch.equal(got, wanted) and wanted.abs().sum() > 0


def test_an_incoming_gradient_scales_the_result_and_leaves_it_intact() -> None:
    inputs = dis_row(50, 1, torch.float32)
    leaf = inputs["logprobs"].requires_grad_()
    loss, _ = dis_loss(**inputs, eps_low=0.3, eps_high=5.0, denominator=1.0)
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (thrice,) = torch.autograd.grad(loss * 3, leaf, retain_graph=True)
    torch.testing.assert_close(thrice, 3 * once)
    loss.backward(retain_graph=True)
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 2 * once)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (1, torch.zeros(5), "values: expected a contiguous tensor of 6"),
        (1, torch.zeros(12)[::2], "values: expected a contiguous"),
        (1, torch.zeros(6, dtype=torch.float64), "values: wrong dtype"),
        (2, torch.zeros(6), "action_mask: wrong dtype"),
        (3, torch.tensor([0, 7], dtype=torch.int32), "cu_seqlens: expected to run from 0 to 6"),
        (3, torch.tensor([0], dtype=torch.int32), "lam: expected"),
        (4, torch.ones(1), "lam: wrong dtype"),
        (6, 1.5, "gamma"),
    ],
)
def test_direct_calls_with_wrong_arguments_do_not_crash(position: int, wrong: object, message: str) -> None:
    arguments: list[object] = [*row([6], 0, torch.float32).values(), 1.0]
    arguments[position] = wrong
    with pytest.raises(RuntimeError, match=message):
        torch.ops.megasao.gae(*arguments)


def test_bounds_that_decrease_do_not_crash() -> None:
    arguments = row([2, 2, 2], 0, torch.float32) | {"cu_seqlens": torch.tensor([0, 5, 3, 6], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="never decrease, see element 2"):
        torch.ops.megasao.gae(*arguments.values(), 1.0)


def test_check_refuses_nan_at_actions_and_only_there() -> None:
    case = row([6], 0, torch.float32) | {"action_mask": torch.tensor([True, True, False, True, True, False])}
    case["values"][2] = math.nan
    configure(OpsConfig(check=True))
    try:
        gae(**case, gamma=1.0)
        case["values"][3] = math.nan
        with pytest.raises(ValueError, match=r"values: NaN at action token 3 \(1 in all\)"):
            gae(**case, gamma=1.0)
        case["rewards"][[0, 2, 4]] = math.nan
        with pytest.raises(ValueError, match=r"rewards: NaN at action token 0 \(2 in all\)"):
            gae(**case, gamma=1.0)
    finally:
        configure(OpsConfig())
    assert torch.isnan(gae(**case, gamma=1.0)[0]).any(), "without the check it goes through"


def test_reference_never_calls_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_fused(torch.device("cpu"))
    monkeypatch.setattr(backend_module, "_config", OpsConfig(backend="reference"))
    assert not use_fused(torch.device("cpu"))


def test_without_the_extension_auto_says_so_once_and_fused_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = Extension(problem="they were not built when megasao was installed (test)")
    monkeypatch.setattr(backend_module, "load_extension", lambda: missing)
    with caplog.at_level(logging.WARNING):
        assert not any(use_fused(torch.device("cpu")) for _ in range(3))
    assert len(caplog.records) == 1
    assert "plain torch is used" in caplog.text
    assert describe().startswith("plain torch reference")
    with pytest.raises(ValueError, match="fused, but there are no compiled operators"):
        configure(OpsConfig(backend="fused"))


def test_describe_names_the_instruction_set() -> None:
    assert f"runs {load_extension().cpu} here" in describe()
