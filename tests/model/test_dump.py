"""Dumps of a forward and a backward: complete, in order, layer by layer, and what a folder of them promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from baltoro.errors import ConfigError, WeightsError
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.dump import GRAD, Source, Walk, dump_context, streamed, whole
from baltoro.model.dump_files import MANIFEST, Dump, DumpWriter, Manifest
from baltoro.model.dump_run import Run, default_ids, measure_floor, shaken, write_dump
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3, tiny_kimi_linear

IDS = default_ids(131, 70)


def random_model(config: K3Config) -> K3Model:
    return new_model(config, dtype=getattr(torch, config.dtype), std=0.2, decay="slow")


def walked(source: Source, *, layers: frozenset[int] | None = None) -> dict[str, Tensor]:
    """Everything that a forward and a backward tell."""
    found: dict[str, Tensor] = {}

    def take(name: str, tensor: Tensor) -> None:
        assert name not in found
        found[name] = tensor.clone()

    walk = Walk(source, dump_context(IDS), take, layers)
    walk.forward()
    walk.backward()
    return found


@pytest.mark.parametrize(
    "config",
    [
        tiny_k3(dtype="float64"),
        tiny_kimi_linear(dtype="float64"),
        tiny_kimi_linear(dtype="float64", tie_word_embeddings=True),
    ],
    ids=["k3", "kimi-linear", "tied"],
)
def test_gradients_of_a_walk_are_those_of_one_backward(config: K3Config) -> None:
    model = random_model(config)
    found = walked(whole(model))
    logits = model(dump_context(IDS))
    F.cross_entropy(logits[:-1], torch.tensor(IDS[1:])).backward()
    torch.testing.assert_close(found["logits"], logits.detach(), rtol=1e-10, atol=1e-12)
    wanted = {GRAD + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() == {name for name in found if name.startswith((f"{GRAD}model.", f"{GRAD}lm_head"))}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12, msg=name)


def test_gradients_of_activations_are_those_of_autograd() -> None:
    model = random_model(tiny_k3(dtype="float64"))
    found, kept = walked(whole(model)), {}

    def keep(name: str, tensor: Tensor) -> None:
        tensor.retain_grad()
        kept[name] = tensor

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda m, x, out, i=i: keep(f"layers.{i}.attention", out))
        layer.register_forward_hook(lambda m, x, out, i=i: keep(f"layers.{i}", out.prefix))
    logits = model(dump_context(IDS))
    F.cross_entropy(logits[:-1], torch.tensor(IDS[1:])).backward()
    assert len(kept) == 14
    for name, tensor in kept.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(found[GRAD + name], tensor.grad, rtol=1e-7, atol=1e-12, msg=name)


def test_a_streamed_model_tells_the_same_and_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    model = random_model(tiny_k3())
    save_model(model, tmp_path)
    source, most = streamed(tmp_path), 0
    wanted = walked(whole(model))
    layer_bytes = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)

    def count(name: str, tensor: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.nbytes for p in source.model.parameters() if p.device.type != "meta"))

    Walk(source, dump_context(IDS), count).forward()
    assert 0 < most <= layer_bytes
    assert all(p.device.type == "meta" for p in source.model.parameters())
    found = walked(source)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_packed_experts_are_dumped_and_let_gradients_through(tmp_path: Path) -> None:
    save_model(random_model(tiny_k3(are_experts_packed=True)), tmp_path)
    found = walked(streamed(tmp_path))
    assert not any("experts.w1" in name for name in found)
    assert found[f"{GRAD}layers.0.attention"].any() and found[f"{GRAD}layers.1.moe.in"].any()


def test_names_come_in_the_order_of_the_forward_and_layers_can_be_picked() -> None:
    model = random_model(tiny_k3())
    names = list(walked(whole(model), layers=frozenset({0, 3})))
    forward = names[: names.index(f"{GRAD}logits")]
    parts = ("attention.in", "attention")
    first = [*(f"layers.0.{part}" for part in (*parts, "mlp.in", "mlp")), "layers.0"]
    third = [*(f"layers.3.{part}" for part in (*parts, "moe.in", "router", "moe")), "layers.3"]
    assert forward == ["embed", *first, *third, "hidden", "logits"]
    assert not any(".layers.1." in name for name in names)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_floor_of_a_run_is_small_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    model = random_model(tiny_k3())
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = Run(ids=IDS, has_gradients=True)
    write_dump(whole(model), tmp_path / "a", run)
    floors = {kind: dict(measure_floor(whole(model), tmp_path / "a", run, kind)) for kind in ("order", "rounding")}
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    dump = Dump(tmp_path / "a")
    assert dump.manifest.floor_kind == "rounding" and dump.manifest.floor == floors["rounding"]
    assert floors["order"].keys() == set(dump.names)
    assert max(floors["order"].values()) < 1e-4
    assert 1e-8 < floors["order"]["logits"] < floors["rounding"]["logits"] < 1e-4


def test_shaken_weights_are_the_same_at_every_use() -> None:
    model = random_model(tiny_k3())
    source, path = shaken(whole(model)), "model.layers.2"
    weight = model.model.layers[2].self_attn.o_proj.weight
    plain, seen = weight.detach().clone(), []
    for _ in range(2):
        with source.use([path]):
            seen.append(weight.detach().clone())
    assert torch.equal(seen[0], seen[1]) and torch.equal(weight, plain)
    moved = ((seen[0] - plain) / plain).abs()
    assert moved.mean() > 0 and moved.max() <= 1.5 * torch.finfo(torch.float32).eps


def test_a_run_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model = random_model(tiny_k3())
    for run, message in (
        (Run(ids=()), "the prompt is empty"),
        (Run(ids=(5, 131)), "token 131 is not of this model"),
        (Run(ids=(5,), layers=frozenset({7})), "layer 7 is not there"),
        (Run(ids=(5, 6), has_gradients=True, is_training=False), "gradients belong to the trainer"),
        (Run(ids=(5,), has_gradients=True), "two tokens or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_dump(whole(model), tmp_path / "a", run)


def written(folder: Path) -> Path:
    """Three tensors in two files."""
    manifest = Manifest(ids=(1, 2), config_digest="x", dtype="float32")
    with DumpWriter(folder, manifest, file_bytes=100) as writer:
        writer.write("b", torch.arange(30.0).view(5, 6))
        writer.write("a", torch.ones(3, dtype=torch.bfloat16))
        writer.write("c", torch.ones(2, dtype=torch.float64))
    return folder


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    dump = Dump(written(tmp_path / "d"))
    assert dump.names == ("b", "a", "c") and dump.manifest.ids == (1, 2)
    assert torch.equal(dump.read("b"), torch.arange(30.0).view(5, 6))
    assert dump.read("a").dtype == torch.bfloat16 and dump.read("c").dtype == torch.float64
    assert len(list((tmp_path / "d").glob("*.safetensors"))) == 2
    with pytest.raises(WeightsError, match="not empty"):
        written(tmp_path / "d")


def test_a_dump_that_broke_off_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError),
        DumpWriter(tmp_path / "d", Manifest(ids=(1,), config_digest="", dtype="")) as writer,
    ):
        writer.write("a", torch.ones(3))
        raise KeyError
    with pytest.raises(WeightsError, match=r"no manifest.json"):
        Dump(tmp_path / "d")


def test_a_name_twice_and_whole_numbers_are_refused(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path, Manifest(ids=(1,), config_digest="", dtype=""))
    writer.write("a", torch.ones(3))
    with pytest.raises(WeightsError, match="dumped twice"):
        writer.write("a", torch.ones(3))
    with pytest.raises(WeightsError, match="floating point"):
        writer.write("b", torch.ones(3, dtype=torch.int64))


def test_a_file_that_is_not_as_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "d")
    file = folder / "dump-00001.safetensors"
    tensors = load_file(file)
    save_file({"b": tensors["b"].T.contiguous()}, file)
    with pytest.raises(WeightsError, match="b is not in"):
        Dump(folder)
    file.unlink()
    with pytest.raises(WeightsError, match="is not there"):
        Dump(folder)
    for change, message in (({"version": 2}, "version 2"), ({"extra": 1}, "unknown keys"), ({"ids": 3}, "no manifest")):
        data = json.loads((written(tmp_path / str(change)) / MANIFEST).read_text())
        (tmp_path / str(change) / MANIFEST).write_text(json.dumps(data | change))
        with pytest.raises(WeightsError, match=message):
            Dump(tmp_path / str(change))
