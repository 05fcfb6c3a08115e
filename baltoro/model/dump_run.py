"""One run of a model written to a folder, and how far a second run of the same is from it.

In: a source and what to run. Out: a dump; with `measure_floor`, the noise floor in its manifest. Two kinds of floor:
    order      the same sums in another order: the prompt is packed behind a copy of itself (other shapes, cut
               otherwise), and a caller changes the number of threads. For builds that ought to run the same kernels.
    rounding   besides, every weight is moved by at most one rounding of its dtype: what the dtype itself cannot tell
               apart. For other kernels, and for two dtypes (measure it on the coarser).
Neither runs other kernels: a wrong one would raise the floor that it is to be held against.
Invariant: the floor's run writes no tensors; what the first run wrote is read back one tensor at a time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from baltoro.errors import ConfigError
from baltoro.model.decoder import K3Model
from baltoro.model.dump import Sink, Source, Walk, dump_context
from baltoro.model.dump_compare import difference
from baltoro.model.dump_files import FILE_BYTES, Dump, DumpWriter, Manifest, config_digest
from baltoro.model.weights import dtype_word

Floor = Literal["order", "rounding"]
NUM_DEFAULT_IDS = 150  # two borders of chunks, and not a multiple of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is run. `layers`: those that are dumped, None for all.

    has_gradients  also the backward of the mean next-token loss
    is_training    the trainer's branches (MLA's output stays wide up to its gate) or the engine's
    is_oracle      reference implementations instead of what the dispatch table picks
    """

    ids: tuple[int, ...]
    has_gradients: bool = False
    is_training: bool = True
    is_oracle: bool = False
    layers: frozenset[int] | None = None
    device: str = "cpu"

    def check(self, vocab_size: int, num_layers: int) -> None:
        """Errors: ConfigError for what the model cannot run."""
        if not self.ids:
            raise ConfigError("the prompt is empty")
        if wrong := [token for token in self.ids if not 0 <= token < vocab_size]:
            raise ConfigError(f"token {wrong[0]} is not of this model, whose vocabulary has {vocab_size}")
        if self.has_gradients and not self.is_training:
            raise ConfigError("gradients belong to the trainer's branches; leave --inference out")
        if self.layers is not None and (absent := [i for i in sorted(self.layers) if not 0 <= i < num_layers]):
            raise ConfigError(f"layer {absent[0]} is not there: layers are 0 to {num_layers - 1}")


def default_ids(vocab_size: int, count: int = NUM_DEFAULT_IDS) -> tuple[int, ...]:
    """A prompt for a model without a tokenizer: the same ids for a vocabulary, spread all over it."""
    return tuple((7919 * i + 13) % vocab_size for i in range(count))


def write_dump(
    source: Source, folder: Path, run: Run, *, facts: Mapping[str, Any] | None = None, file_bytes: int = FILE_BYTES
) -> Manifest:
    """Run, and write what came. Errors: ConfigError for a run that cannot be, WeightsError for a folder in use."""
    config = source.model.config
    run.check(config.vocab_size, config.num_layers)
    manifest = Manifest(
        ids=run.ids,
        config_digest=config_digest(config),
        dtype=dtype_word(source.model.dtype),
        is_training=run.is_training,
        is_oracle=run.is_oracle,
        has_gradients=run.has_gradients,
        facts=dict(facts or {}),
    )
    with DumpWriter(folder, manifest, file_bytes=file_bytes) as writer:
        manifest.loss = _walk(source, run, writer.write, num_copies=1)
    return manifest


def measure_floor(source: Source, folder: Path, run: Run, kind: Floor = "order") -> Mapping[str, float]:
    """Run again, otherwise; relative L2 by name, written into the manifest of the dump in `folder`.

    Tensors that are not finite, or zero in one run alone, have none.
    """
    dump = Dump(folder)
    floor: dict[str, float] = {}

    def hold(name: str, tensor: Tensor) -> None:
        apart = difference(dump.read(name), tensor.cpu())[0]
        if math.isfinite(apart):
            floor[name] = apart

    if kind == "rounding":
        source = shaken(source)
    _walk(source, run, hold, num_copies=2)
    dump.manifest.floor, dump.manifest.floor_kind = floor, kind
    dump.manifest.write(folder)
    return floor


def shaken(source: Source) -> Source:
    """The model with every floating point weight times 1 + r, |r| up to one rounding, while it is in use.

    The same r at every use. Packed weights stay as they are.
    """

    @contextmanager
    def use(paths: Sequence[str]) -> Iterator[None]:
        with source.use(paths):
            kept = _shake(source.model, paths)
            try:
                yield
            finally:
                with torch.no_grad():
                    for name, value in kept.items():
                        source.model.get_parameter(name).copy_(value)

    return Source(source.model, use)


@torch.no_grad()
def _shake(model: K3Model, paths: Sequence[str]) -> dict[str, Tensor]:
    """Move the weights below `paths`; what they were."""
    kept = {}
    for path in paths:
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        for name, weight in model.get_submodule(path).named_parameters(prefix=path):
            kept[name] = weight.detach().clone()
            noise = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
            weight.mul_((1 + noise * torch.finfo(weight.dtype).eps).to(weight.device))
    return kept


def _walk(source: Source, run: Run, sink: Sink, *, num_copies: int) -> float | None:
    ctx = dump_context(
        run.ids,
        device=torch.device(run.device),
        is_training=run.is_training,
        is_oracle=run.is_oracle,
        num_copies=num_copies,
    )
    walk = Walk(source, ctx, sink, run.layers)
    walk.forward()
    return walk.backward() if run.has_gradients else None
