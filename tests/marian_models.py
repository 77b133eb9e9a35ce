"""Marian models with random weights, written as Marian writes them: .npz, .bin in float32 or int8, and vocabularies."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]
FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101
PRE_NORM = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
AVERAGE = {"transformer-decoder-autoreg": "average-attention"}
UNTIED = {"tied-embeddings-all": False, "dim-vocabs": [50, 70]}
# Options that change the computation, each at least once in every decoder where it can matter.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"transformer-ffn-activation": "relu", "transformer-postprocess-emb": "nd"},
    "gelu, untied": {"transformer-ffn-activation": "gelu", **UNTIED},
    "tied output": {**UNTIED, "tied-embeddings": True, "output-omit-bias": True},
    "tied source": {"tied-embeddings-all": False, "tied-embeddings-src": True, "transformer-postprocess-emb": ""},
    "pre-norm": PRE_NORM,
    "ssru": SSRU,
    "ssru, relu, untied": {**SSRU, **UNTIED, "transformer-ffn-activation": "relu"},
    "ssru, gelu, pre-norm": {**SSRU, **PRE_NORM, "transformer-ffn-activation": "gelu"},
    "average": AVERAGE,
    "average, no gate": {**AVERAGE, "transformer-aan-nogate": True, "transformer-aan-activation": "relu"},
    "average, no feed-forward": {**AVERAGE, **UNTIED, "transformer-aan-depth": 1, "transformer-ffn-activation": "relu"},
    "trained positions": {"transformer-train-position-embeddings": True},  # of no effect in Marian's Transformer
}


def options(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that Marian saves for a small Transformer, with changes."""
    described = """
        {type: transformer, enc-depth: 2, dec-depth: 2, dim-emb: 32, dim-rnn: 64, dim-vocabs: [60, 60], skip: false,
        enc-type: bidirectional, enc-cell: gru, enc-cell-depth: 1, dec-cell: gru, dec-cell-base-depth: 2,
        dec-cell-high-depth: 1, layer-normalization: false, right-left: false, input-types: [], lemma-dim-emb: 0,
        tied-embeddings: false, tied-embeddings-src: false, tied-embeddings-all: true, output-omit-bias: false,
        transformer-heads: 4, transformer-dim-ffn: 48, transformer-ffn-depth: 2, transformer-ffn-activation: swish,
        transformer-dim-aan: 40, transformer-aan-depth: 2, transformer-aan-activation: swish,
        transformer-aan-nogate: false, transformer-decoder-autoreg: self-attention, transformer-no-projection: false,
        transformer-preprocess: '', transformer-postprocess: dan, transformer-postprocess-emb: d,
        transformer-postprocess-top: '', transformer-tied-layers: [], transformer-guided-alignment-layer: last,
        transformer-train-position-embeddings: false, transformer-pool: false, bert-train-type-embeddings: true,
        bert-type-vocab-size: 2, ulr: false, ulr-dim-emb: 0, ulr-trainable-transformation: false,
        version: v1.12.0}"""
    return {**yaml.safe_load(described), **changed}


