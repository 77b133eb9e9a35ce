"""Size, memory and speed of fine-tuned classifiers on one thread: served, and their graphs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.bundle.native_encoder import Floats, Ids, NativeEncoder
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.export.export import export_bundle
from antiphon.lab.measures.served import classify_all, serving
from antiphon.lab.times import median_seconds
from antiphon.text.tokenizer import encode_sources, open_tokenizer

SERVED, GRAPH = "texts/s, served", "texts/s, graph alone"
PRECISION: Precision = "int8"


class PlainClassifier:
    """The graphs of an exported classifier in plain ONNX Runtime, one text at a time."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._encoder = NativeEncoder(bundle.path, bundle.graph_set(PRECISION), manifest.model)
        self._tokenizer, self._text = open_tokenizer(bundle.path, manifest.text), manifest.text
        (head,) = (head for head in manifest.model.heads if head.task == "classify")
        self.labels = head.labels

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens [S] int64 of each text."""
        return [np.asarray(ids, np.int64) for ids in encode_sources(self._tokenizer, self._text, texts)]

    def classify(self, sources: Sequence[Ids]) -> list[str]:
        """Return the most probable label of each source [S]."""
        return [self.labels[int(self.logits(source).argmax())] for source in sources]

    def logits(self, source: Ids) -> Floats:
        """Return the logits [1, L] float32 of all L labels for a source [S]."""
        (states,) = self._encoder.encode([source])
        return self._encoder.read_out("classify", states[:1])


def classifier_costs(folders: Mapping[str, Path], texts: Sequence[str], num_runs: int) -> dict[str, dict[str, float]]:
    """Return parameters, size, memory of the server, SERVED and GRAPH of the checkpoint in each folder.

    Speeds are medians of `num_runs` runs over all texts. A graph alone reads tokens, without gRPC or tokenizer. Each
    checkpoint is exported into the folder `bundle` beside it.
    """
    checkpoints = {name: load_checkpoint(folder) for name, folder in folders.items()}
    bundles = {
        name: export_bundle(
            checkpoint, folders[name].with_name("bundle"), precisions=(PRECISION,), explain=False, overwrite=True
        )
        for name, checkpoint in checkpoints.items()
    }
    plain = {name: PlainClassifier(bundle) for name, bundle in bundles.items()}
    runs = {name: partial(model.classify, model.encode(texts)) for name, model in plain.items()}
    graph_s = median_seconds(runs, num_runs)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(bundle.path, PRECISION)) for name, bundle in bundles.items()}
        calls = {name: partial(classify_all, server.client, texts) for name, server in servers.items()}
        served_s = median_seconds(calls, num_runs)
        memory = {name: server.peak_memory_mb for name, server in servers.items()}
    return {
        name: {
            "parameters, million": checkpoints[name].model.num_parameters / 1e6,
            "bundle, MB": sum(entry.size for entry in bundle.manifest.files.values()) / 1e6,
            "memory of the server, MB": memory[name],
            SERVED: len(texts) / served_s[name],
            GRAPH: len(texts) / graph_s[name],
        }
        for name, bundle in bundles.items()
    }
