"""Running text of language models: the files of a recipe as one text, split into parts. Works on text only."""

from __future__ import annotations

from pathlib import Path

from antiphon.errors import RecipeError
from antiphon.training.data.corpus import read_verified
from antiphon.training.data.text_files import Part
from antiphon.training.recipe_data import RunningText


def read_running_text(data: RunningText, folder: Path) -> dict[Part, str]:
    """Return the text of each part: the files one after the other, cut by characters as data.split says.

    Without a third share the validation part is also the test part. Raises RecipeError naming the file or field.
    """
    parts = []
    for file in data.text:
        try:
            parts.append(read_verified(folder, file).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RecipeError(f"{folder / file.path} is not UTF-8: {error}") from None
    text = "".join(parts)
    ends = [int(len(text) * sum(data.split[:count])) for count in range(1, len(data.split))]
    train, valid, *rest = (text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True))
    return {"train": train, "valid": valid, "test": rest[0] if rest else valid}
