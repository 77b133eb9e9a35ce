"""Served answers: a server of one bundle as a child process on loopback, and costs of exported classifiers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.client import Client, Options, ServerError
from antiphon.errors import ModelError
from antiphon.export.bundle_model import Floats, Ids, NativeEncoder
from antiphon.export.export import export_bundle
from antiphon.lab.costs import median_seconds
from antiphon.text.tokenizer import encode_sources, open_tokenizer

_READY = re.compile(r"antiphon: ready: .* on (?P<target>\S+), metrics on ")
_PATIENCE_S = 60


class ServeError(ModelError):
    """The server of an experiment did not start; the message has its exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server: a client of it, and the id of its process."""

    client: Client
    pid: int

    @property
    def peak_memory_mb(self) -> float:
        """Largest resident memory of the process so far, in MB (10^6 bytes); Linux only."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        kib = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert kib is not None
        return int(kib[1]) * 1024 / 1e6


@contextmanager
def serving(bundle: Path, precision: str = "float32") -> Iterator[Server]:
    """Serve a bundle on one thread inside the context. Raises ServeError if the server does not start."""
    options = f"--port 0 --metrics-port 0 --threads 1 --precision {precision} --access-log errors".split()
    command = [sys.executable, "-m", "antiphon.cli", "serve", str(bundle), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = _READY.match(server.stdout.readline())
            if ready is None:
                raise ServeError(f"antiphon serve {bundle} ended with exit code {server.wait(_PATIENCE_S)}")
            with Client(ready["target"]) as client:
                yield Server(client=client, pid=server.pid)
        finally:
            server.terminate()


def classify_all(client: Client, texts: Sequence[str]) -> list[str]:
    """Return the served label of each text, from 16 requests at a time. Raises ServerError if one is refused."""
    with ThreadPoolExecutor(16) as pool:
        return [answer.labels[0].label for answer in pool.map(client.classify, texts)]


def served_translations(client: Client, sources: Sequence[str], options: Options) -> list[str]:
    """Return the served translation of each source. Raises ServerError if the server refuses one of them."""
    texts = []
    for answer in client.generate_many(sources, options, concurrency=16):
        if isinstance(answer, ServerError):
            raise answer
        texts.append(answer.text)
    return texts


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


def exported(checkpoint: Checkpoint, path: Path, precision: Precision = "float32") -> Bundle:
    """Export a model to a bundle of one precision; an earlier one is replaced."""
    return export_bundle(checkpoint, path, precisions=(precision,), explain=False, overwrite=True)


def classifier_costs(folders: Mapping[str, Path], texts: Sequence[str], num_runs: int) -> dict[str, dict[str, float]]:
    """Return parameters, size, memory of the server, SERVED and GRAPH of the checkpoint in each folder.

    Speeds are medians of `num_runs` runs over all texts. A graph alone reads tokens, without gRPC or tokenizer. Each
    checkpoint is exported into the folder `bundle` beside it.
    """
    checkpoints = {name: load_checkpoint(folder) for name, folder in folders.items()}
    bundles = {
        name: exported(checkpoint, folders[name].with_name("bundle"), PRECISION)
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
