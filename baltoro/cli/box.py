"""Which model is meant: the one that is named, the one of the environment, or the one in the box.

In: what the user gave. Out: a model folder, checked to be one.
The box is `models/` below the working directory or beside the package; with several models in it, the largest.
"""

from __future__ import annotations

from pathlib import Path

from baltoro.config import environment
from baltoro.errors import ConfigError

BOX = "models"
PACKAGE = Path(__file__).resolve().parents[1]


def find_model(given: Path | None) -> Path:
    """The folder of the model to use. Errors: ConfigError says what to do."""
    named = environment("BALTORO_MODEL")
    if given is not None:
        return _checked(given, "")
    if named:
        return _checked(Path(named), " (from BALTORO_MODEL)")
    for box in (Path(BOX), PACKAGE.parent / BOX):
        models = sorted(box.glob("*/config.json"), key=_size_bytes)
        if models:
            return models[-1].parent
    raise ConfigError(
        f"no model: there is none in {BOX}/. Name a folder with config.json, *.safetensors and tiktoken.model, set "
        "BALTORO_MODEL, or make a model: baltoro train recipes/mini.toml --export models/mini"
    )


def _checked(folder: Path, origin: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}{origin} is no model folder: it has no config.json")
    return folder


def _size_bytes(config: Path) -> tuple[int, str]:
    size = sum(path.stat().st_size for path in config.parent.glob("*.safetensors"))
    return size, str(config)
