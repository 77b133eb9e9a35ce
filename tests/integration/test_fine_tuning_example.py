"""The examples of docs/IMPORT.md for fine-tuning, run as they are printed, with a tiny checkpoint and little data."""

import asyncio
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from antiphon.bundle.manifest import load_bundle
from antiphon.cli import main as cli
from tests.bundle_serving import serving_bundle
from tests.parity.encoder_checkpoints import write_checkpoint
from tests.parity.seq2seq_checkpoints import TEXTS, save

pytestmark = pytest.mark.training

DOCUMENT = Path(__file__).parents[2] / "docs/IMPORT.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)


def run_example(index: int, model: str, base: Path, folder: Path) -> str:
    """Run a printed script in a process of its own, with another checkpoint, and return its standard output."""
    script = BLOCKS[index].replace(f'"{model}"', repr(str(base)))
    assert script != BLOCKS[index]
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def import_adapted(base: Path, folder: Path) -> Path:
    target = folder / "bundle"
    options = ["--no-explain", "--precision", "float32"]
    assert cli.main(["import", str(base), str(target), "--adapter", str(folder / "adapter"), *options]) == 0
    return target


def test_example_with_pairs_learns_and_is_served(tmp_path: Path) -> None:
    base = tmp_path / "bart"
    save(base, "bart")
    pairs = [f"{text}\t{text.split()[-1]} small words" for text in TEXTS]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs), encoding="utf-8")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run_example(0, "facebook/bart-base", base, tmp_path))]
    assert losses[-1] < losses[0]
    bundle = import_adapted(base, tmp_path)
    assert asyncio.run(served_answers(bundle)) == translate(base, tmp_path / "adapter", TEXTS[:5])


async def served_answers(bundle: Path) -> list[str]:
    async with serving_bundle(bundle) as served:
        return [(await served.client.generate_text(text)).text for text in TEXTS[:5]]


@torch.no_grad()
def translate(base: Path, adapter: Path, texts: list[str]) -> list[str]:
    """Return the outputs of transformers with the adapter beside the weights."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that transformers deprecates
        original = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
        model: Any = peft.PeftModel.from_pretrained(original, str(adapter)).eval()
        outputs = [model.generate(**tokenizer(text, return_tensors="pt")) for text in texts]
    return [tokenizer.decode(output[0], skip_special_tokens=True) for output in outputs]


def test_example_with_labels_gives_a_classifier_with_their_names(tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(vocab_size=83, dim=36, n_layers=1, n_heads=3, hidden_dim=50)
    base = tmp_path / "distilbert"
    write_checkpoint(base, config, "DistilBertForMaskedLM")
    run_example(1, "distilbert-base-uncased", base, tmp_path)
    (tmp_path / "adapter/README.md").write_text("---\nlibrary_name: peft\nlicense: cc0-1.0\n---\n")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    manifest = load_bundle(import_adapted(base, tmp_path)).manifest
    heads = [(head.task, head.labels) for head in manifest.model.heads]
    assert heads == [("classify", ("complaint", "order", "question"))]
    assert manifest.provenance is not None
    assert re.fullmatch(
        r"distilbert, with the adapter adapter \(adapter_model.safetensors, sha256 [0-9a-f]{64}\)",
        manifest.provenance.source,
    )
    assert manifest.provenance.licence == "apache-2.0; adapter: cc0-1.0"
