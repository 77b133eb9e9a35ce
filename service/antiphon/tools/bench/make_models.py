"""Makes the models that a benchmark compares. Runs in its own process, so that the measuring process never loads torch.

    python -m antiphon.tools.bench.make_models random PRESET FOLDER
    python -m antiphon.tools.bench.make_models transformers PRESET FOLDER
    python -m antiphon.tools.bench.make_models cuda SHAPE FOLDER
    python -m antiphon.tools.bench.make_models ctranslate2 ORIGIN FOLDER

`random` writes FOLDER/checkpoint and FOLDER/bundle; PRESET can end with a kind of the decoder's self-attention, as in
base-ssru. `transformers` writes the same, with a checkpoint of transformers: BART of the preset's size. `cuda` writes
graphs for GPUs in bfloat16, of a shape of gpu/decoding.py. `ctranslate2` converts a checkpoint, or the weights of a
bundle, to CTranslate2 in int8. All need torch; `transformers` and `ctranslate2` also the package of their name. On an
error, prints the reason to standard error in one line and exits with 2.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import ModelError
from antiphon.export.export import export_bundle
from antiphon.export.unpacking import unpack_checkpoint
from antiphon.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from antiphon.transformer.layers import DecoderLayer
from antiphon.transformer.transformer import Transformer

VOCAB_SIZE = 32_000
MAX_LEN = 256
# Of models that differ in the decoder's self-attention.
_LONG_LEN = 1024
_SEED = 1
# Factor on the decoder's matrices: small enough that the last token still influences the hidden state six layers later.
_GAIN = 0.25


def main() -> int:
    """Make the model that the arguments name. Return 0 when its folder is complete."""
    kind, origin, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    torch.set_num_threads(1)
    try:
        _MAKERS[kind](origin, work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    except (ModelError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def random_model(config: ModelConfig) -> Transformer:
    """Return a model with seeded random weights whose greedy targets never end and do not repeat one token.

    With tied embeddings a random model repeats its input token, because the hidden state is closest to that token's
    embedding. Random signs in the last norm select another token, which depends on the context. The embedding of the
    end token is almost zero, so its logit is too, and the best of all other logits is higher.
    """
    torch.manual_seed(_SEED)
    model = Transformer(config).eval()
    assert model.decoder is not None
    last = model.decoder.layers[-1]
    assert isinstance(last, DecoderLayer)
    norm = last.feed_forward_residual.norm.weight
    assert isinstance(norm, torch.Tensor)
    with torch.no_grad():
        norm.copy_(torch.randn_like(norm).sign())
        for name, parameter in model.decoder.layers.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(_GAIN)
            elif name.endswith("bias"):  # initially zero: an omitted bias would not change the output
                parameter.add_(0.02 * torch.randn_like(parameter))
        model.decoder.embedding.weight[config.eos_id] *= 0.01
    return model


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """Build a tokenizer of exactly vocab_size tokens without training: single bytes, pairs of bytes, then triples."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    singles = [*SPECIAL_TOKENS, *alphabet]
    merges = [*itertools.islice(_merges(alphabet), vocab_size - len(singles))]
    tokens = [*singles, *(first + last for first, last in merges)]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer.of_byte_bpe(backend)


def _merges(alphabet: Sequence[str]) -> Iterator[tuple[str, str]]:
    for length in (1, 2):
        for first in itertools.product(alphabet, repeat=length):
            yield from (("".join(first), last) for last in alphabet)


def _make_random(preset_name: str, folder: Path) -> None:
    size, _, decoder_self = preset_name.partition("-")
    vocab_size = preset(size).vocab_size if size == "nllb" else VOCAB_SIZE
    config = preset(
        size, vocab_size=vocab_size, max_source_len=MAX_LEN, max_target_len=_LONG_LEN if decoder_self else MAX_LEN,
        dropout=0.0, decoder_self=decoder_self or "attention",
    )  # fmt: skip
    path = folder / "checkpoint"
    save_checkpoint(path, config=config, weights=weights_of(random_model(config)), tokenizer=pair_tokenizer(vocab_size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch's exporter
        export_bundle(
            load_checkpoint(path), folder / "bundle", precisions=("int8",), explain=False, name=f"random-{preset_name}"
        )


def _make_transformers(preset_name: str, folder: Path) -> None:
    from transformers.models.bart.configuration_bart import BartConfig
    from transformers.models.bart.modeling_bart import BartForConditionalGeneration

    from antiphon.importer.importer import ImportOptions, import_checkpoint

    size, path = preset(preset_name), folder / "checkpoint"
    vocab_size = size.vocab_size if preset_name == "nllb" else VOCAB_SIZE
    torch.manual_seed(_SEED)
    config = BartConfig(
        vocab_size=vocab_size, d_model=size.d_model, max_position_embeddings=MAX_LEN,
        encoder_layers=size.encoder_layers, encoder_attention_heads=size.num_heads, encoder_ffn_dim=size.d_ff,
        decoder_layers=size.decoder_layers, decoder_attention_heads=size.num_heads, decoder_ffn_dim=size.d_ff,
        activation_function=size.activation, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        forced_eos_token_id=None,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(path)
    pair_tokenizer(vocab_size).save(path / "tokenizer.json")
    options = ImportOptions(
        source=str(path), target=folder / "bundle", name=f"bart-{preset_name}", precisions=("int8",), explain=False,
        verify=False, licence="none", attribution="random weights",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch's exporter
        import_checkpoint(options)


def _make_ctranslate2(origin: str, folder: Path) -> None:
    from antiphon.tools.bench.ctranslate2_conversion import save_ctranslate2_model

    path = Path(origin)
    is_bundle = (path / MANIFEST_NAME).is_file()
    checkpoint = unpack_checkpoint(load_bundle(path)) if is_bundle else load_checkpoint(path)
    save_ctranslate2_model(checkpoint, folder, quantization="int8")


def _make_cuda(shape: str, folder: Path) -> None:
    from antiphon.tools.bench.gpu.decoding import random_bundle

    random_bundle(shape, ("bfloat16",), ("cuda",), folder)


_MAKERS = {
    "random": _make_random, "transformers": _make_transformers, "cuda": _make_cuda, "ctranslate2": _make_ctranslate2,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
