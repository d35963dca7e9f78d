"""Whether instances of SWE-bench can be judged here: hidden tests fail on the base commit, and pass with the solution.

    python tools/check_swebench.py data=data/swe-bench-verified.parquet sandbox=podman [OPTION=VALUE ...]

The options are those of the environment ``swebench``. One line an instance; the exit status is 1 unless all are as they
must be, which shows that images, runtime and commands are those of the data.
"""

import asyncio
import sys
from collections.abc import Sequence

import yaml

from megasao.environments.base import EnvironmentFailure
from megasao.environments.swebench.environment import SwebenchEnvironment
from megasao.environments.swebench.rows import Instance
from megasao.environments.swebench.work import judge


async def verdict(environment: SwebenchEnvironment, instance: Instance) -> str:
    """``fine``, or what is wrong with the instance."""
    site = environment.site(instance)
    try:
        if (await judge(site, instance, b"")).passed:
            return "its hidden tests pass without the solution"
        solved = await judge(site, instance, instance.patch.encode())
    except EnvironmentFailure as error:
        return " ".join(f"{error.reason}: {error}".split())
    if not solved.applied:
        return "its solution does not fit"
    if solved.stopped:
        return "its hidden tests are stopped by a limit"
    return "fine" if solved.passed else "its hidden tests fail with the solution"


def main(words: Sequence[str]) -> int:
    """Say what each instance is; 0 if all are fine."""
    if not words or {"-h", "--help"} & set(words):
        print(__doc__)
        return 0 if words else 2
    given = {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}
    try:
        environment = SwebenchEnvironment.from_options({**given, "eval_data": given.get("data", "")})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    fine = 0
    for index in range(environment.size("eval")):
        instance = environment.instance("eval", index)
        said = asyncio.run(verdict(environment, instance))
        fine += said == "fine"
        print(f"{instance.instance_id}: {said}", flush=True)
    print(f"{fine} of {environment.size('eval')} are fine")
    return int(fine < environment.size("eval"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
