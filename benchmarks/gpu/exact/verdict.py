"""The rule that decides, written before the experiment ran (see the parts in `trial.py`).

Go if cuBLASLt without split-K is equal for every bucket of at least 8 rows at no more than 1.15 times the time, and one
layout of the chained attention is equal at no more than 1.2 times; buckets below 8 can be padded.
"""

from collections.abc import Mapping
from typing import Any

FEWEST_ROWS = 8
PRODUCT_LIMIT = 1.15
ATTENTION_LIMIT = 1.2
BASE = "default"


def decide(results: Mapping[str, Any]) -> dict[str, Any]:
    """Which ways and layouts meet the rule in every shape that was measured, and whether the answer is go."""
    shapes = list(results)
    ways = sorted({name.split(": ")[1] for shape in shapes for name in results[shape].get("products", {})} - {BASE})
    layouts = sorted({name for shape in shapes for name in results[shape].get("attention", {})} - {"today"})
    product_findings = {way: [_product(results[shape]["products"], way) for shape in shapes] for way in ways}
    attention_findings = {name: [_layout(results[shape]["attention"], name) for shape in shapes] for name in layouts}
    good_products = [way for way, each in product_findings.items() if all(x["equal"] and x["fast"] for x in each)]
    good_layouts = [name for name, each in attention_findings.items() if all(x["equal"] and x["fast"] for x in each)]
    return {
        "products": {way: dict(zip(shapes, each, strict=True)) for way, each in product_findings.items()},
        "attention": {name: dict(zip(shapes, each, strict=True)) for name, each in attention_findings.items()},
        "heads equal": {shape: _all_equal(results[shape].get("heads", {}).get("training's kernel", {})) for shape in shapes},
        "head equal": {
            shape: all(_all_equal(each["training's projection"]) for each in results[shape].get("head", {}).values())
            for shape in shapes
        },
        "good products": good_products,
        "good attention": good_layouts,
        "go": bool(good_products and good_layouts),
    }


def _product(rows: Mapping[str, Any], way: str) -> dict[str, Any]:
    """Whether every product is equal from 8 rows on, and the largest ratio of its time to default cuBLAS."""
    mine = {name.split(": ")[0]: row for name, row in rows.items() if name.split(": ")[1] == way}
    different = sorted({int(size) for row in mine.values() for size, count in row["unequal"].items() if count})
    ratio = max(
        (
            row["seconds"][size] / rows[f"{name}: {BASE}"]["seconds"][size]
            for name, row in mine.items()
            for size in row["seconds"]
            if row["seconds"][size] and f"{name}: {BASE}" in rows
        ),
        default=None,
    )
    equal = not any(size >= FEWEST_ROWS for size in different)
    return {"equal": equal, "unequal at": different, "slower": ratio, "fast": ratio is not None and ratio <= PRODUCT_LIMIT}


def _layout(rows: Mapping[str, Any], name: str) -> dict[str, Any]:
    different = sorted(int(size) for size, each in rows[name].items() if each["unequal"])
    ratios = [
        each["seconds"] / rows["today"][size]["seconds"]
        for size, each in rows[name].items()
        if each["seconds"] and rows["today"][size]["seconds"]
    ]
    slower = max(ratios, default=None)
    return {
        "equal": not different,
        "unequal at": different,
        "slower": slower,
        "fast": slower is not None and slower <= ATTENTION_LIMIT,
    }


def _all_equal(rows: Mapping[str, Any]) -> bool:
    return bool(rows) and not any(each["unequal"] for each in rows.values())
