"""Recipes as TOML files."""

from __future__ import annotations

import json
from pathlib import Path

from antiphon.training.recipe import AnyRecipe


def write_recipe(recipe: AnyRecipe, path: Path) -> str:
    """Write a recipe as a TOML file, whose path is returned; its values have the same notation in JSON and TOML."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return f"{{ {', '.join(f'{key} = {inline(one)}' for key, one in value.items())} }}"
        return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)

    held = recipe.model_dump(mode="json", exclude_none=True)
    path.write_text("".join(f"{key} = {inline(value)}\n" for key, value in held.items()), encoding="utf-8")
    return str(path)
