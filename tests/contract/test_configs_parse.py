"""Every recipe is a valid configuration of the verb that it says it is for.

The comment that a recipe opens with names the command that reads it, such as `baltoro train recipes/mini.toml`.
"""

from __future__ import annotations

import re
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

from baltoro.config import dump, load_config
from baltoro.errors import ConfigError
from tests.contract.tree import ROOT

RECIPES = sorted((ROOT / "recipes").glob("**/*.toml"))
# verb -> the dataclass that its recipes build
CONFIGS = {
    "train": "baltoro.trainer.config.TrainConfig",
    "serve": "baltoro.engine.config.EngineConfig",
    "rl": "baltoro.rl.recipe.RLConfig",
}


def config_type(recipe: Path) -> type:
    """What a recipe builds, from its opening comment."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    match = re.search(rf"baltoro (\w+) {re.escape(recipe.relative_to(ROOT).as_posix())}", "\n".join(lines))
    assert match, f"{recipe.name}: its opening comment must name its command, 'baltoro VERB recipes/{recipe.name}'"
    assert match[1] in CONFIGS, f"{recipe.name}: no configuration is known for the verb {match[1]}"
    module, _, name = CONFIGS[match[1]].rpartition(".")
    kind = getattr(import_module(module), name)
    assert isinstance(kind, type)
    return kind


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_parses(recipe: Path) -> None:
    config = load_config(config_type(recipe), recipe)
    assert dump(config)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_with_a_misspelt_key_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_key"):
        load_config(config_type(recipe), recipe, ["no_such_key=1"])
