"""Marian's computation with the tensors of its file, to compare an import with: PyTorch, float32, one text at a time.

Names and formulas are those of Marian's src/models/transformer.h. Every sequence is computed as a whole, without caches
and without our Transformer. Only options that families/marian_files.py accepts are here.

Axes: S source, T target, M model width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from antiphon.checkpoints.marian_files import MarianFile

_EPS = 1e-9
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "swish": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
}


class MarianOriginal:
    """A Marian model; tensors are read when they are needed, and kept."""

    def __init__(self, file: MarianFile) -> None:
        self._file = file
        self._tensors: dict[str, Tensor] = {}
        self._heads: int = file.options["transformer-heads"]

    def encode(self, source: Sequence[int]) -> Tensor:
        """Return the encoder's states [S, M] of source tokens, the end token included."""
        x = self._embed("encoder", source)
        for layer in range(1, self._file.options["enc-depth"] + 1):
            name = f"encoder_l{layer}"
            x = self._sublayer(x, f"{name}_self_Wo", lambda y, name=name: self._attend(f"{name}_self", y, y))
            x = self._sublayer(x, f"{name}_ffn_ffn", lambda y, name=name: self._feed_forward(f"{name}_ffn", y))
        return self._top("encoder", x)

    def logits(self, memory: Tensor, target: Sequence[int]) -> Tensor:
        """Return logits [T, V + 1] after each target token; the begin token, the last id, has minus infinity.

        memory [S, M]; target: token ids, the begin token first. Its embedding is zero.
        """
        x = self._embed("decoder", target)
        causal = torch.ones(len(target), len(target), dtype=torch.bool).tril()
        for layer in range(1, self._file.options["dec-depth"] + 1):
            name = f"decoder_l{layer}"
            x = self._before_target(name, x, causal)
            x = self._sublayer(
                x,
                f"{name}_context_Wo",
                lambda y, name=name: self._attend(f"{name}_context", y, memory),
            )
            x = self._sublayer(x, f"{name}_ffn_ffn", lambda y, name=name: self._feed_forward(f"{name}_ffn", y))
        x = self._top("decoder", x)
        output = next((n for n in ("decoder_ff_logit_out_Wt", "decoder_Wemb", "Wemb") if n in self._file), "")
        untransposed = "decoder_ff_logit_out_W" in self._file
        logits = x @ (self._of("decoder_ff_logit_out_W") if untransposed else self._of(output).T)
        if "decoder_ff_logit_out_b" in self._file:
            logits = logits + self._of("decoder_ff_logit_out_b")
        return functional.pad(logits, (0, 1), value=-math.inf)

    def _before_target(self, name: str, x: Tensor, causal: Tensor) -> Tensor:
        """Apply the sublayer that reads the target tokens before each one."""
        kind = self._option("transformer-decoder-autoreg", "self-attention")
        if kind == "self-attention":
            return self._sublayer(x, f"{name}_self_Wo", lambda y: self._attend(f"{name}_self", y, y, causal))
        if kind == "average-attention":
            return self._sublayer(x, f"{name}_aan_ffn", lambda y: self._average(f"{name}_aan", y))
        return self._sublayer(x, f"{name}_rnn_ffn", lambda y: self._ssru(f"{name}_rnn", y), pre=f"{name}_rnn")

    def _ssru(self, name: str, x: Tensor) -> Tensor:
        forget = torch.sigmoid(x @ self._of(f"{name}_Wf") + self._of(f"{name}_bf"))
        candidate = x @ self._of(f"{name}_W")
        cell, outputs = torch.zeros_like(x[0]), []
        for f, c in zip(forget, candidate, strict=True):
            cell = f * cell + (1 - f) * c
            outputs.append(torch.relu(cell))
        return torch.stack(outputs)

    def _average(self, name: str, x: Tensor) -> Tensor:
        y = torch.stack([x[: index + 1].mean(dim=0) for index in range(len(x))])
        if f"{name}_W1" in self._file:
            y = _ACTIVATIONS[self._option("transformer-aan-activation", "swish")](self._affine(f"{name}", "1", y))
            y = self._affine(name, "2", y)
        if self._option("transformer-aan-nogate", default=False):
            return y
        return torch.sigmoid(self._affine(name, "i", x)) * x + torch.sigmoid(self._affine(name, "f", y)) * y

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = _ACTIVATIONS[self._option("transformer-ffn-activation", "swish")](self._affine(name, "1", x))
        return self._affine(name, "2", inner)

    def _attend(self, name: str, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            self._affine(name, part, states).reshape(len(states), self._heads, -1).transpose(0, 1)
            for part, states in (("q", x), ("k", memory), ("v", memory))
        )  # [H, T, D]
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return self._affine(name, "o", (scores.softmax(dim=-1) @ value).transpose(0, 1).flatten(-2))

    def _affine(self, name: str, part: str, x: Tensor) -> Tensor:
        return x @ self._of(f"{name}_W{part}") + self._of(f"{name}_b{part}")

    def _sublayer(self, x: Tensor, norm: str, apply: Any, pre: str | None = None) -> Tensor:
        """Apply preprocess, the sublayer and postprocess; pre: prefix of the norm before, if it is another one."""
        y = x
        for letter in self._option("transformer-preprocess", ""):
            y = self._norm(pre or norm, y, "_pre") if letter == "n" else y
        y = apply(y)
        for letter in self._option("transformer-postprocess", "dan"):
            y = y + x if letter == "a" else self._norm(norm, y) if letter == "n" else y
        return y

    def _top(self, side: str, x: Tensor) -> Tensor:
        has_norm = "n" in self._option("transformer-postprocess-top", "")
        return self._norm(f"{side}_top", x) if has_norm else x

    def _embed(self, side: str, ids: Sequence[int]) -> Tensor:
        table = self._of("Wemb" if "Wemb" in self._file else f"{side}_Wemb")
        width = table.shape[1]
        vectors = functional.pad(table, (0, 0, 0, 1))[torch.tensor(ids)]  # the row of the begin token is zero
        rates = torch.exp(torch.arange(width // 2) * -(math.log(10000.0) / (width // 2 - 1)))
        angles = torch.arange(len(ids))[:, None] * rates
        x = vectors * math.sqrt(width) + torch.cat([angles.sin(), angles.cos()], dim=1)
        return self._norm(f"{side}_emb", x, "_pre") if "n" in self._option("transformer-postprocess-emb", "d") else x

    def _norm(self, name: str, x: Tensor, suffix: str = "") -> Tensor:
        scale, bias = self._of(f"{name}_ln_scale{suffix}"), self._of(f"{name}_ln_bias{suffix}")
        return functional.layer_norm(x, x.shape[-1:], scale.flatten(), bias.flatten(), _EPS)

    def _option(self, name: str, default: Any) -> Any:
        return self._file.options.get(name, default)

    def _of(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.from_numpy(self._file.floats(name).copy())
        return self._tensors[name]
