"""Example trajectories of the report: every token with the numbers that its training step used.

Invariants:
- what a token shows is the recorded number; a missing one is ``-``;
- a token without ``kept`` (an observation) is never marked as masked;
- all text is escaped, and a token is visible even when its text is empty or white space.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megasao.observability.formats import count, finite, number
from megasao.observability.jsonl import Row

SHOWN = 10
MODES = (
    ("role", "action / observation"),
    ("advantage", "advantage"),
    ("ratio", "ratio"),
    ("value", "value"),
)


@dataclass(frozen=True)
class Ranges:
    """What full colour means: the same for all examples, so that they can be compared."""

    advantage: float
    log_ratio: float
    value_low: float
    value_high: float


def choose(examples: list[Row], wanted: int = SHOWN) -> list[Row]:
    """At most ``wanted`` examples spread evenly over the steps, in their order; of a step, not always the first."""
    steps: dict[int, list[Row]] = {}
    for row in examples:
        steps.setdefault(int(row.get("step", 0)), []).append(row)
    queues = [_turned(rows, turn) for turn, rows in enumerate(steps.values())]
    rounds = [
        queue[depth] for depth in range(max(map(len, queues), default=0)) for queue in queues if depth < len(queue)
    ]
    first = rounds[: len(queues)]
    chosen = _spread(first, wanted)
    chosen += _spread(rounds[len(queues) :], wanted - len(chosen))
    return sorted(chosen, key=lambda row: int(row.get("step", 0)))


def render(examples: list[Row]) -> str:
    """The section's inner HTML."""
    if not examples:
        return '<p class="none">No example trajectories were saved (see observability.examples_every).</p>'
    ranges = _ranges(examples)
    cards = "".join(_card(row, ranges) for row in examples)
    return f'{_switch(ranges)}<div id="examples" data-mode="role">{cards}</div>'


def _turned(rows: list[Row], turn: int) -> list[Row]:
    start = turn % len(rows)
    return rows[start:] + rows[:start]


def _spread(rows: list[Row], wanted: int) -> list[Row]:
    if wanted <= 0 or not rows:
        return []
    if len(rows) <= wanted:
        return list(rows)
    if wanted == 1:
        return [rows[-1]]
    return [rows[round(index * (len(rows) - 1) / (wanted - 1))] for index in range(wanted)]


def _ranges(examples: list[Row]) -> Ranges:
    advantages = [abs(value) for value in _all(examples, "advantages")]
    ratios = [abs(math.log(value)) for value in _all(examples, "ratio") if value > 0]
    values = _all(examples, "values") or [0.0, 1.0]
    return Ranges(_large(advantages), _large(ratios), min(values), max(values))


def _all(examples: list[Row], name: str) -> list[float]:
    """Finite values of a per-token field at action tokens."""
    found = []
    for row in examples:
        for value, action in zip(row.get(name) or [], row.get("action_mask") or [], strict=False):
            known = finite(value)
            if action and known is not None:
                found.append(known)
    return found


def _large(sizes: list[float]) -> float:
    """The 98th percentile: one outlier must not make everything else pale. Never 0."""
    ordered = sorted(sizes)
    return (ordered[int(0.98 * (len(ordered) - 1))] if ordered else 0.0) or 1.0


def _switch(ranges: Ranges) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="mode" value="{mode}"{" checked" if mode == "role" else ""}>{text}</label>'
        for mode, text in MODES
    )
    low, high = math.exp(-ranges.log_ratio), math.exp(ranges.log_ratio)
    keys = [
        ("role", '<i class="swatch action"></i>action <i class="swatch observation"></i>observation'),
        ("advantage", _scale_key("signed", number(-ranges.advantage, 2), number(ranges.advantage, 2))),
        ("ratio", _scale_key("signed", number(low, 2), number(high, 2))),
        ("value", _scale_key("plain", number(ranges.value_low, 2), number(ranges.value_high, 2))),
    ]
    shown = "".join(f'<span class="key-{mode}">{key}</span>' for mode, key in keys)
    masked = '<span><i class="swatch masked"></i>outside the band: no gradient</span>'
    return (
        f'<div class="switch"><div class="buttons" role="radiogroup" aria-label="Colour tokens by">{buttons}</div>'
        f'<div class="keys">{shown}{masked}</div></div>'
    )


def _scale_key(kind: str, low: str, high: str) -> str:
    return f'{low} <i class="scale {kind}"></i> {high}'


