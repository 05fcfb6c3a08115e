"""Requests on an engine's runner without its scheduler: slots and pages dealt out once, any spans in any step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from baltoro.cache.shape import ArenaShape
from baltoro.engine.batch import Plan, Span
from baltoro.engine.engine import Engine
from baltoro.engine.spec.verify import Verified, Verifier

Work = Sequence[tuple[int, Sequence[int]]]
"""(request, its next tokens), decodes first."""


class Walker:
    """`num_requests` requests that share an arena, their pages in scrambled order."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self.engine, self.runner = engine, engine.runner
        self.size, shape = engine.config.page_size, engine.pool.shape
        assert isinstance(shape, ArenaShape), "take a fixed pool"
        order = torch.randperm(shape.num_pages, generator=torch.Generator().manual_seed(7)) + shape.first_page
        self.pages = order.view(num_requests, -1).numpy()
        self.slots = list(range(num_requests, 0, -1))
        self.done, self.adapters = [0] * num_requests, [0] * num_requests

    @property
    def verifier(self) -> Verifier:
        assert self.runner.verifier is not None
        return self.runner.verifier

    def span(self, n: int, tokens: Sequence[int]) -> Span:
        end = self.done[n] + len(tokens)
        pages = self.pages[n, : -(-end // self.size)]
        return Span(None, tokens, self.done[n], self.slots[n], pages, None, adapter=self.adapters[n])  # type: ignore[arg-type]

    @torch.inference_mode()
    def step(self, work: Work) -> list[Tensor]:
        """One eager forward of prefills and decodes; logits [length, X] of each span."""
        spans = tuple(self.span(n, tokens) for n, tokens in work)
        num_decodes = sum(span.is_decode for span in spans)
        lengths = [len(tokens) for _, tokens in work]
        logits = self.runner.model(self.runner.context(Plan(spans, num_decodes), list(range(sum(lengths)))))
        for n, tokens in work:
            self.done[n] += len(tokens)
        return list(logits.split(lengths))

    def verify(self, work: Work) -> Verified:
        return self.verifier.run([self.span(n, tokens) for n, tokens in work])

    def fold(self, work: Work, accepted: Sequence[int]) -> None:
        """Of the last `verify`: so many tokens of each window stay."""
        self.verifier.fold(torch.tensor(accepted, device=self.runner.device))
        for (n, _), count in zip(work, accepted, strict=True):
            self.done[n] += count

    def state(self, n: int) -> list[Tensor]:
        """Copies of all that a request's slot holds, recurrent then conv, layer by layer."""
        views = self.runner.views
        return [view[self.slots[n]].clone() for view in (*views.recurrent, *views.conv)]


def greedy(walker: Walker, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens of each prompt, one by one."""
    answers = [[int(walker.step([(n, prompt)])[0][-1].argmax())] for n, prompt in enumerate(prompts)]
    while len(answers[0]) < count:
        logits = walker.step([(n, answer[-1:]) for n, answer in enumerate(answers)])
        for answer, row in zip(answers, logits, strict=True):
            answer.append(int(row[-1].argmax()))
    return answers


def speculate(
    walker: Walker, prompts: Sequence[Sequence[int]], truth: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[list[int]], int]:
    """The same by draft windows: (answers, verify steps). Drafts are what is true, some of them spoilt; windows are
    ragged, and hold as many tokens as are still wanted. Greedy acceptance."""
    answers = [[int(walker.step([(n, prompt)])[0][-1].argmax())] for n, prompt in enumerate(prompts)]
    dice, width, steps = random.Random(5), walker.verifier.width, 0
    while rest := [n for n, answer in enumerate(answers) if len(answer) < len(truth[n])]:
        work = []
        for n in rest:
            done = len(answers[n])
            drafts = list(truth[n][done : done + dice.randint(0, width - 1)])
            for place in range(len(drafts)):
                if dice.random() < 0.2:
                    drafts[place] = (drafts[place] + 1 + dice.randrange(vocab_size - 1)) % vocab_size
            work.append((n, [answers[n][-1], *drafts]))
        found = walker.verify(work)
        assert bool(found.is_valid[0, 0])
        accepted = []
        for (n, window), ids in zip(work, found.ids.tolist(), strict=True):
            drafts, count = window[1:], 0
            while count < len(drafts) and drafts[count] == ids[count]:
                count += 1
            answers[n] += ids[: count + 1]
            accepted.append(count + 1)
        walker.fold(work, accepted)
        steps += 1
    return [answer[: len(true)] for answer, true in zip(answers, truth, strict=True)], steps
