"""What an answer must look like -> a llguidance grammar, and from a grammar the mask of the ids that may come next.

In: `response_format`, tools and `tool_choice` of a request. Out: the grammar as text for `protocol.worker.Submit`
(server), a TokenMask (engine).
Invariants: a chat grammar rules from the first id on and holds the markers of the protocol itself, so reasoning stays
free, the answer starts where it should, and a model that finishes ends its message; channel text is made of base ids,
so only a marker can end a channel.
Limit: JSON has at most 32 white-space characters between its parts: a small model could go on with them for ever.
Source: llguidance's Lark dialect (`<[id]>` is a token, `%json` a schema); K3's completion grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baltoro.chat.messages import Json, format_type, response_schema
from baltoro.chat.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer
from baltoro.chat.tool_grammar import Marks, json_rule, tool_rules
from baltoro.errors import RequestError
from baltoro.protocol.sampling import TokenMask
from baltoro.protocol.worker import Submit


def json_grammar(schema: Json | None = None) -> str:
    """A grammar for JSON alone: that of `schema`, or any object. Errors: RequestError if it cannot be enforced."""
    param = "response_format" if schema is None else "response_format.json_schema.schema"
    return _checked(f"start: {json_rule(schema or {'type': 'object'})}\n", param)


def chat_grammar(
    tokenizer: Tokenizer,
    *,
    thinking: bool,
    response_format: object = None,
    tools: Sequence[Json] = (),
    tool_choice: object = None,
    is_parallel: bool = True,
) -> str | None:
    """The grammar of a completion, from its first id on; None if every completion will do.

    `tool_choice` "required" or a named function: the response is empty and calls follow (one, unless `is_parallel`).
    Errors: RequestError names the schema or tool that cannot be enforced.
    """
    schema = response_schema(response_format)
    has_json = format_type(response_format) in ("json_object", "json_schema")
    if has_json:
        json_grammar(schema)  # an error names the schema, not the tools
    wanted = _wanted_tools(tools, tool_choice)
    is_forced = tool_choice == "required" or isinstance(tool_choice, dict)
    if not has_json and not is_forced:
        return None
    marks = Marks(
        text=f"<[0-{tokenizer.num_base - 1}]>*",
        open=f"<[{tokenizer.special(OPEN)}]>",
        close=f"<[{tokenizer.special(CLOSE)}]>",
        sep=f"<[{tokenizer.special(SEP)}]>",
    )
    think = f"{marks.text} {marks.closing('think')} {marks.opening('response')} " if thinking else ""
    closed, end = marks.closing("response"), f"({marks.closing('message')})?"
    lines = [f"end: {end}"]
    if is_forced:
        lines.append(f"start: {think}{closed} tools end")
    elif wanted:
        lines.append(f"start: {think}(answer {closed} tools? | {closed} tools) end")
    else:
        lines.append(f"start: {think}answer ({closed} end)?")
    if has_json and not is_forced:
        lines.append(f"answer: {json_rule(schema or {'type': 'object'})}")
    if wanted:
        lines += tool_rules(wanted, marks, is_parallel=is_parallel)
    return _checked("\n".join(lines) + "\n", "tools" if wanted else "response_format")


def _wanted_tools(tools: Sequence[Json], tool_choice: object) -> list[Json]:
    """The functions that may be called. Errors: RequestError if a call is forced that cannot be made."""
    functions: list[Json] = [tool.get("function", tool) for tool in tools]
    if tool_choice == "none":
        return []
    if isinstance(tool_choice, dict):
        name = tool_choice.get("function", tool_choice).get("name")
        functions = [f for f in functions if f["name"] == name]
        if not functions:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if tool_choice == "required" and not functions:
        raise RequestError("tool_choice required needs tools", param="tool_choice")
    return functions


def _checked(lark: str, param: str) -> str:
    """The grammar in its serialised form. Errors: RequestError with `param` and llguidance's reason."""
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)
    if error := LLMatcher.validate_grammar(grammar):
        reason = error.splitlines()[0].partition(": ")[2] or error
        raise RequestError(f"{param} cannot be enforced: {reason}", param=param)
    return grammar


class Grammars:
    """Makes masks for one vocabulary. Building it takes about 3 s for 163,840 ids (2 CPU cores), 20 ms for 1,280."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._end = tokenizer.special(END_OF_MSG)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, self._end)), n_vocab=self._vocab_size)

    def of_submit(self, submit: Submit) -> TokenMask | None:
        """The mask that a request asks for. Errors: RequestError if its grammar is none."""
        if submit.grammar is None:
            return None
        mask = self.mask(submit.grammar)
        return AfterMask(mask, submit.grammar_after) if submit.grammar_after else mask

    def mask(self, grammar: str) -> GrammarMask:
        """A mask at the start of `grammar`. Errors: RequestError if the grammar is none."""
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise RequestError(f"grammar: {matcher.get_error()}", param="grammar")
        return GrammarMask(matcher, self._vocab_size, self._end)


class GrammarMask:
    """A TokenMask. Single writer: the engine, for one completion.

    The end-of-message id may come where the grammar may stop; after it every id may. After an id that was not allowed,
    or when the grammar grew beyond llguidance's limits, none may, and `error` says why: the request ends, nothing else.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end: int) -> None:
        self._matcher = matcher
        self._num_bytes = (vocab_size + 7) // 8
        self._end = end
        self._is_over = False
        self.error = ""

    def allowed(self) -> bytes:
        """Bitmask over the vocabulary."""
        if self._is_over:
            return b""
        if not self.error:
            mask: bytes = self._matcher.compute_bitmask()
            self.error = self._matcher.get_error()
        return bytes(self._num_bytes) if self.error else mask[: self._num_bytes]

    def push(self, token: int) -> None:
        """Advance."""
        if self._is_over or self.error:
            return
        self._matcher.consume_token(token)
        self.error = self._matcher.get_error()
        self._is_over = not self.error and token == self._end


class AfterMask:
    """A TokenMask: every id until a run of ids has come, then those of another mask. Single writer: the engine."""

    def __init__(self, mask: TokenMask, run: Sequence[int]) -> None:
        self._mask = mask
        self._run = tuple(run)
        self._last: tuple[int, ...] = ()
        self._is_on = False

    def allowed(self) -> bytes:
        """Bitmask over the vocabulary; empty before the run."""
        return self._mask.allowed() if self._is_on else b""

    def push(self, token: int) -> None:
        """Advance."""
        if self._is_on:
            self._mask.push(token)
            return
        self._last = (*self._last, token)[-len(self._run) :]
        self._is_on = self._last == self._run


class _Vocabulary:
    """What llguidance asks of a vocabulary."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = list(range(tokenizer.num_base, tokenizer.vocab_size))

    def __call__(self, text: Any) -> list[int]:
        return self._encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)
