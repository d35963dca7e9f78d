"""A turn that was generated in parts: by several servers, or before and after an update of the weights.

Invariants (tests assert them):
- parts joined are what one request would have given: every token has its log-probability, version and experts once.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from megasao.rollout.engines.base import GenerateRequest, GenerateResult


def nothing(request: GenerateRequest) -> GenerateResult:
    """The part of ``request`` that was generated before it began."""
    return GenerateResult([], [] if request.sampling.return_logprobs else None, [], "abort")


def rest_of(request: GenerateRequest, so_far: GenerateResult) -> GenerateRequest:
    """What is left to generate of ``request``."""
    done, sampling = so_far.output_ids, request.sampling
    rows = 0 if so_far.routed_experts is None else len(so_far.routed_experts)
    sampling = replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - len(done),
        routed_experts_from=sampling.routed_experts_from + rows,
    )
    return replace(request, input_ids=[*request.input_ids, *done], sampling=sampling)


def joined(so_far: GenerateResult, more: GenerateResult) -> GenerateResult:
    """Two parts of one turn; ``more`` is of what was left of it (``rest_of``)."""
    spans = list(so_far.weight_versions)
    for start, version in more.weight_versions:
        if not spans or spans[-1][1] != version:
            spans.append((len(so_far.output_ids) + start, version))
    rows = [part.routed_experts for part in (so_far, more) if part.routed_experts is not None]
    return GenerateResult(
        output_ids=[*so_far.output_ids, *more.output_ids],
        logprobs=None if so_far.logprobs is None else [*so_far.logprobs, *(more.logprobs or [])],
        weight_versions=spans,
        finish_reason=more.finish_reason,
        metrics={
            name: so_far.metrics.get(name, 0.0) + more.metrics.get(name, 0.0)
            for name in {**so_far.metrics, **more.metrics}
        },
        routed_experts=np.concatenate(rows) if rows else None,
    )


def ended(request: GenerateRequest, so_far: GenerateResult) -> Literal["stop", "length"] | None:
    """``stop`` or ``length`` if these tokens end the turn, though it was cut off before its server said so."""
    if so_far.output_ids and so_far.output_ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(so_far.output_ids) == request.sampling.max_new_tokens else None
