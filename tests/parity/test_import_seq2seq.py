"""Imported encoder-decoder models of public families give the same outputs as the originals in transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from antiphon.bundle.manifest import Bundle, Precision, load_bundle
from antiphon.bundle.session import native_session
from antiphon.cli import main as cli
from antiphon.domain.sampling_params import SamplingParams
from antiphon.export.bundle_model import run_native
from antiphon.rpc.v1.options import own_defaults
from antiphon.runtime.native import NativeRunner
from tests.fakes import request_of
from tests.marks import marked
from tests.parity.answers_together import answer
from tests.parity.exports import native_stepper
from tests.parity.seq2seq_checkpoints import CHECKPOINTS, save

SOURCE_LENS = (9, 1, 23, 14, 5)
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A checkpoint, its model loaded by transformers, and its imported bundle."""

    theirs: Any
    folder: Path
    bundle: Bundle

    @property
    def sources(self) -> list[Ids]:
        """Return random sources with end token and without the padding token, which has no position in M2M-100."""
        config = self.bundle.manifest.model
        dice = np.random.default_rng(5)
        return [
            np.append(dice.integers(3, config.resolved_source_vocab_size, n - 1), config.eos_id) for n in SOURCE_LENS
        ]


def import_to(folder: Path, target: Path, *options: str) -> Bundle:
    """Run the import command and check that it succeeds."""
    assert cli.main(["import", str(folder), str(target), "--no-explain", "--precision", "float32", *options]) == 0
    return load_bundle(target)


# These differ from others only in their tokenizers. Tests below import them from other kinds of files.
RELATIVES = {"mbart50", "nllb", "byt5"}
# One checkpoint of each class of transformers.
FAMILIES = ("marian", "t5", "bart", "mbart", "pegasus", "m2m100", "t5gemma")


@pytest.fixture(
    scope="module", params=marked([name for name in CHECKPOINTS if name not in RELATIVES], "combinations", but=FAMILIES)
)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp(request.param)
    save(folder / "theirs", request.param)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "theirs").eval()
    return Imported(theirs=theirs, folder=folder / "theirs", bundle=import_to(folder / "theirs", folder / "ours"))


def encoder_states(bundle: Bundle, sources: Sequence[Ids]) -> list[NDArray[np.float32]]:
    """Return the states [S, M] of each source, all encoded in one packed batch."""
    lens = [len(source) for source in sources]
    stepper = native_stepper(bundle, "float32")
    sequences = stepper.encode(sources, 1)
    session = native_session(bundle.file(bundle.graph_set("float32").encoder_file))
    inputs = {
        "input_ids": np.concatenate(sources),
        "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
        "offsets": np.cumsum([0, *lens], dtype=np.int32),
        "block_tables": sequences.cross_tables,
        "cache": sequences.cache,
    }
    names = [output.name for output in session.get_outputs()]
    memory = run_native(session, inputs)[names.index("memory")]
    return np.split(memory, np.cumsum(lens)[:-1])


def test_encoder_states_equal_those_of_transformers(imported: Imported) -> None:
    found = encoder_states(imported.bundle, imported.sources)
    for source, states in zip(imported.sources, found, strict=True):
        with torch.no_grad():
            expected = imported.theirs.get_encoder()(input_ids=torch.from_numpy(source)[None]).last_hidden_state[0]
        np.testing.assert_allclose(states, expected.numpy(), atol=2e-5, rtol=1e-4)


def test_logprobs_equal_those_of_transformers(imported: Imported) -> None:
    """The test uses teacher forcing over random targets, with all rows in one batch."""
    config = imported.bundle.manifest.model
    targets = np.random.default_rng(6).integers(3, config.vocab_size, (len(SOURCE_LENS), 8))
    stepper = native_stepper(imported.bundle, "float32")
    step = stepper.start(imported.sources, 9)
    found = np.stack([step(targets[:, time], np.full(len(targets), time, np.int32)) for time in range(8)], axis=1)
    for source, target, logprobs in zip(imported.sources, targets, found, strict=True):
        with torch.no_grad():
            logits = imported.theirs(
                input_ids=torch.from_numpy(source)[None], decoder_input_ids=torch.from_numpy(target)[None]
            ).logits[0]
        np.testing.assert_allclose(logprobs, logits.log_softmax(dim=-1).numpy(), atol=5e-5, rtol=1e-4)


def answers(
    bundle: Bundle, sources: Sequence[Ids], params: SamplingParams, precision: Precision = "float32"
) -> list[list[int]]:
    """Return the ids that our engine generates, with all sources in one batch."""
    runner = NativeRunner(bundle, max_rows=4 * len(sources), threads=1, precision=precision)
    requests = [request_of(str(index), tuple(source.tolist()), params=params) for index, source in enumerate(sources)]
    events = answer(runner, requests)
    return [list(events[request.request_id][0].token_ids) for request in requests]


def generated(theirs: Any, source: Ids) -> list[int]:
    """Return the ids that transformers generates, without begin and end token."""
    config = theirs.generation_config
    ids = theirs.generate(torch.from_numpy(source)[None])[0].tolist()
    return list(itertools.takewhile(lambda index: index != config.eos_token_id, ids[1:]))


def test_greedy_ids_equal_those_of_transformers(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = imported.theirs.generation_config.to_dict()
    names = ("eos_token_id", "pad_token_id", "decoder_start_token_id", "bos_token_id")
    kept = {name: stated[name] for name in names}
    plain: Any = transformers.GenerationConfig
    monkeypatch.setattr(imported.theirs, "generation_config", plain(max_length=12, **kept))
    expected = [generated(imported.theirs, source) for source in imported.sources]
    assert answers(imported.bundle, imported.sources, SamplingParams(max_new_tokens=11)) == expected
    assert len({index for ids in expected for index in ids}) > 2  # the model does not repeat one token only


def test_beam_ids_equal_those_of_transformers_with_the_settings_of_the_checkpoint(imported: Imported) -> None:
    """generation_config.json has four beams and forced and suppressed tokens; both `generate` and we use it."""
    manifest = imported.bundle.manifest
    params = SamplingParams(**own_defaults(manifest.generation))
    assert params.beam_width == 4
    expected = [generated(imported.theirs, source) for source in imported.sources]
    if manifest.text.target_language_place == "first" and manifest.text.default_target_language:
        first = manifest.text.languages[manifest.text.default_target_language]
        params = SamplingParams(**own_defaults(manifest.generation), forced_first_id=first)
    assert answers(imported.bundle, imported.sources, params) == expected


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("mbart50", lambda model: model, dict(max_shard_size="20KB")),
        ("nllb", lambda model: model.half(), {}),
        ("byt5", lambda model: model, dict(as_bin=True)),
    ],
    ids=["sharded", "half", "bin"],
)
def test_every_file_format_of_weights_gives_the_outputs_of_the_original_at_both_precisions(
    name: str, change: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "theirs", name, change, **options)
    bundle = import_to(tmp_path / "theirs", tmp_path / "ours", "--precision", "float32", "int8")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    imported = Imported(theirs=theirs, folder=tmp_path / "theirs", bundle=bundle)
    test_encoder_states_equal_those_of_transformers(imported)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert all(answers(bundle, imported.sources, params, precision="int8"))
