"""Break the CUDA kernels on purpose, one change at a time: ``python csrc/tests/mutate.py``. The emulator's tests must
notice each, but for the equivalents named here. A few minutes; not part of the test suite."""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

CSRC = Path(__file__).parents[1]
FLAGS = ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w", "-pthread"]


@dataclass(frozen=True)
class Mutation:
    """Replace ``old`` by ``new`` once in ``file``; ``survives`` says why no test can notice, if so."""

    file: str
    old: str
    new: str
    survives: str = ""


WEAK = "needs the weak memory model of a GPU: compute-sanitizer or a GPU run"
MUTATIONS = [
    Mutation("core/gae.h", "return map.m == 0 ? map.b : map.m * y + map.b", "return map.m * y + map.b"),
    Mutation("core/gae.h", "if (left.m == 0) return left;", ""),
    Mutation("core/gae.h", "left.m * right.b + left.b", "left.m * right.b + right.b"),
    Mutation("core/gae.h", "gamma * (1 - lambda)", "(1 - lambda)"),
    Mutation("core/gae.h", "return x - x == 0", "return true"),
    Mutation("cuda/gae.h", "tiles - 1 - tile", "tile"),
    Mutation("cuda/gae.h", "while (first + k < problem.bounds", "if (first + k < problem.bounds"),
    Mutation("cuda/gae.h", "first + k + 1 == problem.bounds", "first + k + 2 == problem.bounds"),
    Mutation("cuda/gae.h", "bounds[middle] <= token", "bounds[middle] < token"),
    Mutation("cuda/gae.h", "if (lane + offset < kWarp) scan =", "scan ="),
    Mutation("cuda/gae.h", "if (lane == kWarp - 1) right = {1, 0};", ""),
    Mutation("cuda/gae.h", "return after(right, beyond);", "return after(beyond, right);"),
    Mutation("cuda/gae.h", "warps[warp] = scan;\n  __syncthreads();", "warps[warp] = scan;"),
    Mutation("cuda/gae.h", "passed = after(passed, map)", "passed = after(map, passed)"),
    Mutation("cuda/gae.h", "if (passed.m == 0) break;", "break;"),
    Mutation(
        "cuda/gae.h", "if (lane + offset < kWarp) map =", "map =", "only lane 0 counts, and it never reads such a lane"
    ),
    Mutation("cuda/gae.h", "while (state == kEmpty) state =", "if (state == kEmpty) state ="),
    Mutation("cuda/gae.h", "scratch.y[tile] = apply(whole, y);", "scratch.y[tile] = y;"),
    Mutation("cuda/gae.h", "  __syncthreads();\n\n  double y", "\n  double y"),
    Mutation("cuda/gae.h", "else if (is_finite(reward)) {\n      y +=", "else if (true) {\n      y +="),
    Mutation("cuda/gae.h", "own = {0, problem.gamma * problem", "own = {0, problem"),
    Mutation("cuda/gae.h", "const int64_t tile = shared_ticket", "const int64_t tile = blockIdx.x"),
    Mutation("cuda/platform.h", "first + k < tokens ? from[first + k] : T(0)", "from[first + k]"),
    Mutation("cuda/platform.h", "if (first + k < tokens) to[first + k]", "to[first + k]"),
    Mutation("core/policy.h", "log_ratio >= upper", "log_ratio > upper"),
    Mutation("core/policy.h", "(r.log_ratio > lower)", "(r.log_ratio >= lower)"),
    Mutation("core/policy.h", "valid = action & (ratio", "valid = (ratio"),
    Mutation("core/policy.h", "accepted ? r.exp * advantage : P{}", "r.exp * advantage * P(accepted)"),
    Mutation("core/policy.h", "n == P{} ? tail :", "n != P{} ? tail :"),
    Mutation("core/policy.h", "x > E(kClamp)", "x > E(2 * kClamp)"),
    Mutation("core/policy.h", "negative & (r.log_ratio < lower)", "action & (r.log_ratio < lower)"),
    Mutation("core/policy.h", "(r.log_ratio < lower)", "(r.log_ratio <= lower)"),
    Mutation("core/policy.h", "action & (advantage > zero) & (r", "action & (r"),
    Mutation("core/policy.h", "negative & (r.log_ratio > limit)", "action & (r.log_ratio > limit)"),
    Mutation("core/policy.h", "token.dual ? zero + dual", "token.dual ? zero + high"),
    Mutation("core/policy.h", "(clipped | held) ?", "clipped ?"),
    Mutation("core/policy.h", "(clipped | held) ?", "held ?"),
    Mutation("core/policy.h", "token.loss = r.valid ?", "token.loss = action ?"),
    Mutation("cuda/policy.h", "below ? T(0) : token.loss", "token.loss"),
    Mutation("cuda/policy.h", "i < kPositive ? total[i]", "i <= kPositive ? total[i]"),
    Mutation("cuda/reduce.h", "which == largest", "which == largest + 1"),
    Mutation("cuda/reduce.h", "offset = kWarp / 2", "offset = kWarp / 4"),
    Mutation("cuda/reduce.h", "for (int w = 1;", "for (int w = 0;"),
    Mutation(
        "cuda/reduce.h",
        "    for (int i = 0; i < count; ++i) warps[warp][i] = sums[i];\n  __syncthreads();",
        "    for (int i = 0; i < count; ++i) warps[warp][i] = sums[i];",
    ),
    Mutation("cuda/reduce.h", "== blocks - 1", "== 0"),
    Mutation("cuda/reduce.h", "  __syncthreads();\n  if (!last) return false;", "  if (!last) return false;"),
    Mutation("cuda/reduce.h", "total[i] = sums[i];\n  __syncthreads();", "total[i] = sums[i];"),
    Mutation("cuda/policy.h", "start += int64_t(gridDim.x) * kTile", "start += kTile"),
    Mutation("cuda/response.h", "begin / kPerThread * kPerThread", "begin"),
    Mutation("cuda/response.h", "start += int64_t(problem.parts) * kTile", "start += kTile"),
    Mutation("cuda/response.h", "first + k >= begin &&", ""),
    Mutation("cuda/response.h", "&& first + k < end", ""),
    Mutation("cuda/response.h", "mask & inside, inside", "mask, inside"),
    Mutation("cuda/response.h", "scratch.ticket + sequence", "scratch.ticket"),
    Mutation("cuda/response.h", "scratch.partials + sequence * problem.parts", "scratch.partials + sequence"),
    Mutation("cuda/response.h", "own[kAbove] += advantages[k] > T(0)", "own[kAbove] += advantages[k] >= T(0)"),
    Mutation("cuda/response.h", "advantage < 0 ? losses.alpha * advantage", "advantage < 0 ? advantage"),
    Mutation("cuda/response.h", "sides[0] += advantage < 0 ? 0 : loss", "sides[0] += loss"),
    Mutation("cuda/response.h", "if (inside == 0xff) {", "if (true) {"),
    Mutation("cuda/gae.h", "__threadfence();\n      scratch.state[tile] = whole", "scratch.state[tile] = whole", WEAK),
    Mutation("cuda/gae.h", "    __threadfence();\n    Affine map", "    Affine map", WEAK),
    Mutation("cuda/reduce.h", "    __threadfence();\n    last", "    last", WEAK),
    Mutation("cuda/gae.h", "if (whole.m != 0) {", "if (true) {", "writes the same numbers once more"),
]


