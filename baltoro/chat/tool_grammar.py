"""Tools -> rules of a llguidance grammar for K3's tools channel, argument by argument.

In: function schemas. Out: lines of Lark, rule `tools` at their head.
Invariants: arguments come in the order of `properties`, the required ones always; each has one of the types that its
schema allows; values that are no strings follow their schema.
Limits: strings are free (or one of `enum`): patterns and lengths are not enforced, nor are keywords that llguidance
lacks; a function without properties takes any arguments unless `additionalProperties` is false; local `$ref`s are
followed, no others.
Source: K3's completion grammar; llguidance's `%json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baltoro.chat.messages import Json
from baltoro.chat.segments import escape
from baltoro.chat.xtml import type_word
from baltoro.errors import RequestError

_WORDS = ("string", "number", "boolean", "null", "object", "array")
_WHITE_SPACE = r"[ \t\n\r]{0,32}"
_MAX_REFS = 16


@dataclass(frozen=True, slots=True)
class Marks:
    """Lark for free channel text and for the control ids."""

    text: str
    open: str
    close: str
    sep: str

    def opening(self, head: str) -> str:
        """Lark for an open tag; `head` is its name and attributes."""
        return f"{self.open} {_literal(head)} {self.sep}"

    def closing(self, tag: str) -> str:
        """Lark for a close tag."""
        return f"{self.close} {_literal(tag)} {self.sep}"


def json_rule(schema: Json, *, is_lenient: bool = False) -> str:
    """Lark for JSON that follows `schema`. What cannot be enforced is an error, or with `is_lenient` left out."""
    guidance = {"whitespace_pattern": _WHITE_SPACE, "lenient": is_lenient}
    return "%json " + json.dumps(schema | {"x-guidance": guidance}, ensure_ascii=False)


def tool_rules(functions: Sequence[Json], marks: Marks, *, is_parallel: bool) -> list[str]:
    """Lines of Lark; `tools` is a whole tools channel with at least one call."""
    calls = " | ".join(f"call{i}" for i in range(len(functions)))
    count = "+" if is_parallel else ""
    lines = [f"tools: {marks.opening('tools')} ({calls}){count} {marks.closing('tools')}"]
    for i, function in enumerate(functions):
        parameters = function.get("parameters") or {}
        named = _literal("call tool=" + _quoted(function["name"]) + ' index="')
        head = f"{named} /[1-9][0-9]*/ {_literal(chr(34))}"
        arguments = " ".join(f"arg{i}_{j}{mark}" for j, mark in enumerate(_marks_of(parameters)))
        if not parameters.get("properties") and parameters.get("additionalProperties") is not False:
            arguments = "any_argument*"
        lines.append(f"call{i}: {marks.open} {head} {marks.sep} {arguments} {marks.closing('call')}")
        for j, (name, schema) in enumerate(_properties(parameters).items()):
            lines.append(
                f"arg{i}_{j}: {_argument(_literal('argument key=' + _quoted(name)), schema, parameters, marks)}"
            )
    key = f'{_literal("argument key=" + chr(34))} /[^"&]+/ {_literal(chr(34))}'
    return [*lines, f"any_argument: {_argument(key, {}, {}, marks)}"]


def _properties(parameters: Json) -> dict[str, Json]:
    properties = parameters.get("properties") or {}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in properties.items()}


def _marks_of(parameters: Json) -> Iterator[str]:
    """ "" for a required argument, "?" for another one, in the order of the properties."""
    required = parameters.get("required") or ()
    for name in _properties(parameters):
        yield "" if name in required else "?"


def _argument(key: str, schema: Json, root: Json, marks: Marks) -> str:
    """Lark for one argument: alternatives, one for each type it may have. `key` is Lark up to the type."""
    shared: Json = {name: root[name] for name in ("$defs", "definitions") if name in root}
    alternatives = []
    for word, value in _values(schema, root, shared, marks):
        head = f"{marks.open} {key} {_literal(' type=' + _quoted(word))} {marks.sep}"
        alternatives.append(f"{head} {value} {marks.closing('argument')}")
    return " | ".join(alternatives)


def _values(schema: Json, root: Json, shared: Json, marks: Marks) -> Iterator[tuple[str, str]]:
    """(K3's word for the type, Lark for the value) for each type that `schema` allows."""
    schema = _resolved(schema, root)
    if "enum" in schema or "const" in schema:
        for value in schema.get("enum", [schema.get("const")]):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield type_word(value), _literal(text) if text else ""
        return
    for key in ("anyOf", "oneOf"):
        if key in schema:
            for option in schema[key]:
                yield from _values(option, root, shared, marks)
            return
    types = schema.get("type", list(_WORDS))
    for kind in [types] if isinstance(types, str) else types:
        word = "number" if kind == "integer" else kind
        yield word, marks.text if kind == "string" else json_rule(shared | schema | {"type": kind}, is_lenient=True)


def _resolved(schema: Json, root: Json) -> Json:
    """`schema`, or what its local `$ref` points to. Errors: RequestError if that is nothing."""
    for _ in range(_MAX_REFS):
        ref = schema.get("$ref")
        if ref is None:
            return schema
        target: object = root
        for step in str(ref).removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = target
    raise RequestError(f"tools: the reference {schema.get('$ref')!r} leads nowhere", param="tools")


def _quoted(value: str) -> str:
    return f'"{escape(value)}"'


def _literal(text: str) -> str:
    """Lark for exactly this text."""
    return json.dumps(text, ensure_ascii=False)
