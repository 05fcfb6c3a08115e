"""What `baltoro bench kernels` does where there is no GPU, and the arithmetic of its floors."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from baltoro.bench.kernels import MODULES, kda, measure, present
from baltoro.bench.kernels.kda_beside import beside
from baltoro.bench.kernels.moe import resident_experts
from baltoro.bench.kernels.timing import Ceilings, Figure, add_peer
from baltoro.cli import app
from baltoro.errors import ConfigError
from baltoro.kernels.moe.products import Packed


def test_modules_that_are_not_there_are_left_out() -> None:
    assert "moe" in present() and set(present()) <= set(MODULES)


def test_unknown_names_and_a_missing_device_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'moo'.*moe"):
        measure(["moo"])
    assert isinstance(CliRunner().invoke(app, ["bench", "kernels", "--only", "moe"]).exception, ConfigError)


def test_the_floor_is_the_longer_of_bytes_and_operations() -> None:
    here = Ceilings(bytes_per_s=4e12, flops_per_s=8e14)
    assert here.floor_us(4e6) == pytest.approx(1.0)
    assert here.floor_us(4e6, flops=1.6e9) == pytest.approx(2.0)
    assert Figure("x", 3.0, 2.0, None, {}).over_floor == 1.5


def test_peers_stand_beside_ours_and_one_that_fails_leaves_no_figure() -> None:
    rows = [kda.Figure("op", "baltoro", 2e-6, 1e-6, "a"), kda.Figure("op", "fla", 5e-6, 0.0, "plain")]
    assert list(beside(rows, with_peers=True)) == [Figure("op", 2.0, 1.0, None, {"fla, plain": 5.0})]
    assert next(iter(beside(rows, with_peers=False))).peers == {}
    peers: dict[str, float] = {}
    add_peer(peers, "good", lambda: 3.0)
    with pytest.warns(UserWarning, match="bad did not run: ZeroDivisionError"):
        add_peer(peers, "bad", lambda: 1 / 0)
    assert peers == {"good": 3.0}


def test_resident_experts_have_the_shapes_of_a_layer() -> None:
    experts = resident_experts("cpu", num=2, width=64, inner=96)
    assert isinstance(experts.w1, Packed) and isinstance(experts.w2, Packed)
    assert experts.w1.packed.shape == (2, 96, 32) and experts.w2.scale.shape == (2, 64, 3)
