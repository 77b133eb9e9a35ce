"""Makes the models that a benchmark compares, in a process of its own: torch never enters the one that measures.

    python -m antiphon.service.tools.bench.make random PRESET FOLDER         FOLDER/checkpoint and FOLDER/bundle
    python -m antiphon.service.tools.bench.make twin CHECKPOINT FOLDER       CTranslate2's form of a checkpoint, int8

Needs torch, and CTranslate2 for a twin. Says on standard error what is in the way, in one line, and exits with 2.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from antiphon.model.bundle.manifest import BundleError
from antiphon.model.checkpoints.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, weights_of
from antiphon.model.config import ModelConfig, preset
from antiphon.model.export.contrib_lowering import LoweringError
from antiphon.model.export.export import ExportError, export_bundle
from antiphon.model.export.verify import VerificationError
from antiphon.model.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from antiphon.model.transformer.layers import DecoderLayer
from antiphon.model.transformer.transformer import Transformer

VOCAB_SIZE = 32_000
MAX_LEN = 256
_SEED = 1
# Of the decoder's products: small enough that the token fed last still shows in the hidden state six layers on.
_GAIN = 0.25


def main() -> int:
    """Make what the arguments ask for; 0 when it lies there whole."""
    kind, origin, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    torch.set_num_threads(1)
    try:
        (_make_random if kind == "random" else _make_twin)(origin, work)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    except (BundleError, CheckpointError, ExportError, LoweringError, VerificationError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def random_model(config: ModelConfig) -> Transformer:
    """Seeded random weights whose greedy targets never end and do not settle on one token.

    With tied embeddings a random model repeats the token it was fed: its own embedding is what the hidden state
    resembles most. Random signs in the last norm send it to another one, which context decides. The end token's
    embedding is next to zero, so its logit is, and the best of all others is above.
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
            elif name.endswith("bias"):  # zero as they come: one that is left out would not show
                parameter.add_(0.02 * torch.randn_like(parameter))
        model.decoder.embedding.weight[config.eos_id] *= 0.01
    return model


def pair_tokenizer(vocab_size: int) -> Tokenizer:
    """A vocabulary of exactly that size at once, without training: single bytes, then pairs of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    singles = [*SPECIAL_TOKENS, *alphabet]
    pairs = [(a, b) for a in alphabet for b in alphabet][: vocab_size - len(singles)]
    tokens = [*singles, *(a + b for a, b in pairs)]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer.of_byte_bpe(backend)


def _make_random(preset_name: str, folder: Path) -> None:
    config = preset(preset_name, vocab_size=VOCAB_SIZE, max_source_len=MAX_LEN, max_target_len=MAX_LEN, dropout=0.0)
    path = folder / "checkpoint"
    save_checkpoint(path, config=config, weights=weights_of(random_model(config)), tokenizer=pair_tokenizer(VOCAB_SIZE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_bundle(load_checkpoint(path), folder / "bundle", precisions=("int8",), name=f"random-{preset_name}")


def _make_twin(checkpoint: str, folder: Path) -> None:
    from antiphon.service.tools.bench.ctranslate2_model import save_twin

    save_twin(load_checkpoint(Path(checkpoint)), folder, quantization="int8")


if __name__ == "__main__":
    sys.exit(main())
