"""Two layouts of the same tensors made comparable: names given anew, shards put together, stacked experts taken apart.

In: the dumps of the ranks of one run (or one whole dump) and rules. Out: a `View`: whole tensors by common name.
Rules, applied in this order whatever the order in which they are given:
    rename=REGEX=>TEXT   a name that matches as a whole is TEXT, with \\1 for groups
    rows=REGEX           shards lie behind each other in dimension 0
    columns=REGEX        shards lie behind each other in the last dimension
    sum=REGEX            each shard holds an addend
    first=REGEX          only the first shard counts
    experts              X.experts.w1 [E, ...] is E tensors X.experts.N.w1.weight, as in a published file
Without a rule every shard that has a name must have the same bytes under it: a partial sum without its rule is an
error, and so is a replicated tensor that ranks disagree on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from baltoro.errors import ConfigError, WeightsError
from baltoro.model.dump_files import Dump

How = Literal["rename", "rows", "columns", "sum", "first"]
STACKED = re.compile(r"(.*\bexperts)\.(w[123])")


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern` matches a whole name; `text` replaces it, of a rename."""

    how: How
    pattern: re.Pattern[str]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a comparison, in order."""

    rules: tuple[Rule, ...] = ()
    has_single_experts: bool = False

    def name(self, name: str) -> str:
        """After the first rename that matches."""
        for rule in self.rules:
            if rule.how == "rename" and (found := rule.pattern.fullmatch(name)):
                return found.expand(rule.text)
        return name

    def join(self, name: str) -> How | None:
        """How shards of a (renamed) name go together."""
        return next((r.how for r in self.rules if r.how != "rename" and r.pattern.fullmatch(name)), None)


def parse_rules(texts: Sequence[str]) -> Rules:
    """Errors: ConfigError that says what a rule looks like."""
    rules = []
    for text in (text.strip() for text in texts):
        how, sign, rest = text.partition("=")
        pattern, arrow, new = rest.partition("=>")
        if text == "experts":
            continue
        if how not in get_args(How) or not sign or not pattern or bool(arrow) != (how == "rename"):
            known = "experts, rename=REGEX=>TEXT, rows=REGEX, columns=REGEX, sum=REGEX, first=REGEX"
            raise ConfigError(f"{text!r} is no rule for layouts; rules are {known}")
        try:
            rules.append(Rule(how, re.compile(pattern), new))  # type: ignore[arg-type]
        except re.error as error:
            raise ConfigError(f"{pattern!r} in the rule {text!r} is no regular expression: {error}") from error
    return Rules(tuple(rules), any(text.strip() == "experts" for text in texts))


@dataclass(frozen=True, slots=True)
class _Part:
    """A common name: which name it has in which dumps, and which expert of that tensor it is."""

    sources: tuple[tuple[Dump, str], ...]
    how: How | None
    expert: int | None = None


@dataclass(slots=True)
class _Last:
    """The tensor that was put together last, so that experts of a stack cost one reading."""

    sources: tuple[tuple[Dump, str], ...] = ()
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))


class View:
    """Whole tensors of one run. `names` are in the order of the run.

    Errors: ConfigError if the dumps are not of one run, or a rename makes two names one.
    """

    def __init__(self, dumps: Sequence[Dump], rules: Rules | None = None) -> None:
        rules = rules or Rules()
        if not dumps:
            raise ConfigError("there is no dump to look at")
        self.dumps = tuple(dumps)
        self.manifest = dumps[0].manifest
        for dump in dumps[1:]:
            same = ("ids", "config_digest", "dtype", "is_training", "has_gradients")
            if different := [key for key in same if getattr(dump.manifest, key) != getattr(self.manifest, key)]:
                folders = f"{dumps[0].folder} and {dump.folder}"
                raise ConfigError(f"{folders} are no shards of one run: {', '.join(different)} differ")
        self._parts: dict[str, _Part] = {}
        sources: dict[str, list[tuple[Dump, str]]] = {}
        for dump in dumps:
            renamed = [rules.name(name) for name in dump.names]
            if len(set(renamed)) < len(renamed):
                twice = next(name for name in renamed if renamed.count(name) > 1)
                raise ConfigError(f"a rename gives two tensors of {dump.folder} the name {twice}")
            for new, old in zip(renamed, dump.names, strict=True):
                sources.setdefault(new, []).append((dump, old))
        for name, found in sources.items():
            part = _Part(tuple(found), rules.join(name))
            stack = STACKED.fullmatch(name) if rules.has_single_experts else None
            if stack is None:
                self._parts[name] = part
                continue
            for expert in range(self._num_experts(part)):
                self._parts[f"{stack[1]}.{expert}.{stack[2]}.weight"] = _Part(part.sources, part.how, expert)
        self._last = _Last()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def has(self, name: str) -> bool:
        return name in self._parts

    def rounding(self, name: str) -> float:
        """Of the coarsest shard."""
        return max(dump.rounding(old) for dump, old in self._parts[name].sources)

    def floor(self, name: str) -> float | None:
        """The largest that a second run of a shard measured; None where no second run was made."""
        sources = self._parts[name].sources
        found = [dump.manifest.floor.get(old, 0.0) for dump, old in sources if dump.manifest.floor]
        return max(found, default=None)

    def read(self, name: str) -> Tensor:
        """Errors: WeightsError if shards do not go together."""
        part = self._parts[name]
        if part.sources != self._last.sources:
            self._last = _Last(part.sources, self._joined(name, part))
        return self._last.tensor if part.expert is None else self._last.tensor[part.expert]

    def _joined(self, name: str, part: _Part) -> Tensor:
        shards = [dump.read(old) for dump, old in part.sources]
        if len(shards) == 1 or part.how == "first":
            return shards[0]
        try:
            if part.how in ("rows", "columns"):
                return torch.cat(shards, dim=0 if part.how == "rows" else -1)
            if part.how == "sum":
                wide = [shard.to(torch.float64) for shard in shards]
                return torch.stack(wide).sum(0)
        except RuntimeError as error:
            shapes = ", ".join(str(list(shard.shape)) for shard in shards)
            raise WeightsError(f"shards {shapes} of {name} do not go together by {part.how}=: {error}") from error
        if any(s.shape != shards[0].shape or not _same_bytes(s, shards[0]) for s in shards[1:]):
            raise WeightsError(
                f"the {len(shards)} shards of {name} are not the same; say how they go together: "
                f"--map rows=, columns= or sum= (or first=, to look at the first alone)"
            )
        return shards[0]

    @staticmethod
    def _num_experts(part: _Part) -> int:
        counts = [(dump.shape(old) or (0,))[0] for dump, old in part.sources]
        return sum(counts) if part.how == "rows" else counts[0]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and (not prod(a.shape) or torch.equal(_raw(a), _raw(b)))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
