"""Loss of a text per character and per byte, so that models with different tokens can be compared. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """Loss of the predicted tokens of a text.

    nats: summed negative log-likelihood. num_characters, num_bytes: size of the predicted tokens' text in UTF-8.
    """

    nats: float
    num_characters: int
    num_bytes: int

    @property
    def nats_per_character(self) -> float:
        """Loss per character, in nats."""
        return self.nats / max(1, self.num_characters)

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of UTF-8, in bits."""
        return self.nats / math.log(2) / max(1, self.num_bytes)


def text_loss(nats: float, predicted: bytes) -> TextLoss:
    """Return the loss of predicted UTF-8 bytes; a character counts where its first byte is."""
    num_characters = sum(byte & 0xC0 != 0x80 for byte in predicted)
    return TextLoss(nats=nats, num_characters=num_characters, num_bytes=len(predicted))
