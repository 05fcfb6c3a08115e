"""Comparisons of dumps: what is the same passes, a fault is found where it is, and nothing passes without tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baltoro.errors import ConfigError, WeightsError
from baltoro.kernels.spans import Spans
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.model.dump import streamed, whole
from baltoro.model.dump_compare import Limits, Report, compare, difference
from baltoro.model.dump_files import Dump, DumpWriter, Manifest
from baltoro.model.dump_layout import View, parse_rules
from baltoro.model.dump_run import Floor, Run, default_ids, measure_floor, write_dump
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3

RUN = Run(ids=default_ids(131), has_gradients=True)


def tiny(dtype: str = "float32") -> K3Model:
    model = new_model(tiny_k3(dtype=dtype), dtype=getattr(torch, dtype), std=0.2, decay="slow")
    if dtype == "float64":
        model.load_state_dict(tiny().state_dict())
    return model


def dumped(folder: Path, model: K3Model, floor: Floor | None = None, run: Run = RUN) -> View:
    write_dump(whole(model), folder, run)
    if floor is not None:
        measure_floor(whole(model), folder, run, floor)
    return View([Dump(folder)])


def made(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Dump:
    """A dump of tensors that nobody ran."""
    manifest = Manifest(**({"ids": (1, 2), "config_digest": "x", "dtype": "float32"} | fields))
    with DumpWriter(folder, manifest) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return Dump(folder)


def pair(folder: Path, a: dict[str, Tensor], b: dict[str, Tensor], **options: Any) -> Report:
    return compare(View([made(folder / "a", a)]), View([made(folder / "b", b)]), **options)


def test_two_equal_builds_agree_to_the_last_bit(tmp_path: Path) -> None:
    save_model(tiny(), tmp_path / "model")
    write_dump(streamed(tmp_path / "model"), tmp_path / "b", RUN)
    report = compare(dumped(tmp_path / "a", tiny()), View([Dump(tmp_path / "b")]))
    assert report.is_good and report.num_compared == 275
    assert {row.verdict for row in report.rows} == {"equal"}


def test_float32_and_float64_agree_within_the_floor_of_rounding(tmp_path: Path) -> None:
    report = compare(dumped(tmp_path / "a", tiny(), "rounding"), dumped(tmp_path / "b", tiny("float64")))
    assert report.is_good and report.first is None and not report.num_vacuous
    assert sum(row.verdict == "within" for row in report.rows) > 200
    strict = compare(View([Dump(tmp_path / "a")]), View([Dump(tmp_path / "b")]), limits=Limits(times=0.01))
    assert strict.first is not None and strict.first.name == "layers.0.attention.in"


def swap_experts(model: K3Model) -> None:
    w2 = model.model.layers[4].block_sparse_moe.experts.w2.data
    w2[[2, 9]] = w2[[9, 2]]


def lose_state(model: K3Model) -> None:
    """A KDA layer that begins every chunk with an empty state."""
    layer = model.model.layers[2].self_attn
    recur = layer._recur

    def forgetful(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ctx: Any) -> Tensor:
        parts = []
        for rows in torch.arange(q.shape[0]).split(64):
            short = type(ctx)(ctx.tokens[rows], Spans.build((len(rows),)), is_training=True)
            parts.append(recur(q[rows], k[rows], v[rows], g[rows], beta[rows], short))
        return torch.cat(parts)

    layer._recur = forgetful


def transpose(model: K3Model) -> None:
    """Bytes read in the other order."""
    weight = model.model.layers[5].self_attn.kv_b_proj.weight
    weight.data = weight.data.T.reshape(weight.shape).contiguous()


def forget_bias(model: K3Model) -> None:
    model.model.layers[3].block_sparse_moe.gate.e_score_correction_bias.data.zero_()


def lose_mix(model: K3Model) -> None:
    model.model.layers[6].mlp_res_proj.weight.data.zero_()


def double_gradient(model: K3Model) -> None:
    """As where a sum over ranks is made twice."""
    model.model.layers[1].block_sparse_moe.experts.w1.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (swap_experts, "layers.4.moe"),
        (lose_state, "layers.2.attention"),
        (transpose, "layers.5.attention"),
        (forget_bias, "layers.3.moe"),
        (lose_mix, "layers.6.moe.in"),
        (double_gradient, "grad/model.layers.1.block_sparse_moe.experts.w1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("kind", ["order", "rounding"])
def test_a_fault_is_found_where_it_is(
    tmp_path: Path, fault: Callable[[K3Model], None], where: str, kind: Floor
) -> None:
    broken = tiny()
    fault(broken)
    report = compare(dumped(tmp_path / "a", tiny(), kind), dumped(tmp_path / "b", broken))
    assert not report.is_good and report.first is not None
    assert (report.first.name, report.first.verdict) == (where, "above")
    before = report.rows[: report.rows.index(report.first)]
    assert all(row.verdict == "equal" for row in before)


def test_a_third_dump_gives_the_floor(tmp_path: Path) -> None:
    x = torch.randn(50)
    a, b, c = ({"x": x * scale} for scale in (1.0, 1.0 + 3e-4, 1.0 + 1e-4))
    views = [View([made(tmp_path / name, tensors)]) for name, tensors in (("a", a), ("b", b), ("c", c))]
    row = compare(views[0], views[1], floor=views[2]).rows[0]
    assert row.floor == pytest.approx(1e-4, rel=0.01) and row.limit == pytest.approx(1e-3, rel=0.01)
    assert row.verdict == "within"
    assert compare(views[0], views[1], floor=views[2], limits=Limits(times=2)).rows[0].verdict == "above"
    assert compare(views[0], views[1], floor=views[2], limits=Limits(rtol=1e-3, times=2)).rows[0].verdict == "above"
    assert compare(views[0], views[1], floor=views[2], limits=Limits(rtol=1e-3)).rows[0].verdict == "within"
    other = View([made(tmp_path / "d", {"y": x})])
    with pytest.raises(ConfigError, match="gives the floor has no x"):
        compare(views[0], views[1], floor=other)
    with pytest.raises(ConfigError, match="no noise floor"):
        compare(views[0], views[1], limits=Limits(times=2))


def test_without_limits_and_floor_only_equality_passes(tmp_path: Path) -> None:
    x = torch.randn(50)
    report = pair(tmp_path, {"x": x}, {"x": x * (1 + 1e-6)})
    assert not report.is_good and report.rows[0].verdict == "above" and report.rows[0].limit == 0


def test_an_empty_comparison_fails(tmp_path: Path) -> None:
    x = torch.ones(3)
    cases: list[tuple[dict[str, Tensor], dict[str, Tensor], str | None]] = [
        ({}, {}, None),
        ({"x": x}, {"x": x}, "."),
        ({"x": x[:0]}, {"x": x[:0]}, None),
        ({"x": x}, {"y": x}, None),
    ]
    for number, (a, b, ignore) in enumerate(cases):
        report = pair(tmp_path / str(number), a, b, ignore=ignore)
        assert not report.is_good and report.num_compared == 0
        assert "nothing was compared" in report.complaints[0]


def test_zeros_alone_prove_nothing(tmp_path: Path) -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    report = pair(tmp_path / "1", {"x": one, "grad/x": zero}, {"x": one, "grad/x": zero})
    assert not report.is_good and report.complaints == ("every gradient is zero on both sides: nothing reached them",)
    assert pair(tmp_path / "2", {"x": zero, "y": one}, {"x": zero, "y": one}).is_good


def test_missing_and_extra_names_fail_where_they_are(tmp_path: Path) -> None:
    x = torch.ones(3)
    report = pair(tmp_path / "1", {"a": x, "c": x, "d": x}, {"a": x, "b": x, "d": x})
    verdicts = [(row.name, row.verdict) for row in report.rows]
    assert verdicts == [("a", "equal"), ("b", "only in B"), ("c", "only in A"), ("d", "equal")]
    assert not report.is_good and report.first is not None and report.first.name == "b"
    assert pair(tmp_path / "2", {"a": x, "c": x}, {"a": x, "b": x}, ignore="^[bc]$").is_good


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_fails_even_on_both_sides(tmp_path: Path, value: float) -> None:
    x, bad = torch.ones(3), torch.tensor([1.0, value, 2.0])
    for number, (a, b) in enumerate([(bad, bad), (x, bad), (bad, x)]):
        report = pair(tmp_path / str(number), {"x": a, "y": x}, {"x": b, "y": x}, limits=Limits(rtol=1e9))
        assert not report.is_good and report.rows[0].verdict == "not finite"


def test_other_shapes_and_prompts_fail(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    assert pair(tmp_path / "1", {"x": x}, {"x": x.T}).rows[0].verdict == "shape"
    a, b = made(tmp_path / "a", {"x": x}), made(tmp_path / "b", {"x": x}, ids=(1, 3))
    with pytest.raises(ConfigError, match="different prompts"):
        compare(View([a]), View([b]))


def test_gradients_on_one_side_alone_are_told_apart(tmp_path: Path) -> None:
    x = torch.ones(3)
    a = made(tmp_path / "a", {"x": x, "grad/x": x}, has_gradients=True)
    report = compare(View([a]), View([made(tmp_path / "b", {"x": x})]), ignore="^grad/")
    assert not report.is_good and "only one of the dumps has gradients" in report.complaints[0]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9), st.floats(0.125, 8.0))
def test_differences_are_what_they_are_called(values: list[float], scale: float) -> None:
    a = torch.tensor(values, dtype=torch.float64)
    relative, cosine, largest = difference(a, a * scale)
    norm = float(a.norm())
    assert relative == pytest.approx(abs(scale - 1) if norm else 0.0, rel=1e-6, abs=1e-12)
    assert cosine == pytest.approx(1.0, abs=1e-9)
    assert largest == pytest.approx(float(a.abs().max()) * abs(scale - 1), rel=1e-6, abs=1e-12)
    assert difference(torch.zeros(2), torch.ones(2))[:2] == (torch.inf, 0.0)


def test_bad_limits_and_expressions_are_refused(tmp_path: Path) -> None:
    for options in ({"rtol": -1.0}, {"times": torch.nan}):
        with pytest.raises(ConfigError, match="must be a number"):
            Limits(**options)
    with pytest.raises(ConfigError, match="no regular expression"):
        pair(tmp_path, {}, {}, ignore="(")


# layouts


def test_stacked_experts_meet_names_of_single_ones(tmp_path: Path) -> None:
    w1, w2 = torch.randn(4, 3, 2), torch.randn(4, 2, 3)
    stacked = made(tmp_path / "a", {"grad/m.experts.w1": w1, "grad/m.experts.w2": w2, "x": torch.ones(2)})
    single = {f"grad/m.experts.{e}.w1.weight": w1[e] for e in range(4)}
    single |= {f"grad/m.experts.{e}.w2.weight": w2[e] for e in range(4)} | {"x": torch.ones(2)}
    b, rules = made(tmp_path / "b", single), parse_rules(["experts"])
    assert compare(View([stacked], rules), View([b], rules)).is_good
    assert not compare(View([stacked]), View([b])).is_good
    single["grad/m.experts.1.w1.weight"], single["grad/m.experts.3.w1.weight"] = w1[3], w1[1]
    swapped = View([made(tmp_path / "c", single)], rules)
    report = compare(View([stacked], rules), swapped, limits=Limits(rtol=0.1))
    assert [row.name for row in report.rows if not row.is_good] == [f"grad/m.experts.{e}.w1.weight" for e in (1, 3)]


def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    rows, columns, summed, same = torch.randn(5, 3), torch.randn(3, 5), torch.randn(4, 2), torch.randn(3)
    experts = torch.randn(6, 3, 2)
    tensors = {"q.weight": rows, "o.weight": columns, "attention": summed, "norm": same, "experts.w1": experts}
    part = torch.randn(4, 2)
    ranks = [
        {"q.weight": rows[:3], "o.weight": columns[:, :2], "attention": part, "norm": same, "experts.w1": experts[:4]},
        {
            "q.weight": rows[3:],
            "o.weight": columns[:, 2:],
            "attention": summed - part,
            "norm": same,
            "experts.w1": experts[4:],
        },
    ]
    dumps = [made(tmp_path / f"rank{n}", shard) for n, shard in enumerate(ranks)]
    rules = parse_rules([r"rows=(q\.weight|.*experts\.w1)", r"columns=o\..*", "sum=attention", "experts"])
    b = View([made(tmp_path / "b", tensors)], rules)
    report = compare(View(dumps, rules), b, limits=Limits(rtol=1e-6))
    assert report.is_good and report.num_compared == 4 + 6
    turned = View(dumps[::-1], rules)
    wrong = {row.name for row in compare(turned, b, limits=Limits(rtol=1e-6)).rows if not row.is_good}
    assert {"q.weight", "experts.0.w1.weight"} <= wrong and "attention" not in wrong and "norm" not in wrong


def test_shards_that_differ_without_a_rule_are_an_error(tmp_path: Path) -> None:
    dumps = [made(tmp_path / f"rank{n}", {"x": torch.full((2,), float(n))}) for n in range(2)]
    with pytest.raises(WeightsError, match=r"2 shards of x are not the same.*sum="):
        View(dumps).read("x")
    assert torch.equal(View(dumps, parse_rules(["first=x"])).read("x"), torch.zeros(2))
    other = made(tmp_path / "other", {"x": torch.ones(3, 4)})
    with pytest.raises(WeightsError, match="do not go together"):
        View([dumps[0], other], parse_rules(["rows=x"])).read("x")


def test_shards_are_of_one_run(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", {"x": torch.ones(1)}), made(tmp_path / "b", {"x": torch.ones(1)}, ids=(4,))
    with pytest.raises(ConfigError, match="no shards of one run: ids differ"):
        View([a, b])


def test_names_can_be_given_anew(tmp_path: Path) -> None:
    x = torch.ones(2)
    rules = parse_rules([r"rename=transformer\.h\.(\d+)\.out=>layers.\1"])
    a = View([made(tmp_path / "a", {"transformer.h.3.out": x})], rules)
    assert compare(a, View([made(tmp_path / "b", {"layers.3": x})], rules)).is_good
    with pytest.raises(ConfigError, match="two tensors"):
        View([made(tmp_path / "c", {"a1": x, "a2": x})], parse_rules(["rename=a.=>b"]))


@pytest.mark.parametrize("text", ["", "rows", "rows=", "rows=(", "rows=a=>b", "rename=a", "cols=a", "expert"])
def test_rules_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rule"):
        parse_rules([text])
