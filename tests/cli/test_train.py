"""`baltoro train` and what it leaves behind: the run's folder, a model folder that loads, plots; and what it says when
it cannot start."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baltoro.chat.tokenizer import Tokenizer
from baltoro.cli import app
from baltoro.errors import ConfigError
from baltoro.kernels.quant import mxfp4
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.weights import load_model
from baltoro.trainer.plot import plot_run, read_metrics
from baltoro.trainer.state_file import latest_state
from tests.trainer.harness import make_data, tiny_recipe


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items() if item is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tiny recipe as a file, its data and a tokenizer in place."""
    data = make_data(tmp_path / "data")
    Tokenizer.of_bytes().save(data)
    fields = {key: value for key, value in asdict(tiny_recipe(data, steps=2)).items() if value is not None}
    path = tmp_path / "tiny.toml"
    path.write_text("\n".join(f"{key} = {toml(value)}" for key, value in fields.items()))
    return path


def test_a_run_leaves_log_checkpoint_and_a_model_folder_that_loads(recipe: Path, tmp_path: Path) -> None:
    out, model_folder = tmp_path / "run", tmp_path / "model"
    code, output = run(recipe, "--out", out, "--export", model_folder)
    assert code == 0 and "2 of 2 steps are done" in output and "held-out loss" in output
    assert [line["step"] for line in read_metrics(out)] == [1, 2]
    loaded = load_model(model_folder, dtype=torch.float32)
    assert loaded.config.are_experts_packed and K3Config.load(model_folder).dtype == "bfloat16"
    assert (model_folder / "tiktoken.model").is_file() and (model_folder / "tokenizer_config.json").is_file()

    checkpoint = latest_state(out)
    assert checkpoint is not None
    trained = torch.load(checkpoint, weights_only=True)["model"]
    for name, tensor in loaded.state_dict().items():
        if name.endswith("_packed"):
            source = trained[name.removesuffix("_packed")]
            assert torch.equal(tensor, mxfp4.quantise(source)[0])
        elif not name.endswith("_scale"):
            torch.testing.assert_close(tensor, trained[name], rtol=2**-8, atol=1e-6)


def test_exported_model_computes_what_the_quantised_stage_trained(recipe: Path, tmp_path: Path) -> None:
    """Packed experts against fake-quantised ones, on weights that bf16 holds exactly."""
    from baltoro.model.context import FakeQuant
    from baltoro.trainer.export import export

    config = tiny_recipe(tmp_path / "data").model
    model = K3Model(config, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16())
    export(model, tmp_path / "model", tokenizer=tmp_path / "data")
    packed = load_model(tmp_path / "model", dtype=torch.float32)
    tokens = torch.arange(50)
    with torch.no_grad():
        faked = model(train_context(tokens, (50,), fake_quant=FakeQuant(weights=True)))
        torch.testing.assert_close(packed(train_context(tokens, (50,))), faked, rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_with_resume_and_is_not_overwritten_without(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(recipe, "--out", out)
    with pytest.raises(ConfigError, match="--resume"):
        run(recipe, "--out", out)
    code, _ = run(recipe, "--out", out, "--resume")
    assert code == 0 and len(read_metrics(out)) == 2


def test_overrides_change_the_recipe_and_unknown_keys_are_named(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "--out", tmp_path / "run", "--set", "steps=1")
    assert len(read_metrics(tmp_path / "run")) == 1
    with pytest.raises(ConfigError, match=r"optim\.lrr"):
        run(recipe, "--set", "optim.lrr=1")


def test_missing_data_are_built_by_the_recipes_script_or_the_command_is_told(recipe: Path, tmp_path: Path) -> None:
    folder, builder = tmp_path / "other", tmp_path / "build.py"
    with pytest.raises(ConfigError, match=f"python {builder} --out {folder}"):
        run(recipe, "--set", f'data.folder="{folder}"', "--set", f'data.builder="{builder}"')
    root = Path(__file__).resolve().parents[2]
    builder.write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from pathlib import Path\nfrom tests.trainer.harness import make_data\nmake_data(Path(sys.argv[2]))\n"
    )
    out = tmp_path / "run"
    code, output = run(
        recipe,
        "--set",
        f'data.folder="{folder}"',
        "--set",
        f'data.builder="{builder}"',
        "--set",
        "steps=1",
        "--out",
        out,
    )
    assert code == 0 and "building it" in output and (folder / "manifest.json").is_file()


def test_plots_are_drawn_and_without_matplotlib_the_extra_is_named(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run(recipe, "--out", out)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"baltoro\[train\]"):
        plot_run(out)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    for path in plot_run(out):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_help_shows_how_to_resume_and_export() -> None:
    code, output = run("--help")
    assert code == 0 and "--resume" in output and "--export" in output and "recipes/mini.toml" in output
