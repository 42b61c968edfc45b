"""Small files of evaluation sets with the columns in which they are published."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "2+3=", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "900+334=", "answer": "It is 1,234.\n#### 1,234"},
    ],
    "math-500": [
        {
            "problem": "1/2+1/2=",
            "solution": r"It is $\boxed{1}$.",
            "answer": "1",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        {
            "problem": "half of 1?",
            "solution": r"$\boxed{\frac{1}{2}}$",
            "answer": r"\frac{1}{2}",
            "subject": "Prealgebra",
            "level": 2,
            "unique_id": "test/prealgebra/2.json",
        },
    ],
    "aime-24": [
        {
            "id": 60,
            "problem": "30+3=",
            "solution": r"\boxed{033}",
            "answer": "033",
            "url": "https://example.org/1",
            "year": "2024",
        },
        {"id": 61, "problem": "200+4=", "solution": r"\boxed{204}", "answer": "204", "url": "", "year": "2024"},
    ],
    "aime-25": [{"problem": "60+10=", "answer": "70", "id": "0"}, {"problem": "580+8=", "answer": "588", "id": "1"}],
    "aime-26": [
        {"problem_idx": 1, "problem": "270+7=", "answer": 277},
        {"problem_idx": 2, "problem": "60+2=", "answer": 62},
    ],
    "amc-23": [
        {"id": 0, "question": "20+7=", "answer": "27.0", "url": "https://example.org/2"},
        {"id": 1, "question": "30+6=", "answer": "36.0", "url": ""},
    ],
    "minerva": [{"question": "3/4=", "answer": "0.75"}, {"question": "10^4=", "answer": "1e4"}],
    "olympiad": [
        {
            "id": 1606,
            "question": "1+1=",
            "solution": ["It is 2."],
            "final_answer": ["$2$"],
            "context": None,
            "image_1": None,
            "modality": "Text-only",
            "difficulty": "Competition",
            "is_multiple_answer": False,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
            "question_type": "Open-ended",
            "subfield": "Algebra",
            "subject": "Math",
            "language": "English",
        },
        {
            "id": 1607,
            "question": "What is x?",
            "solution": ["Either."],
            "final_answer": ["$1$", "$2.5$"],
            "context": "Let x be a root.",
            "is_multiple_answer": True,
            "unit": None,
            "answer_type": "Numerical",
            "error": "1e-2",
        },
    ],
}

OTHER_COLUMNS: list[tuple[str, dict[str, Any], str]] = [
    ("aime-24", {"id": 0, "problem": "p", "solution": r"\boxed{204}", "url": ""}, "204"),
    ("aime-24", {"ID": "2024-I-1", "Problem": "p", "Solution": "...", "Answer": 204}, "204"),
    ("aime-25", {"question": "p", "answer": "70"}, "70"),
    ("amc-23", {"id": 1, "problem": "p", "answer": 142.0, "url": ""}, "142"),
    ("minerva", {"problem": "p", "solution": r"so $\boxed{4.5e33}$", "type": "Astronomy", "idx": 0}, "4.5e33"),
    ("olympiad", {"question": "p", "final_answer": "['$1,2$']"}, "1,2"),
]
"""(set, a row as another copy on the hub has it, its answer)."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON Lines or, by the ending of the name, as Parquet."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TABLE = {"AIME24": "aime-24", "AMC23": "amc-23", "MATH500": "math-500", "Minerva": "minerva", "Olympiad": "olympiad"}
"""The sets of recipes/math-table.toml."""


def small_table(folder: Path) -> list[str]:
    """The options that run recipes/math-table.toml on small files and short responses of the tiny model."""
    words = []
    for name, kind in TABLE.items():
        file = write_rows(folder / f"{kind}.jsonl", ROWS[kind])
        words += [f"evaluation.sets.{name}.task.path={file}", f"evaluation.sets.{name}.samples_per_problem=2"]
    return [*words, "policy.max_prompt_tokens=128", "rollouts.max_response_tokens=4"]
