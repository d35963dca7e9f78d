"""Functions that run on every rank of a test world."""

from pathlib import Path
from typing import Any


def smoke(payload: dict[str, Any]) -> Any:
    from megasao.megatron import runtime
    from megasao.megatron.bridge import export_hf
    from megasao.megatron.models import build_model
    from megasao.megatron.optimizer import build_optimizer
    from megasao.megatron.rows import Row
    from megasao.megatron.step import forward_backward, forward_only
    from tests.megatron.tiny import make_config, random_sequences

    path = Path(payload["path"])
    config = make_config(path, payload["parallel"])
    topology = runtime.set_layout(config.parallel, 0)
    model = build_model("actor", path, config)
    seqs = random_sequences(6, seed=1)
    row = Row.from_sequences(seqs, [1.0, 0.7] * 3)
    out = forward_only(model, [row])
    opt = build_optimizer(model, config.actor.optimizer)
    opt.zero_grad()
    stats = forward_backward(model, [row], lambda i, o: (-(o.sum()) / 100 / topology.data_size, {"x": o.sum()}))
    norm = opt.step(1e-3)
    hf = export_hf(model)
    critic = build_model("critic", path, config)
    v = forward_only(critic, [row])
    return [out[0].tolist(), norm, stats[0]["x"].item(), len(hf), v[0].tolist()[:3]]
