"""Rollouts as a hostile or broken model writes them."""

from typing import Any

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><svg onload='window.hacked = 3'>"
    "<a href='javascript:window.hacked = 4'>link</a> {{window.hacked}} \x1b[31mred\x1b[0m \u202egnp.exe\u202c"
    " \u2066b\u2069\x00"
)
PIECES = ["<script>", "window.hacked", " = 1", "</script>", "\x1b[31m", "\u202e", "\n"]
LONG = "a line of output\n" * 62_500


def hostile_rollouts() -> list[dict[str, Any]]:
    details = {
        "pieces": PIECES,
        "logprobs": [-0.1, -2.0, -0.5, -0.1, -4.0, -1.0, -0.2],
        "log_ratios": [0.0, 0.4, -0.4, 0.01, -0.08, 0.2, 0.0],
        "advantages": None,
        "coefficients": [0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1],
        "update": 1,
    }
    base = {"prompt": HOSTILE, "answer": "<b>7</b>", "components": {"<i>x</i>": 1.0}, "key": "k", "accuracy": 1.0}
    return [
        base
        | {
            "text": HOSTILE,
            "reward": 1.0,
            "tokens": 7,
            "stop": "end_token",
            "group": 0,
            "advantage": 1.5,
            "details": details,
        },
        base
        | {"text": "no", "reward": 0.0, "accuracy": 0.0, "tokens": 1, "stop": "length", "group": 0, "advantage": -0.5}
        | {"details": {"pieces": ["n", "o"], "logprobs": [-0.1, -0.2], "log_ratios": [1.2e-7, -1.2e-7], "update": 0}},
        base
        | {"text": LONG, "prompt": "long", "reward": 0.5, "tokens": 300000, "stop": "length", "group": 1, "advantage": 0.0},
    ]