def random_tensors(  # noqa: C901 a part of the model for each option
    described: Mapping[str, Any], seed: int = 1
) -> Tensors:
    """Return tensors for these options, of a size at which the likeliest token is far from the second one."""
    random = np.random.default_rng(seed)
    width, tensors = described["dim-emb"], {}

    def product(name: str, part: str, inputs: int, outputs: int) -> None:
        tensors[f"{name}_W{part}"] = random.normal(0, 2.5 * inputs**-0.5, (inputs, outputs))
        tensors[f"{name}_b{part}"] = random.normal(0, 0.05, (1, outputs))

    def norm(name: str, suffix: str = "") -> None:
        tensors[f"{name}_ln_scale{suffix}"] = random.normal(1, 0.2, (1, width))
        tensors[f"{name}_ln_bias{suffix}"] = random.normal(0, 0.1, (1, width))

    def norms(name: str, before: str | None = None) -> None:
        if "n" in described["transformer-preprocess"]:
            norm(before or name, "_pre")
        if "n" in described["transformer-postprocess"]:
            norm(name)

    def attention(name: str) -> None:
        for part in "qkvo":
            product(name, part, width, width)
        norms(f"{name}_Wo")

    def average(name: str) -> None:
        if described["transformer-aan-depth"] == 2:
            product(name, "1", width, described["transformer-dim-aan"])
            product(name, "2", described["transformer-dim-aan"], width)
        if not described["transformer-aan-nogate"]:
            product(name, "i", width, width)
            product(name, "f", width, width)
        norms(f"{name}_ffn")

    def recurrence(name: str) -> None:
        product(name, "f", width, width)
        tensors[f"{name}_W"] = random.normal(0, 3 * width**-0.5, (width, width))
        norms(f"{name}_ffn", before=name)

    kinds = {
        "self-attention": ("self", attention), "average-attention": ("aan", average), "rnn": ("rnn", recurrence)
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        kind = described["transformer-decoder-autoreg"] if side == "decoder" else "self-attention"
        if "n" in described["transformer-postprocess-emb"]:
            norm(f"{side}_emb", "_pre")
        if "n" in described["transformer-postprocess-top"]:
            norm(f"{side}_top")
        for layer in range(1, described[f"{side[:3]}-depth"] + 1):
            name = f"{side}_l{layer}"
            part, add = kinds[kind]
            add(f"{name}_{part}")
            if side == "decoder":
                attention(f"{name}_context")
            product(f"{name}_ffn", "1", width, described["transformer-dim-ffn"])
            product(f"{name}_ffn", "2", described["transformer-dim-ffn"], width)
            norms(f"{name}_ffn_ffn")
    source, target = described["dim-vocabs"]
    shares_all, shares_sides = described["tied-embeddings-all"], described["tied-embeddings-src"]
    for name in ("Wemb",) if shares_all or shares_sides else ("encoder_Wemb", "decoder_Wemb"):
        tensors[name] = random.normal(0, 0.4, (source if name.startswith("encoder") else target, width))
    if not shares_all and not described["tied-embeddings"]:
        tensors["decoder_ff_logit_out_Wt"] = random.normal(0, 0.3, (target, width))
    if not described["output-omit-bias"]:
        tensors["decoder_ff_logit_out_b"] = random.normal(0, 0.1, (1, target))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_npz(path: Path, described: Mapping[str, Any], tensors: Tensors) -> None:
    """Write a model as Marian saves it after training."""
    text = np.frombuffer(yaml.safe_dump(dict(described)).encode() + b"\0", np.int8)
    np.savez(path, **tensors, **{"special:model.yml": text})  # type: ignore[arg-type]


def quantized(name: str, tensor: NDArray[np.float32]) -> tuple[bytes, NDArray[np.float32]]:
    """Return the bytes of a tensor as intgemm's int8, and the values that they stand for.

    The integers of products are stored column by column.
    """
    factor = np.float32(127 / np.abs(tensor).max())
    integers = np.rint(tensor * factor).astype(np.int8)
    stored = integers if "Wemb" in name else integers.T
    content = stored.tobytes() + factor.tobytes()
    return content + bytes(-len(content) % 256), integers.astype(np.float32) / factor


def write_bin(path: Path, described: Mapping[str, Any], tensors: Tensors, *, is_int8: bool, alphas: bool) -> Tensors:
    """Write a model as marian-conv does, in float32 or intgemm8, and return the values that the file stands for.

    alphas: with the scales of activations that Bergamot computes beforehand.
    """
    meant, entries = dict(tensors), []
    for name, tensor in sorted(tensors.items()):
        product = name[:-1].endswith("_W") or name.endswith(("_W", "_Wt", "Wemb"))
        content, kind = tensor.tobytes(), FLOAT32
        if is_int8 and product:
            (content, meant[name]), kind = quantized(name, tensor), INTGEMM8
        entries.append((name, kind, tensor.shape, content))
        if alphas and product:
            entries.append((f"{name}_QuantMultA", FLOAT32, (1, 1), struct.pack("<f", 9.5)))
    text = yaml.safe_dump(dict(described)).encode() + b"\0"
    entries.append(("special:model.yml", INT8, (len(text),), text))
    path.write_bytes(packed(entries))
    return meant


def packed(entries: list[tuple[str, int, tuple[int, ...], bytes]]) -> bytes:
    """Return a .bin file of tensors: name, type, dimensions and data."""
    content = struct.pack("<2Q", 1, len(entries))
    for name, kind, shape, data in entries:
        content += struct.pack("<4Q", len(name) + 1, kind, len(shape), len(data))
    content += b"".join(name.encode() + b"\0" for name, *_ in entries)
    content += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in entries)
    padding = -(len(content) + 8) % 256
    return content + struct.pack("<Q", padding) + bytes(padding) + b"".join(data for *_, data in entries)


def write_vocabulary(path: Path, size: int) -> None:
    """Write a YAML vocabulary of the tokens </s>, <unk>, w2, w3 and so on."""
    tokens = ["</s>", "<unk>", *(f"w{index}" for index in range(2, size))]
    path.write_text("".join(f"{token}: {index}\n" for index, token in enumerate(tokens)), encoding="utf-8")


def write_folder(folder: Path, changed: Mapping[str, Any], seed: int = 1) -> tuple[dict[str, Any], Tensors]:
    """Write a directory with a model and two vocabularies; returns its options and tensors."""
    described = options(changed)
    tensors = random_tensors(described, seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_npz(folder / "model.npz", described, tensors)
    for side, size in zip(("source", "target"), described["dim-vocabs"], strict=True):
        write_vocabulary(folder / f"vocab.{side}.yml", size)
    return described, tensors


def write_shortlist(path: Path, likely: Mapping[int, set[int]], *, num_frequent: int, num_sources: int) -> None:
    """Write a binary shortlist of Marian, with its checksum."""
    rows = [sorted(likely.get(source, ())) for source in range(num_sources)]
    ids = [index for row in rows for index in row]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    body = struct.pack("<4Q", num_frequent, 50, len(offsets), len(ids))
    body += struct.pack(f"<{len(offsets)}Q", *offsets) + struct.pack(f"<{len(ids)}I", *ids)
    path.write_bytes(struct.pack("<2Q", 0xF11A48D5013417F5, checksum(body)) + body)


def checksum(content: bytes) -> int:
    """Return the hash of whole u64 in a shortlist: hash_combine of Boost, with numbers as their own hashes."""
    seed = 0
    for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8]):
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) % (1 << 64)
    return seed
