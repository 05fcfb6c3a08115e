"""`baltoro compare`, called in process: from a model folder to a verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baltoro.cli import app
from baltoro.errors import BaltoroError, ConfigError
from baltoro.model.build import new_model
from baltoro.model.dump_files import Dump
from baltoro.model.weights import save_model
from tests.tiny import tiny_k3


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if isinstance(result.exception, BaltoroError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and one whose layer 3 is another's."""
    for name, seed in (("good", 0), ("bad", 1)):
        model, other = (new_model(tiny_k3(), std=0.2, decay="slow", seed=s) for s in (0, seed))
        if seed:
            model.model.layers[3].load_state_dict(other.model.layers[3].state_dict())
        save_model(model, tmp_path / name)
    return tmp_path


def test_dump_and_compare(folder: Path) -> None:
    ids = folder / "ids.json"
    ids.write_text("[5, 17, 29, 3, 88, 5]\n")
    flags = ("--ids", ids, "--gradients")
    code, output = run("dump", folder / "good", "--out", folder / "a", *flags, "--measure-floor", "order")
    assert code == 0 and "275 tensors of 6 tokens" in output and "loss" in output and "noise floor by order" in output
    assert run("dump", folder / "good", "--out", folder / "b", *flags)[0] == 0
    code, output = run(folder / "a", folder / "b", "--json", folder / "r.json", "--plot", folder / "r.png")
    assert code == 0 and "The same: 275 tensors" in output
    record = json.loads((folder / "r.json").read_text())
    assert record["is_good"] and len(record["tensors"]) == 275 and record["a"][0]["facts"]["commit"]
    assert (folder / "r.png").stat().st_size > 1000 and not list(folder.glob(".*partial"))
    run("dump", folder / "bad", "--out", folder / "c", *flags)
    code, output = run(folder / "a", folder / "c")
    assert code == 1 and "the first is layers.3.attention.in (above)" in output and "<- first" in output
    assert run("--ignore", ".", folder / "a", folder / "b")[0] == 1
    assert run(folder / "a", folder / "c", "--rtol", "1e9", "--all")[0] == 0


def test_what_is_dumped_can_be_chosen(folder: Path) -> None:
    out = folder / "a"
    run("dump", folder / "good", "--out", out, "--layers", "0,2-3", "--dtype", "float64", "--inference")
    dump = Dump(out)
    assert {name.split(".")[1] for name in dump.names if name.startswith("layers.")} == {"0", "2", "3"}
    assert (dump.manifest.dtype, dump.manifest.is_training, len(dump.manifest.ids)) == ("float64", False, 150)
    with pytest.raises(ConfigError, match="different prompts"):
        (folder / "ids").write_text("1 2,3\n")
        run("dump", folder / "good", "--out", folder / "b", "--ids", folder / "ids")
        run(out, folder / "b")


def test_rules_may_stand_in_a_file(folder: Path) -> None:
    for name in "ab":
        run("dump", folder / "good", "--out", folder / name)
    rules = folder / "rules"
    rules.write_text("# ranks that hold the same\nfirst=.*\n\n")
    assert run(folder / "a", folder / "a", folder / "b", "--map", rules)[0] == 0


@pytest.mark.parametrize("layers", ["x", "3-1", "1,,2", "-1"])
def test_layers_that_are_none_are_refused(folder: Path, layers: str) -> None:
    with pytest.raises(ConfigError, match="is not like"):
        run("dump", folder / "good", "--out", folder / "a", "--layers", layers)


@pytest.mark.parametrize("text", ["1 x", "-3", "1.5", "٣", "99999999999"])
def test_ids_that_are_none_are_refused(folder: Path, text: str) -> None:
    (folder / "ids").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is no token id"):
        run("dump", folder / "good", "--out", folder / "a", "--ids", folder / "ids")


def test_a_plot_without_matplotlib_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("dump", folder / "good", "--out", folder / "a")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"baltoro\[train\]"):
        run(folder / "a", folder / "a", "--plot", folder / "r.png")


def test_the_help_teaches() -> None:
    code, output = run("--help")
    assert code == 0 and "compare dump models/mini" in output and "--gradients" in output
    code, output = run("a", "--help")
    assert code == 0 and all(word in output for word in ("rows=REGEX", "sum=REGEX", "--times", "empty comparison"))
    code, output = run("dump", "--help")
    assert code == 0 and "One layer's weights" in output and "--measure-floor" in output


def test_one_dump_is_not_enough(folder: Path) -> None:
    run("dump", folder / "good", "--out", folder / "a")
    with pytest.raises(ConfigError, match="two dumps or more"):
        run(folder / "a")