def noticed(mutation: Mutation) -> bool:
    """Whether the emulator's tests fail (or do not finish) with the mutation."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "csrc"
        copytree(CSRC, copy)
        path = copy / mutation.file
        text = path.read_text()
        assert mutation.old in text, f"{mutation.file} has no {mutation.old!r} any more"
        path.write_text(text.replace(mutation.old, mutation.new, 1))
        program = Path(place) / "test"
        source = copy / "tests" / "test_kernels.cpp"
        subprocess.run(["g++", *FLAGS, str(source), "-o", str(program)], check=True, capture_output=True, timeout=300)
        try:
            return subprocess.run([str(program)], capture_output=True, timeout=120).returncode != 0
        except subprocess.TimeoutExpired:
            return True


def main() -> int:
    """Print one line a mutation; 0 if exactly the documented ones survive."""
    if noticed(Mutation("core/gae.h", "struct Affine {", "struct Affine {")):
        print("the tests fail without any mutation: mend that first")
        return 1
    wrong = 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for mutation, caught in zip(MUTATIONS, pool.map(noticed, MUTATIONS), strict=True):
            expected = not mutation.survives
            wrong += caught != expected
            verdict = "caught" if caught else "SURVIVED"
            note = f"  ({mutation.survives})" if mutation.survives else ""
            flag = "" if caught == expected else "  <- unexpected"
            print(f"{verdict:<9}{mutation.file}: {mutation.old.strip()!r}{note}{flag}", flush=True)
    print(f"{len(MUTATIONS)} mutations, {wrong} unexpected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
