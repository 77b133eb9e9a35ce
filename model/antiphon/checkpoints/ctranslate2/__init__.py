"""Directories of CTranslate2: variables, vocabularies, and loading into our model."""
