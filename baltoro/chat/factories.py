"""What an engine that speaks ids only is given of text: stop rules and masks, one object per completion.

In: a tokenizer. Out: the factories of `engine.Engine`, for the process of `baltoro serve` and for `LLM` alike.
Invariants: the grammar machinery is built when the first grammar comes: it takes seconds for a large vocabulary.
"""

from __future__ import annotations

from baltoro.chat.grammar import Grammars
from baltoro.chat.stop import make_stop_rule
from baltoro.chat.tokenizer import Tokenizer
from baltoro.protocol.sampling import SamplingParams, StopRule, TokenMask
from baltoro.protocol.worker import Submit


class Factories:
    """The factories of one engine. Single writer: the engine's thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None
        self.eos_ids = tokenizer.eos_ids

    def stop_rule(self, params: SamplingParams) -> StopRule | None:
        """The rule for a request's stop strings; None if it has none. Errors: RequestError."""
        return make_stop_rule(self._tokenizer, params.stop) if params.stop else None

    def mask(self, submit: Submit) -> TokenMask | None:
        """The mask of a request's grammar, from where it begins; None if it has none. Errors: RequestError."""
        if submit.grammar is None:
            return None
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer)
        return self._grammars.of_submit(submit)
