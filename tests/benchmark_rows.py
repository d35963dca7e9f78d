"""Hand-made rows in the formats in which the benchmarks are published, and their files."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_SUMS = [(2, 3), (10, 4), (7, 7), (100, 21)]

Rows = Sequence[Mapping[str, Any]]


def _competition(a: int, b: int) -> str:
    return f"Find the sum of all integers from ${a}$ to ${b}$ if $a = {a}$, then add ${b}$."


ROWS: dict[str, tuple[str, Rows]] = {
    "gsm8k": (
        "parquet",
        [
            {
                "question": f"Ann has {a} apples and buys {b} more. How many apples does she have?",
                "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
            }
            for a, b in _SUMS
        ],
    ),
    "math500": (
        "jsonl",
        [
            {
                "problem": f"Write $\\frac{{{a}}}{{{2 * a}}} + {b}$ as one fraction.",
                "solution": f"It is $\\boxed{{\\frac{{{2 * b + 1}}}{{2}}}}$.",
                "answer": f"\\frac{{{2 * b + 1}}}{{2}}",
                "subject": "Prealgebra",
                "level": 2,
                "unique_id": f"test/prealgebra/{a}{b}.json",
            }
            for a, b in _SUMS
        ],
    ),
    "aime24": (
        "parquet",
        [
            {
                "id": 60 + a,
                "problem": _competition(a, b),
                "solution": f"The answer is $\\boxed{{{a + b}}}$.",
                "answer": f"{a + b:03d}",
                "url": "none",
                "year": "2024",
            }
            for a, b in _SUMS
        ],
    ),
    "aime2025": (
        "parquet",
        [
            {"problem_idx": n, "problem": _competition(a, b), "answer": a + b, "problem_type": ["Number Theory"]}
            for n, (a, b) in enumerate(_SUMS, 1)
        ],
    ),
    "hmmt_nov_2025": (
        "parquet",
        [
            {
                "problem_idx": n,
                "problem": _competition(a, b),
                "answer": f"{a} \\sqrt{{{b}}}",
                "problem_type": ["Algebra"],
            }
            for n, (a, b) in enumerate(_SUMS, 1)
        ],
    ),
    "beyondaime": ("parquet", [{"problem": _competition(a, b), "answer": str(a * b)} for a, b in _SUMS]),
    "imoanswerbench": (
        "csv",
        [
            {
                "Problem ID": f"imo-bench-algebra-{n:03d}",
                "Problem": _competition(a, b),
                "Short Answer": f"$({a}, {b})$",
                "Category": "Algebra",
                "Subcategory": "Operation",
                "Source": "made by hand",
            }
            for n, (a, b) in enumerate(_SUMS, 1)
        ],
    ),
    "amc23": (
        "parquet",
        [
            {"id": n, "problem": _competition(a, b), "answer": float(a + b), "url": "none"}
            for n, (a, b) in enumerate(_SUMS)
        ],
    ),
    "minerva": (
        "jsonl",
        [{"question": _competition(a, b), "answer": f"{a}e-{b}" if a == 2 else f"{a}.{b}"} for a, b in _SUMS],
    ),
}


def write_rows(directory: Path, name: str) -> Path:
    """The file of one benchmark."""
    kind, rows = ROWS[name]
    path = directory / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
