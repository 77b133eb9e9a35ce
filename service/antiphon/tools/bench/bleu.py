"""BLEU: quality of translations against references."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.tools.bench.report import BenchError
from antiphon.tools.bench.sources import Corpus


def bleu(hypotheses: Sequence[str], corpus: Corpus) -> float:
    """Return the sacreBLEU score of translations of all sentences of a corpus, in its order.

    Raises BenchError if sacreBLEU is not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise BenchError("BLEU needs sacrebleu, which is not installed; run: pip install sacrebleu") from None
    assert corpus.references is not None
    score = BLEU(tokenize="none" if corpus.is_tokenised else "13a", force=corpus.is_tokenised)
    return float(score.corpus_score(list(hypotheses), [list(corpus.references)]).score)