def _card(row: Row, ranges: Ranges) -> str:
    reward = finite(row.get("reward"))
    good = reward is not None and reward > 0.5
    spans = _spans(row)
    facts = [
        f"step {count(finite(row.get('step')))}",
        f"trained at v{row.get('weight_version', '-')}",
        "made by " + ", ".join(f"v{version}" for version in dict.fromkeys(spans.values())) if spans else "",
        str(row.get("task", "")),
        f"{sum(map(bool, row.get('action_mask') or []))} action of {len(row['tokens'])} tokens",
        f"ended: {row.get('finish_reason', '-')}",
    ]
    head = "".join(f"<span>{html.escape(fact)}</span>" for fact in facts if fact)
    name = html.escape(f"{row.get('prompt_id', '')} · {row.get('trajectory_id', '')}".strip(" ·"))
    return (
        f'<article class="example"><header><b class="reward {"good" if good else "bad"}">reward {number(reward, 2)}</b>'
        f'{head}</header><p class="prompt"><span>prompt</span> {html.escape(_prompt(row))}</p>'
        f'<div class="tokens">{_tokens(row, ranges, spans)}</div><footer>{name}</footer></article>'
    )


def _prompt(row: Row) -> str:
    """Text of the tokens before the first action."""
    mask = row.get("action_mask") or []
    end = next((index for index, action in enumerate(mask) if action), len(mask))
    texts = _texts(row)[:end]
    joined = "".join(texts)
    return joined if any(" " in text for text in texts) else " ".join(texts)


def _texts(row: Row) -> list[str]:
    """One text per token; the id where the text was not saved."""
    texts = row.get("text")
    return [str(text) for text in texts] if texts else [f"#{token}" for token in row["tokens"]]


def _spans(row: Row) -> dict[int, Any]:
    """First token index -> weight version, of each span."""
    pairs = row.get("weight_versions") or []
    return {int(pair[0]): pair[1] for pair in pairs if isinstance(pair, Sequence) and len(pair) == 2}


def _tokens(row: Row, ranges: Ranges, spans: dict[int, Any]) -> str:
    parts = []
    version: Any = None
    mask = row.get("action_mask") or [False] * len(row["tokens"])
    was_action = None
    for index, text in enumerate(_texts(row)):
        if index in spans:
            version = spans[index]
            label = html.escape(f"v{version}")
            parts.append(f'<i class="version" title="weights {label} from here on">{label}</i>')
        if was_action is not None and mask[index] and not was_action:
            parts.append("<wbr>")
        was_action = mask[index]
        parts.append(_token(row, index, text, bool(mask[index]), version, ranges))
    return "".join(parts)


def _token(row: Row, index: int, text: str, action: bool, version: Any, ranges: Ranges) -> str:
    at = {name: _at(row, name, index) for name in ("advantages", "ratio", "values")}
    kept = (row.get("kept") or [None] * len(row["tokens"]))[index]
    masked = action and kept is False
    css = ["t", "a" if action else "o"] + (["m"] if masked else [])
    style = ""
    if action:
        advantage, ratio, value = (
            _signed(at["advantages"], ranges.advantage),
            _log(at["ratio"], ranges),
            _unit(at["values"], ranges),
        )
        css += ["an"] if advantage < 0 else []
        css += ["rn"] if ratio < 0 else []
        style = f' style="--a:{abs(advantage):.2f};--r:{abs(ratio):.2f};--v:{value:.2f}"'
    tip = html.escape(_tip(row, index, text, action, masked, version))
    return f'<span class="{" ".join(css)}"{style} title="{tip}">{html.escape(_visible(text))}</span>'


def _tip(row: Row, index: int, text: str, action: bool, masked: bool, version: Any) -> str:
    """Lines ``name: value``; the first line is the token itself."""
    lines = [f"{text!r}", f"position: {index}, id {row['tokens'][index]}"]
    if not action:
        return "\n".join([*lines, "role: observation (not trained on)", f"weights: v{version}"])
    return "\n".join(
        [
            *lines,
            f"role: {'action, masked (outside the band)' if masked else 'action, kept'}",
            f"log-prob, trainer: {number(_at(row, 'logprobs', index), 4)}",
            f"log-prob, rollout: {number(_at(row, 'rollout_logprobs', index), 4)}",
            f"ratio: {number(_at(row, 'ratio', index), 4)}",
            f"advantage: {number(_at(row, 'advantages', index), 4)}",
            f"value: {number(_at(row, 'values', index), 4)}",
            f"return: {number(_at(row, 'returns', index), 4)}",
            f"weights: v{version}",
        ]
    )


def _at(row: Row, name: str, index: int) -> float | None:
    values = row.get(name)
    return finite(values[index]) if values else None


def _signed(value: float | None, full: float) -> float:
    return max(-1.0, min(1.0, (value or 0.0) / full))


def _log(ratio: float | None, ranges: Ranges) -> float:
    return _signed(math.log(ratio), ranges.log_ratio) if ratio is not None and ratio > 0 else 0.0


def _unit(value: float | None, ranges: Ranges) -> float:
    span = (ranges.value_high - ranges.value_low) or 1.0
    return 0.0 if value is None else max(0.0, min(1.0, (value - ranges.value_low) / span))


def _visible(text: str) -> str:
    """Something to see and to hover on for white space and empty tokens."""
    shown = text.replace("\n", "↵").replace("\t", "→")
    return shown if shown.strip() else shown.replace(" ", "␣") or "∅"
