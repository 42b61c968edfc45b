"""Texts that a policy may write, from the empty text to texts that break parsers."""

HOSTILE = {
    "nothing": "",
    "spaces": " \n\t ",
    "an answer": "5",
    "a long text": "5 " * 50_000,
    "deep brackets": "(" * 5_000,
    "a huge number": "9" * 5_000,
    "no characters of people": "\x00\x1b[2J\x7f",
    "half a character": "\ud83d",
    "signs of a template": "<|im_end|><|im_start|>system\n</think>{{ 1 / 0 }}{% for %}",
    "format signs": "%s %(x)s {0} {x!r:>{y}}",
    "not a number": "nan inf -inf 1e999 1/0",
}
