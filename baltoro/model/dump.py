"""Every tensor that a forward leaves behind, and its gradient, told one by one: what `baltoro compare` compares.

In: a model, whole or in its folder, and a context without a cache. Out: (name, tensor) calls of a sink, in the order
of the forward, then of the backward. Names: `embed`; `layers.N.attention.in`, `layers.N.attention`, `layers.N.moe.in`
(`mlp.in` in a dense layer), `layers.N.router` (logits), `layers.N.moe`, `layers.N` (the running sum after the layer);
`hidden`, `logits`. A gradient is `grad/` and the name of an activation or, as in a state_dict, of a parameter.
Invariants: a part of the model has its weights only while it runs, so one layer is in memory at a time; between parts
only streams [T, D] are kept, and the backward runs each layer again from the stream that entered it. Hooks are gone
when their layer has run.
Not here: files (dump_files.py), what is equal enough (dump_compare.py). No MTP layers and no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baltoro.errors import ConfigError
from baltoro.kernels.dispatch import TABLE, Kernels
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.attnres import Stream
from baltoro.model.context import ForwardContext
from baltoro.model.decoder import K3Model
from baltoro.model.layer import DecoderLayer
from baltoro.model.weights import fill_params, match_folder, torch_dtype

Sink = Callable[[str, Tensor], None]
GRAD = "grad/"


@dataclass(frozen=True, slots=True)
class Source:
    """A model whose modules, by path, have their weights inside `use(paths)`."""

    model: K3Model
    use: Callable[[Sequence[str]], AbstractContextManager[None]]


def whole(model: K3Model) -> Source:
    """A model that is in memory anyway. It must not be merged: a merged router is no module that runs."""
    return Source(model, lambda paths: nullcontext())


def streamed(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Source:
    """The model of a folder, its weights read when they are used and dropped afterwards.

    Errors: ConfigError or WeightsError, before any weight is read, if the files do not fit the config.
    """
    config, pairs = match_folder(folder, dtype=dtype)
    model = K3Model(config, torch_dtype(config.dtype), "meta")

    @contextmanager
    def use(paths: Sequence[str]) -> Iterator[None]:
        modules = {path: model.get_submodule(path) for path in paths}
        for path, module in modules.items():
            module.to_empty(device=device)
            params = {f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}
            fill_params(params, [pair for pair in pairs if pair[0].param in params])
        try:
            yield
        finally:
            for module in modules.values():
                module.to("meta")

    return Source(model, use)


class OracleContext(ForwardContext):
    """A step on the reference implementations alone: another order of the same sums."""

    @cached_property
    def kernels(self) -> Kernels:
        """The last row of every operation."""
        rows = {row.op: row.function for row in TABLE}
        return Kernels(**{field.name: rows[field.name] for field in fields(Kernels)})


def dump_context(
    ids: Sequence[int],
    *,
    device: str | torch.device = "cpu",
    is_training: bool = True,
    is_oracle: bool = False,
    num_copies: int = 1,
) -> ForwardContext:
    """The prompt as one document, or as `num_copies` packed ones; the last is the one that a walk tells of."""
    kind = OracleContext if is_oracle else ForwardContext
    tokens = torch.tensor([*ids] * num_copies, dtype=torch.int64, device=device)
    return kind(tokens, Spans.build((len(ids),) * num_copies, device=tokens.device), is_training=is_training)


class Walk:
    """One forward, and one backward of the mean next-token loss, over the last document of `ctx`.

    `layers`: those whose tensors are told, None for all; every layer runs. Single writer: `forward`, then `backward`.
    """

    def __init__(self, source: Source, ctx: ForwardContext, sink: Sink, layers: frozenset[int] | None = None) -> None:
        self.model, self._use, self._ctx, self._sink = source.model, source.use, ctx, sink
        self._layers = layers
        self._rows = slice(ctx.spans.num_tokens - ctx.spans.lengths[-1], None)
        self._streams: list[Stream] = []  # what entered each layer, and the head at the end
        decoder, config = self.model.model, self.model.config
        last = ("output_attn_res_norm", "output_attn_res_proj") if decoder.has_attn_res else ()
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = [*(f"model.{name}" for name in last), "model.norm", head]
        self._tied: Tensor | None = None  # the head's share of the embedding's gradient

    @torch.no_grad()
    def forward(self) -> None:
        """Tell every activation."""
        with self._use(["model.embed_tokens"]):
            stream = Stream(self.model.embed(self._ctx))
        self._tell("embed", _prefix(stream))
        self._streams = [stream]
        for i in range(self.model.config.num_layers):
            with self._use([f"model.layers.{i}"]):
                layer = self._layer(i)
                with taps(layer, f"layers.{i}", self._sink_for(i)):
                    stream = layer(stream, self._ctx)
            self._sink_for(i)(f"layers.{i}", _prefix(stream))
            self._streams.append(stream)
        with self._use(self._head):
            hidden = self.model.model.leave(stream, self._ctx)
            self._tell("hidden", hidden)
            self._tell("logits", self.model.logits(hidden))

    def backward(self) -> float:
        """Tell every gradient, the last first; the loss. Errors: ConfigError for a prompt without a next token."""
        if self._ctx.spans.lengths[-1] < 2:
            raise ConfigError("a next-token loss needs a prompt of two tokens or more")
        loss, grads = self._backward_head()
        for i in reversed(range(self.model.config.num_layers)):
            grads = self._backward_layer(i, grads)
        with self._use(["model.embed_tokens"]):
            torch.autograd.backward(self.model.embed(self._ctx), grads[-1])
            weight = self.model.model.embed_tokens.weight
            if self._tied is not None and weight.grad is not None:
                weight.grad += self._tied
            self._tell_parameters(["model.embed_tokens"], self._sink)
        return loss

    def _backward_head(self) -> tuple[float, list[Tensor | None]]:
        entering = _leaves(self._streams.pop())
        with self._use(self._head), torch.enable_grad():
            hidden = self.model.model.leave(entering, self._ctx)
            logits = self.model.logits(hidden)
            for tensor in (hidden, logits):
                tensor.retain_grad()
            kept = logits[self._rows][:-1]
            loss = F.cross_entropy(kept.to(acc_dtype(kept.dtype)), self._ctx.tokens[self._rows][1:])
            torch.autograd.backward(loss)
            for name, tensor in (("logits", logits), ("hidden", hidden)):
                self._tell(GRAD + name, _gradient(tensor))
            if self.model.config.tie_word_embeddings:
                self._tied, self.model.model.embed_tokens.weight.grad = self.model.model.embed_tokens.weight.grad, None
            self._tell_parameters(self._head, self._sink)
        return loss.item(), [tensor.grad for tensor in _tensors(entering)]

    def _backward_layer(self, i: int, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the stream [bank..., prefix] that entered layer `i`, from those of the one that left it."""
        entering = _leaves(self._streams.pop())
        tell = self._sink_for(i)
        seen: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            tensor.retain_grad()
            seen[name] = tensor

        with self._use([f"model.layers.{i}"]), torch.enable_grad():
            layer = self._layer(i)
            with taps(layer, f"layers.{i}", keep):
                leaving = layer(entering, self._ctx)
            pairs = [(t, g) for t, g in zip(_tensors(leaving), grads, strict=True) if g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            if grads[-1] is not None:
                tell(f"{GRAD}layers.{i}", grads[-1][self._rows])
            for name, tensor in reversed(seen.items()):
                if tensor.grad is not None:
                    tell(GRAD + name, tensor.grad[self._rows])
            self._tell_parameters([f"model.layers.{i}"], tell)
        return [tensor.grad for tensor in _tensors(entering)]

    def _tell_parameters(self, paths: Sequence[str], tell: Sink) -> None:
        """Gradients of the parameters below `paths`, which lose them."""
        for path in paths:
            for name, parameter in self.model.get_submodule(path).named_parameters(prefix=path):
                if parameter.grad is not None:
                    tell(GRAD + name, parameter.grad)
                    parameter.grad = None

    def _layer(self, i: int) -> DecoderLayer:
        layer = self.model.model.layers[i]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _tell(self, name: str, tensor: Tensor) -> None:
        """Rows of the last document."""
        self._sink(name, tensor.detach()[self._rows])

    def _sink_for(self, i: int) -> Sink:
        if self._layers is not None and i not in self._layers:
            return lambda name, tensor: None
        # forward activations have the rows of all documents; gradients come cut already
        return lambda name, tensor: self._sink(name, tensor) if name.startswith(GRAD) else self._tell(name, tensor)


@contextmanager
def taps(layer: DecoderLayer, at: str, tell: Sink) -> Iterator[None]:
    """While it lasts, what goes into and comes out of a layer's two halves, and its router's logits, are told."""
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def tap(module: nn.Module, name: str, *, has_input: bool = True) -> None:
        if has_input:
            hooks.append(module.register_forward_pre_hook(lambda m, given: tell(f"{name}.in", given[0])))
        hooks.append(module.register_forward_hook(lambda m, given, out: tell(name, out)))

    tap(layer.self_attn, f"{at}.attention")
    if layer.has_experts:
        tap(layer.block_sparse_moe, f"{at}.moe")
        tap(layer.block_sparse_moe.gate, f"{at}.router", has_input=False)
    else:
        tap(layer.mlp, f"{at}.mlp")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(stream: Stream) -> list[Tensor]:
    """Bank, then prefix."""
    return [*stream.bank, _prefix(stream)]


def _prefix(stream: Stream) -> Tensor:
    assert stream.prefix is not None, "between layers a stream has a running sum"
    return stream.prefix


def _leaves(stream: Stream) -> Stream:
    """The same values, as the beginning of a graph."""
    *bank, prefix = (tensor.detach().clone().requires_grad_() for tensor in _tensors(stream))
    return Stream(prefix, tuple(bank))


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
