"""How good translations are: BLEU, where references are known."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.service.tools.bench.report import BenchError
from antiphon.service.tools.bench.sources import Corpus


def bleu(hypotheses: Sequence[str], corpus: Corpus) -> float:
    """sacreBLEU of translations of all the corpus's sentences, in its order. Raises BenchError without sacreBLEU."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise BenchError("BLEU needs sacrebleu, which is not installed; run: pip install sacrebleu") from None
    assert corpus.references is not None
    score = BLEU(tokenize="none" if corpus.is_tokenised else "13a", force=corpus.is_tokenised)
    return float(score.corpus_score(list(hypotheses), [list(corpus.references)]).score)
