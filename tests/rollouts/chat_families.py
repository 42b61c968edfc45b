"""Chat templates with tools for tests: of the structure of Qwen3's, Llama 3.1's and gpt-oss's, and a tokenizer for them.

Where the package trl is installed, or its folder of templates is named by LEGATO_CHAT_TEMPLATES, the real templates are
tested as well.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"

QWEN = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
{%- set content = m.content -%}
{%- if '</think>' in content and loop.index0 < ns.query -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>assistant
{{ content }}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

LLAMA = """{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif 'tool_calls' in m -%}<|start_header_id|>assistant<|end_header_id|>

<|python_tag|>{{ m.tool_calls[0].function.name }}<|eom_id|>
{%- else -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if tools and loop.first %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

HARMONY = """<|start|>system<|message|>tools: {% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<|end|>
{%- set last = namespace(name='') -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if '<|channel|>' in m.content -%}{{ raise_exception('channel markers in content') }}{%- endif -%}
{%- if m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{%- if m.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- set last.name = call.name -%}
{%- else -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if not last.name -%}{{ raise_exception('a tool without a call') }}{%- endif -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and how its model writes a call and an answer."""

    name: str
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    """Tokens that are added, but not special."""
    end: str
    call: str
    """With {a} for the argument."""
    answer: str
    call_end: str
    bos: str | None = None

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {word: number for number, word in enumerate(["<pad>", "<unknown>", *CHARACTERS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        build: Any = PreTrainedTokenizerFast
        words = build(
            tokenizer_object=tokenizer, eos_token=self.end, pad_token="<pad>", unk_token="<unknown>", bos_token=self.bos,
            clean_up_tokenization_spaces=False, additional_special_tokens=list(self.special),
        )  # fmt: skip
        words.add_tokens(list(self.added))
        words.chat_template = self.template
        return words

    def ids(self, words: Any, text: str, end: str) -> list[int]:
        return [*words(text, add_special_tokens=False)["input_ids"], words.convert_tokens_to_ids(end)]


def _qwen(name: str, template: str) -> Family:
    return Family(
        name=name,
        template=template,
        special=("<|im_start|>", "<|im_end|>"),
        added=("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
        end="<|im_end|>",
        call='<think>\nhm {a}\n</think>\n\n<tool_call>\n{{"name": "double", "arguments": {{"a": {a}}}}}\n</tool_call>',
        answer="<think>\nso\n</think>\n\nit is 8",
        call_end="<|im_end|>",
    )


def _llama(name: str, template: str) -> Family:
    return Family(
        name=name,
        template=template,
        special=("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        added=(),
        end="<|eot_id|>",
        call='<|python_tag|>{{"name": "double", "parameters": {{"a": {a}}}}}',
        answer="it is 8",
        call_end="<|eom_id|>",
        bos="<s>",
    )


def _harmony(name: str, template: str) -> Family:
    markers = ("start", "end", "message", "channel", "constrain", "call", "return")
    return Family(
        name=name,
        template=template,
        special=tuple(f"<|{each}|>" for each in markers),
        added=(),
        end="<|return|>",
        call="<|channel|>analysis<|message|>hm {a}<|end|><|start|>assistant<|channel|>commentary to=functions.double"
        ' <|constrain|>json<|message|>{{"a":{a}}}',
        answer="<|channel|>final<|message|>it is 8",
        call_end="<|call|>",
    )


def _real() -> list[Family]:
    spec = find_spec("trl")
    folder = os.environ.get("LEGATO_CHAT_TEMPLATES") or (
        str(Path(spec.origin).parent / "chat_templates") if spec is not None and spec.origin else None
    )
    if folder is None:
        return []
    files = {"qwen3": _qwen, "llama3_1": _llama, "gptoss": _harmony}
    return [make(f"trl's {name}", (Path(folder) / f"{name}.jinja").read_text()) for name, make in files.items()]


FAMILIES = [_qwen("qwen", QWEN.strip("\n")), _llama("llama", LLAMA), _harmony("harmony", HARMONY.strip("\n")), *_real()]
