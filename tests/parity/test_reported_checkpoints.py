"""Checkpoints of public bug reports about neighbouring projects: results of transformers, or a refusal by name.

Each is a small random checkpoint that is edited as the report describes. docs/decisions/reports.md has the verdicts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.bundle.manifest import Bundle
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.domain.request import Request
from antiphon.domain.sampling_params import SamplingParams
from antiphon.errors import SourceError
from antiphon.importer.importer import ImportOptions, import_checkpoint, open_original
from antiphon.rpc.v1.options import own_defaults
from antiphon.runtime.native import NativeRunner
from antiphon.text.tokenizer import encode_sources
from tests.fakes import changed, request_of
from tests.parity.answers_together import answer
from tests.parity.decoder_checkpoints import DECODERS, write_decoder
from tests.parity.seq2seq_checkpoints import save
from tests.parity.tokenizer_checkpoints import pieces

Weights = dict[str, Tensor]
ABSENT = object()
"""Value of a setting that is removed from its file."""
TEXTS = (
    "the cat sat", "The Cat Sat!", " leading", "two  spaces   three\ttab\nline", "naïve café Größe", "日本語 テキスト",
    "👩‍👩‍👧 x", "hello , world . it 's", "a" * 40, "1234567 12", "https://a.b/c?d=e",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Public report, the checkpoint that its case begins with, and the edits of the case.

    report: repository and number; several if they are of one kind; none if the case was found here.
    base: name of a checkpoint of decoder_checkpoints.py or seq2seq_checkpoints.py.
    config, generation, tokenizer_config: settings to change in these files.
    weights, tokenizer: function from the tensors or the object of tokenizer.json to changed ones.
    metadata: of the safetensors file. texts: texts beside TEXTS.
    """

    report: str
    base: str
    config: Mapping[str, object] = field(default_factory=dict)
    generation: Mapping[str, object] = field(default_factory=dict)
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)
    weights: Callable[[Weights], Weights] = lambda weights: weights
    tokenizer: Callable[[dict[str, Any]], dict[str, Any]] = lambda described: described
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    texts: Sequence[str] = ()

    @property
    def is_decoder(self) -> bool:
        """True for a decoder-only model."""
        return self.base in DECODERS

    def write(self, folder: Path) -> Path:
        """Write the edited checkpoint and return its directory."""
        if self.is_decoder:
            write_decoder(folder, self.base)
        else:
            save(folder, self.base)
        edit(folder / "config.json", self.config)
        edit(folder / "generation_config.json", self.generation)
        edit(folder / "tokenizer_config.json", self.tokenizer_config)
        path = folder / "tokenizer.json"
        if path.exists():
            path.write_text(json.dumps(self.tokenizer(json.loads(path.read_bytes()))))
        path = folder / "model.safetensors"
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.weights(load_file(path)).items()}
        save_file(tensors, path, metadata=None if self.metadata is None else dict(self.metadata))
        return folder

    def original(self, folder: Path) -> Any:
        """Return the model as transformers opens it."""
        kind = transformers.AutoModelForCausalLM if self.is_decoder else transformers.AutoModelForSeq2SeqLM
        return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def edit(path: Path, changes: Mapping[str, object]) -> None:
    """Change settings of a JSON file; ABSENT removes one."""
    if not changes:
        return
    settings = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not ABSENT}))


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {new if name == old else name: tensor for name, tensor in weights.items()}


