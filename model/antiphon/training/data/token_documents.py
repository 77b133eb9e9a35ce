"""Documents as token ids in one array, because a large corpus as Python lists takes ten times the memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence


class TokenDocuments:
    """Token ids of all sentences of all documents, in their order.

    tokens: int32 ids. sentence_starts, document_starts: index of the first token of each sentence, and of the first
    sentence of each document; both end with one more entry, the total number.
    """

    def __init__(self, documents: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self.tokens = array("i")
        self.sentence_starts = array("q", [0])
        self.document_starts = array("q", [0])
        for document in documents:
            self.append(document)

    def __len__(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """Number of sentences of all documents."""
        return len(self.sentence_starts) - 1

    def append(self, document: Iterable[Sequence[int]]) -> None:
        """Add a document; sentences without tokens are left out, and so is a document without sentences."""
        for sentence in document:
            if sentence:
                self.tokens.extend(sentence)
                self.sentence_starts.append(len(self.tokens))
        if self.num_sentences > self.document_starts[-1]:
            self.document_starts.append(self.num_sentences)

    def sentences_of(self, document: int) -> range:
        """Return the indices of a document's sentences."""
        return range(self.document_starts[document], self.document_starts[document + 1])

    def document_of(self, sentence: int) -> int:
        """Return the document of a sentence."""
        return bisect_right(self.document_starts, sentence) - 1
