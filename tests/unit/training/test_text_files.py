import gzip
import hashlib
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from antiphon.errors import RecipeError
from antiphon.training.corpus import (
    Labelled,
    Tagged,
    is_held_out,
    read_documents,
    read_labelled,
    read_parts,
    read_tagged,
    read_texts,
)
from antiphon.training.recipe import LabelledData, TextFile


def written(folder: Path, name: str, content: bytes, **settings: str) -> TextFile:
    (folder / name).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return TextFile.model_validate(dict(path=name, sha256=digest, **settings))


def test_lines_keep_characters_that_are_not_line_ends(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt.gz", gzip.compress("one\u2028two\n\nthree\r\n".encode()))
    assert read_texts(tmp_path, file) == ["one\u2028two", "three"]


def test_documents_end_at_blank_lines(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", b"\n\none\n two\n\n \nthree\n")
    assert read_documents(tmp_path, file) == [["one", "two"], ["three"]]


def test_snips_texts_are_joined_from_their_chunks(tmp_path: Path) -> None:
    item = {"data": [{"text": "Play "}, {"text": "Motörhead", "entity": "artist"}]}
    content = json.dumps({"PlayMusic": [item]}, ensure_ascii=False).encode("latin-1")
    file = written(tmp_path, "a.json", content, format="snips", encoding="latin-1")
    assert read_labelled(tmp_path, file) == [Labelled(text="Play Motörhead", label="PlayMusic")]
    assert read_texts(tmp_path, file) == ["Play Motörhead"]
    as_utf8 = file.model_copy(update={"encoding": "utf-8"})
    with pytest.raises(RecipeError, match=r"a\.json is not encoding='utf-8'"):
        read_labelled(tmp_path, as_utf8)


def test_json_is_a_list_of_text_and_label_below_a_key(tmp_path: Path) -> None:
    content = json.dumps({"train": [["so good ", "praise"]], "val": [["so bad", "blame"]]}).encode()
    file = written(tmp_path, "a.json", content, format="json", key="val")
    assert read_labelled(tmp_path, file) == [Labelled(text="so bad", label="blame")]
    assert read_texts(tmp_path, file.model_copy(update={"key": "train"})) == ["so good"]


def test_key_belongs_to_json_files_only() -> None:
    for settings in (dict(format="json"), dict(format="tsv", key="train")):
        with pytest.raises(ValidationError, match="does not fit format="):
            TextFile.model_validate(dict(path="a", sha256="0" * 64, **settings))


def test_tsv_is_text_and_label(tmp_path: Path) -> None:
    file = written(tmp_path, "a.tsv", b"so good\t1\nso bad\t0\n", format="tsv")
    assert read_labelled(tmp_path, file) == [Labelled(text="so good", label="1"), Labelled(text="so bad", label="0")]
    assert read_texts(tmp_path, file) == ["so good", "so bad"]


def test_conll_sentences_end_at_blank_lines_even_with_a_tab(tmp_path: Path) -> None:
    file = written(tmp_path, "a.conll", b"New\tB-place\nYork\tI-place\n\t\nHi\tO\n\n", format="conll")
    first, second = read_tagged(tmp_path, file)
    assert first == Tagged(words=("New", "York"), tags=("B-place", "I-place"))
    assert (first.text, second.words) == ("New York", ("Hi",))
    assert read_texts(tmp_path, file) == ["New York", "Hi"]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"no label\n", dict(format="tsv"), r"a: line 1 must be text, tab and label"),
        (b"x\tO\ny\tX-place\n", dict(format="conll"), r"a: line 2 must be word, tab and one of O"),
        (b"y\tB-\n", dict(format="conll"), r"a: line 1 must be word"),
        (b'{"intent": [{"texts": 1}]}', dict(format="snips"), r"a must be JSON of the form"),
        (b"[1]", dict(format="snips"), r"a must be JSON"),
        (b'{"val": []}', dict(format="json", key="train"), r"a must be a JSON object whose 'train' has"),
        (b'{"train": [["x"]]}', dict(format="json", key="train"), r"a list of \[text, label\]"),
        (b"x\n", dict(format="lines"), r"a: format='lines' has no labels"),
    ],
)
def test_file_of_another_format_is_refused_by_name(
    tmp_path: Path, content: bytes, settings: dict[str, str], message: str
) -> None:
    file = written(tmp_path, "a", content, **settings)
    with pytest.raises(RecipeError, match=message):
        (read_tagged if file.format == "conll" else read_labelled)(tmp_path, file)


def test_documents_are_refused_when_a_file_is_labelled(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.ordered; it must be 'lines'"):
        read_documents(tmp_path, written(tmp_path, "a", b"x\ty\n", format="tsv"))


def test_validation_is_held_out_of_training_by_text(tmp_path: Path) -> None:
    lines = "".join(f"text number {index}\tlabel\n" for index in range(2000))
    train = written(tmp_path, "train", lines.encode(), format="tsv")
    test = written(tmp_path, "test", b"another\tlabel\n", format="tsv")
    data = LabelledData(origin="", licence="", attribution="", train=(train,), test=(test,))
    parts = read_parts(tmp_path, data, read_labelled)
    assert len(parts["train"]) + len(parts["valid"]) == 2000
    assert 60 < len(parts["valid"]) < 140
    assert {item.text for item in parts["train"]}.isdisjoint(item.text for item in parts["valid"])
    given = read_parts(tmp_path, data.model_copy(update={"valid": (test,)}), read_labelled)
    assert (len(given["train"]), len(given["valid"])) == (2000, 1)
    assert is_held_out("Text  number 1") == is_held_out("text number 1")