def with_added(*tokens: Mapping[str, object]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that adds tokens to a tokenizer.json; ids are counted from the end of its vocabulary."""

    def add(described: dict[str, Any]) -> dict[str, Any]:
        first = 1 + max(described["model"]["vocab"].values())
        plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
        described["added_tokens"] += [{**plain, **token, "id": first + int(str(token["id"]))} for token in tokens]
        return described

    return add


def opened(folder: Path, text_folder: Path) -> Checkpoint:
    text_folder.mkdir()
    return open_original(str(folder), text_folder)


def banned_padding(weights: Weights) -> Weights:
    """Return weights whose output bias forbids the padding token, id 1."""
    weights["final_logits_bias"][:, 1] = -torch.inf
    return weights


ROTARY = {
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(64, 10),
    "model.rotary_emb.inv_freq": torch.ones(5),
}
MODELS: dict[str, Report] = {
    "file without metadata": Report(report="ml-explore/mlx#743, safetensors#549", base="llama", metadata=None),
    "output tied by config.json, stored apart": Report(
        report="huggingface/transformers#42612", base="qwen2",
        weights=lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)},
    ),
    "tied embedding stored as the output": Report(
        report="vllm-project/vllm#53020, huggingface/transformers#43429", base="qwen2",
        weights=renamed("model.embed_tokens.weight", "lm_head.weight"),
    ),
    "no shared embedding": Report(
        report="huggingface/transformers#48154", base="flan_t5",
        weights=renamed("shared.weight", "decoder.embed_tokens.weight"),
    ),
    "biases of attention": Report(
        report="vllm-project/vllm#3767", base="llama", config=dict(attention_bias=True),
        weights=lambda tensors: tensors | {
            name.replace("weight", "bias"): tensor[:, 0] for name, tensor in tensors.items() if "self_attn" in name
        },
    ),
    "biases of the feed-forward": Report(
        report="mlc-ai/mlc-llm#3494", base="llama", config=dict(mlp_bias=True),
        weights=lambda tensors: tensors | {
            name.replace("weight", "bias"): tensor[:, 0] for name, tensor in tensors.items() if "mlp" in name
        },
    ),
    "whole number as factor": Report(
        report="meta-llama/llama3#319", base="llama",
        config=dict(rope_parameters=ABSENT, rope_theta=5000, rope_scaling={"type": "linear", "factor": 4}),
    ),
    "scaling of Llama 3 in its old place": Report(
        report="meta-llama/llama3#299", base="llama",
        config=dict(
            rope_parameters=ABSENT, rope_theta=100.0,
            rope_scaling=dict(
                rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=32
            ),
        ),
    ),
    "stored rotations": Report(
        report="vllm-project/vllm#1977, huggingface/transformers#35255", base="llama",
        weights=lambda tensors: tensors | ROTARY,
    ),
    "positions in half precision": Report(
        report="huggingface/transformers#44448", base="pegasus",
        weights=lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()},
    ),
    "infinite bias of the output": Report(report="none", base="bart", weights=banned_padding),
    "scale of M2M-100 by default": Report(
        report="none", base="m2m100", config=dict(scale_embedding=ABSENT)
    ),
}  # fmt: skip


@torch.no_grad()
def logits(checkpoint: Checkpoint, theirs: Any) -> tuple[Tensor, Tensor]:
    """Return our logits and the original's [1, T, V] after the same random tokens."""
    config, model = checkpoint.config, checkpoint.model
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(3, config.vocab_size, (1, 9), generator=generator)
    if config.architecture == "decoder":
        return model.logits(model.decode(target, None)), theirs(input_ids=target).logits
    source = torch.randint(3, config.resolved_source_vocab_size, (1, 12), generator=generator)
    lens = torch.tensor([12], dtype=torch.int32)
    ours = model.decode(target, model.project_memory(model.encode(source, lens, None)), lens)
    return model.logits(ours), theirs(input_ids=source, decoder_input_ids=target).logits


@pytest.mark.parametrize("case", MODELS)
def test_reported_weights_give_the_logits_of_the_original(case: str, tmp_path: Path) -> None:
    report = MODELS[case]
    folder = report.write(tmp_path / "theirs")
    ours, theirs = logits(opened(folder, tmp_path / "text"), report.original(folder))
    banned = theirs.isneginf()
    assert bool((ours[banned] < -1e3).all())
    torch.testing.assert_close(ours[~banned], theirs[~banned], atol=5e-5, rtol=1e-4)


def _quantised(weights: Weights) -> Weights:
    """Return weights whose projections are stored as GPTQ and AWQ do."""
    packed = {name.replace("weight", "qweight"): tensor.int() for name, tensor in weights.items() if "proj" in name}
    return {name: tensor for name, tensor in weights.items() if "proj" not in name} | packed


REFUSED: dict[str, tuple[Report, str]] = {
    "saved by torch.compile": (
        Report(report="pytorch/pytorch#101107", base="llama", weights=prefixed("_orig_mod.")), "'_orig_mod.'.*compile"
    ),
    "saved by DataParallel": (
        Report(report="pytorch/pytorch#101107", base="bart", weights=prefixed("module.")), "'module.'.*DataParallel"
    ),
    "AWQ and GPTQ": (
        Report(report="OpenNMT/CTranslate2#1821, lm-sys/FastChat#3036", base="qwen2", weights=_quantised), "quantised"
    ),
    "8 bits of bitsandbytes": (
        Report(
            report="OpenNMT/CTranslate2#1776", base="llama",
            weights=lambda tensors: tensors | {"model.layers.0.mlp.up_proj.SCB": torch.ones(56)},
        ),
        "quantised",
    ),
    "untied output missing": (
        Report(
            report="vllm-project/vllm#53020", base="llama",
            weights=lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
        ),
        "lm_head.weight",
    ),
    "rotation of a kind we do not have": (
        Report(
            report="vllm-project/vllm#1466", base="llama",
            config=dict(rope_parameters=dict(rope_type="dynamic", rope_theta=5e3, factor=2.0)),
        ),
        "'dynamic'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_reported_weights_are_refused_by_name(case: str, tmp_path: Path) -> None:
    report, message = REFUSED[case]
    folder = report.write(tmp_path / "theirs")
    with pytest.raises(SourceError, match=message):
        opened(folder, tmp_path / "text")


WINDOWS: dict[str, Report] = {
    "Mistral without window": Report(
        report="vllm-project/vllm#2064", base="mistral", config=dict(sliding_window=None)
    ),
    "Mistral, window of its class": Report(
        report="predibase/lorax#127", base="mistral",
        config=dict(sliding_window=ABSENT, max_position_embeddings=8192),
    ),
    "Qwen2, window not used": Report(
        report="vllm-project/vllm#34074", base="qwen2",
        config=dict(use_sliding_window=False, sliding_window=8, layer_types=ABSENT),
    ),
    "Qwen2, use of the window not stated": Report(
        report="none", base="qwen2",
        config=dict(use_sliding_window=ABSENT, sliding_window=8, layer_types=ABSENT),
    ),
    "Qwen2, window from a layer on that it does not have": Report(
        report="vllm-project/vllm#15705, #17306", base="qwen2",
        config=dict(use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=ABSENT),
    ),
    "Qwen2, window in every layer": Report(
        report="vllm-project/vllm#17306", base="qwen2",
        config=dict(use_sliding_window=True, sliding_window=8, max_window_layers=0, layer_types=ABSENT),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_length_is_limited_to_the_window_exactly_if_the_original_has_one(case: str, tmp_path: Path) -> None:
    folder = WINDOWS[case].write(tmp_path / "theirs")
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = config.sliding_window if "sliding_attention" in kinds else None
    expected = min(config.max_position_embeddings, window or config.max_position_embeddings)
    assert opened(folder, tmp_path / "text").config.max_target_len == expected


TRUNCATED: dict[str, Any] = dict(
    truncation=dict(max_length=4, strategy="LongestFirst", stride=0, direction="Right"),
    padding=dict(
        strategy={"Fixed": 16}, direction="Right", pad_to_multiple_of=None, pad_id=2, pad_type_id=0, pad_token="</s>"
    ),
)  # fmt: skip
MARKED: dict[str, Any] = dict(type="Metaspace", replacement="▁", split=False)
TOKENIZERS: dict[str, Report] = {
    "truncation and padding of training": Report(
        report="deepjavalibrary/djl#2669, huggingface/text-embeddings-inference#56", base="llama",
        tokenizer=lambda described: described | TRUNCATED,
    ),
    "word mark before the first word only": Report(
        report="huggingface/tokenizers#1357, huggingface/swift-transformers#345", base="llama",
        tokenizer=lambda described: described | dict(
            normalizer=None, pre_tokenizer=MARKED | dict(prepend_scheme="first"),
            decoder=MARKED | dict(prepend_scheme="first"),
        ),
    ),
    "word mark before no first word": Report(
        report="huggingface/transformers#28622", base="llama",
        tokenizer=lambda described: described | dict(
            normalizer=None, pre_tokenizer=MARKED | dict(prepend_scheme="never"),
            decoder=MARKED | dict(prepend_scheme="never"),
        ),
    ),
    "clean-up of spaces": Report(
        report="huggingface/transformers#32575, #35175, huggingface/tokenizers#1543", base="llama",
        tokenizer_config=dict(clean_up_tokenization_spaces=True), texts=["x != y", "the word 'social' ?"],
    ),
    "flags for begin and end beside a template": Report(
        report="huggingface/transformers#30947", base="llama",
        tokenizer_config=dict(add_bos_token=False, add_eos_token=True),
    ),
    "flag for begin without a template": Report(
        report="huggingface/transformers#31316", base="gpt2",
        tokenizer_config=dict(add_bos_token=True, tokenizer_class="GPT2Tokenizer"),
    ),
    "bytes under the class of word marks": Report(
        report="huggingface/transformers#45488, #46489, vllm-project/vllm#48482", base="gpt2",
        tokenizer_config=dict(tokenizer_class="LlamaTokenizerFast"),
    ),
    "space before the first word by a flag": Report(
        report="huggingface/transformers#25563, #42481", base="gpt2",
        tokenizer_config=dict(add_prefix_space=True, tokenizer_class="GPT2Tokenizer"),
    ),
    "class that replaces the normaliser": Report(
        report="huggingface/transformers#48219", base="llama", tokenizer_config=dict(tokenizer_class="LlamaTokenizer"),
    ),
    "spaces around an added token": Report(
        report="huggingface/transformers#29626, huggingface/tokenizers#1613", base="llama",
        tokenizer=with_added(dict(id=0, content="[SEP2]", lstrip=True, rstrip=True)), texts=["a [SEP2] b", "a [SEP2]b"],
    ),
    "spaces around a token of tokenizer_config.json": Report(
        report="huggingface/transformers#29626", base="llama", texts=["a [X] b", "a[X]b"],
        tokenizer_config=dict(added_tokens_decoder={"326": dict(
            content="[X]", lstrip=True, rstrip=True, normalized=False, single_word=False, special=False
        )}),
    ),
    "added token only as a word": Report(
        report="huggingface/transformers#25232", base="llama", texts=["cat concat cats cat"],
        tokenizer_config=dict(added_tokens_decoder={"326": dict(
            content="cat", lstrip=False, rstrip=False, normalized=False, single_word=True, special=False
        )}),
    ),
    "added token behind a gap": Report(
        report="huggingface/transformers#9246, huggingface/tokenizers#1444", base="llama",
        tokenizer=with_added(dict(id=1, content="<|im_start|>", special=True)),
    ),
    "mBART-50 without its class": Report(
        report="huggingface/transformers#12333", base="mbart50", tokenizer_config=dict(tokenizer_class=ABSENT)
    ),
    "mBART-50 with a general class": Report(
        report="none", base="mbart50", tokenizer_config=dict(tokenizer_class="PreTrainedTokenizerFast")
    ),
}  # fmt: skip


def write_mbart50_tokenizer(folder: Path) -> None:
    """Replace the tokenizer of a checkpoint by one that MBart50Tokenizer has saved."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    pieces(folder / "sentencepiece.bpe.model")
    kind: Any = transformers.MBart50Tokenizer
    kind.from_pretrained(folder, src_lang="en_XX", tgt_lang="de_DE").save_pretrained(folder)


@pytest.mark.parametrize("case", TOKENIZERS)
def test_reported_tokenizer_gives_the_ids_and_texts_of_the_original(case: str, tmp_path: Path) -> None:
    """Texts keep their spaces before punctuation: the original's clean-up removes some that were there."""
    report = TOKENIZERS[case]
    folder = report.write(tmp_path / "theirs")
    if report.base == "mbart50":
        write_mbart50_tokenizer(folder)
        edit(folder / "tokenizer_config.json", report.tokenizer_config)
    checkpoint = opened(folder, tmp_path / "text")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*TEXTS, *report.texts]
    expected = [theirs(text).input_ids for text in texts]
    assert encode_sources(checkpoint.tokenizer, checkpoint.text, texts) == expected
    decode = functools.partial(theirs.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for ids in [*expected, *([index] for index in range(len(theirs)))]:
        assert checkpoint.tokenizer.decode(ids) == decode(ids)


GREEDY: dict[str, object] = dict(num_beams=1, no_repeat_ngram_size=0, forced_bos_token_id=ABSENT)
ANSWERS: dict[str, Report] = {
    "several end tokens and beams": Report(
        report="huggingface/transformers#25103", base="bart",
        generation=GREEDY | dict(eos_token_id=[2, 54, 90], num_beams=3),
    ),
    "start token not stated": Report(
        report="huggingface/transformers#5212, #7628, #8218", base="bart",
        config=dict(decoder_start_token_id=ABSENT), generation=GREEDY | dict(decoder_start_token_id=ABSENT),
    ),
    "parameters of tasks": Report(
        report="huggingface/transformers#7656, #15347", base="t5",
        config=dict(task_specific_params={"translation": dict(num_beams=4, max_length=5, prefix="x: ")}),
        generation=dict(num_beams=1),
    ),
    "penalties on the prompt": Report(
        report="OpenNMT/CTranslate2#1498, EleutherAI/lm-evaluation-harness#3154", base="llama",
        generation=dict(repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=10),
    ),
}  # fmt: skip
SOURCE = (10, 20, 30, 40, 50, 2)
PROMPT = (1, 281, 287, 296, 275, 283, 287, 296)


def imported(report: Report, folder: Path) -> Bundle:
    """Write a checkpoint to folder / "theirs" and import it."""
    theirs = report.write(folder / "theirs")
    options = ImportOptions(source=str(theirs), target=folder / "ours", precisions=["float32"], explain=False)
    return import_checkpoint(options)


def asked(report: Report, params: SamplingParams) -> Request:
    if not report.is_decoder:
        return request_of("0", SOURCE, params=params)
    prompt = request_of("0", (), params=params)
    return changed(prompt, begin_id=PROMPT[0], prefix_ids=PROMPT[1:], num_prompt_ids=len(PROMPT))


def ours(bundle: Bundle, request: Request) -> list[int]:
    """Return the tokens of the only answer to a request."""
    runner = NativeRunner(bundle, max_rows=4, threads=1, precision="float32")
    (event,) = answer(runner, [request])["0"]
    return list(event.token_ids)


@pytest.mark.combinations
@pytest.mark.parametrize("case", ANSWERS)
def test_reported_generation_settings_give_the_answer_of_the_original(case: str, tmp_path: Path) -> None:
    report = ANSWERS[case]
    bundle = imported(report, tmp_path)
    theirs = report.original(tmp_path / "theirs")
    source, start = (PROMPT, len(PROMPT)) if report.is_decoder else (SOURCE, 1)
    expected = theirs.generate(torch.tensor([source]))[0].tolist()[start:]
    ends = theirs.generation_config.eos_token_id
    if expected[-1] in (ends if isinstance(ends, list) else [ends]):
        expected.pop()
    assert ours(bundle, asked(report, SamplingParams(**own_defaults(bundle.manifest.generation)))) == expected


@pytest.mark.combinations
def test_top_k_beyond_the_vocabulary_is_as_no_top_k(tmp_path: Path) -> None:
    """vllm-project/vllm#14234, torch-spyre/sendnn-inference#542: top_k above the vocabulary ended the engine."""
    report = Report(report="vllm-project/vllm#14234", base="llama")
    bundle = imported(report, tmp_path)
    answers = [
        ours(bundle, asked(report, SamplingParams(temperature=1.5, seed=7, top_k=top_k, max_new_tokens=20)))
        for top_k in (0, bundle.manifest.model.vocab_size, 10**6)
    ]
    assert answers[0] == answers[1] == answers[2]
