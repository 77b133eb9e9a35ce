"""Translators of other projects, each run by the Python of an environment with its packages; see rivals.py.

    python rival_programs.py onnxruntime|openvino FOLDER float32|int8 THREADS
    python rival_programs.py pymarian SETTINGS
    python rival_programs.py fxtranslate MODEL VOCABULARY SHORTLIST

Prints an empty line once it is ready. Then each line of JSON on standard input, {sources, rows, max_new_tokens,
is_endless}, is answered by one on standard output, the list of translations. Sources are token ids for the first two,
which answer with ids, and texts for the others. rows: sources in a batch. is_endless: all translations have
max_new_tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Program = Callable[[Request], list[Any]]


def onnxruntime(folder: str, precision: str, threads: str) -> Program:
    """Return ONNX Runtime with the graphs that Optimum exports; int8: which it quantises, with a scale a channel."""
    from onnxruntime import SessionOptions
    from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    options = SessionOptions()
    options.intra_op_num_threads = int(threads)
    settings: dict[str, Any] = {"session_options": options, "use_merged": False}
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, export=True, **settings)
    if precision == "float32":
        return generation(model)
    has_vnni = "avx512_vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    kind = AutoQuantizationConfig.avx512_vnni if has_vnni else AutoQuantizationConfig.avx2
    with tempfile.TemporaryDirectory() as work:
        exported, quantised = Path(work) / "exported", Path(work) / "quantised"
        model.save_pretrained(exported)
        for graph in exported.glob("*.onnx"):
            quantizer = ORTQuantizer.from_pretrained(exported, file_name=graph.name)
            quantizer.quantize(kind(is_static=False, per_channel=True), quantised, file_suffix="")
        names = {f"{part}_file_name": f"{part}_model.onnx" for part in ("encoder", "decoder", "decoder_with_past")}
        return generation(ORTModelForSeq2SeqLM.from_pretrained(quantised, **names, **settings))


def openvino(folder: str, precision: str, threads: str) -> Program:
    """Return OpenVINO with the graphs that Optimum converts, or compresses to int8 weights."""
    from optimum.intel import OVModelForSeq2SeqLM

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    return generation(
        OVModelForSeq2SeqLM.from_pretrained(folder, export=True, load_in_8bit=precision == "int8", ov_config=settings)
    )


def pymarian(settings: str) -> Program:
    """Return Marian, which sorts sentences and makes batches itself; with one row it gets one sentence a call."""
    from _pymarian import Translator

    translator = Translator(settings)

    def run(request: Request) -> list[str]:
        sources = request["sources"]
        batches = [[source] for source in sources] if request["rows"] == 1 else [sources]
        return [target for batch in batches for target in translator.translate(batch)]

    return run


def fxtranslate(model: str, vocabulary: str, shortlist: str) -> Program:
    """Return the interpreter of Firefox's models, which translates one sentence a call."""
    from fxtranslate import Translator

    vocabulary_bytes = Path(vocabulary).read_bytes()
    translator = Translator(Path(model).read_bytes(), vocabulary_bytes, vocabulary_bytes, Path(shortlist).read_bytes())
    return lambda request: [translator.translate(text) for text in request["sources"]]


def generation(model: Any) -> Program:
    """Return the greedy generation of transformers, with batches of sources of similar length."""
    import torch

    pad = model.config.pad_token_id

    def run(request: Request) -> list[list[int]]:
        sources, rows, longest = request["sources"], request["rows"], request["max_new_tokens"]
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        targets: list[list[int]] = [[]] * len(sources)
        for first in range(0, len(order), rows):
            batch = order[first : first + rows]
            width = max(len(sources[index]) for index in batch)
            ids = torch.tensor([sources[index] + [pad] * (width - len(sources[index])) for index in batch])
            outputs = model.generate(
                input_ids=ids,
                attention_mask=(torch.arange(width) < torch.tensor([[len(sources[index])] for index in batch])).long(),
                max_new_tokens=longest,
                min_new_tokens=longest if request["is_endless"] else None,
                num_beams=1,
                do_sample=False,
            )
            for index, target in zip(batch, outputs[:, 1:].tolist(), strict=True):
                targets[index] = target
        return [_ended(target, model.config.eos_token_id) for target in targets]

    return run


def _ended(target: list[int], eos_id: int) -> list[int]:
    """Return a target up to its end token, which is included."""
    return target[: target.index(eos_id) + 1] if eos_id in target else target


PROGRAMS: dict[str, Callable[..., Program]] = {
    "onnxruntime": onnxruntime, "openvino": openvino, "pymarian": pymarian, "fxtranslate": fxtranslate,
}  # fmt: skip


def main() -> None:
    """Answer requests until standard input ends."""
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # packages print, too
    os.dup2(2, 1)
    program = PROGRAMS[sys.argv[1]](*sys.argv[2:])
    print(file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(program(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
