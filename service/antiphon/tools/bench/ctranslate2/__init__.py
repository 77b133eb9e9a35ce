"""CTranslate2 with the same weights: the reference that `antiphon bench` compares with."""
