"""Paragraphs of HTML and XML documents (DocBook, Mallard): running text only, without code, titles and menus."""

from __future__ import annotations

from html.parser import HTMLParser

_DROPPED_TAGS = """
script style pre nav header footer form h1 h2 h3 h4 h5 h6 title head address svg math button select textarea
programlisting screen synopsis literallayout cmdsynopsis funcsynopsis legalnotice info bookinfo articleinfo refmeta
refentryinfo indexterm listing code-block comment links desc citation credit
"""
_INLINE_TAGS = """
a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q rp rt ruby s samp small span
strike strong sub sup time tt u var wbr
anchor link xref ulink emphasis command filename option literal replaceable application guilabel guimenu guimenuitem
guibutton keycap keycombo keysym userinput computeroutput systemitem varname constant function parameter type classname
envar prompt quote firstterm glossterm productname trademark foreignphrase citetitle email phrase inlinegraphic
mousebutton shortcut interface menuchoice
gui guiseq key keyseq sys file cmd output input app
"""
_DROPPED = frozenset(_DROPPED_TAGS.split())
_INLINE = frozenset(_INLINE_TAGS.split())


class _Paragraphs(HTMLParser):
    """Collects the text between the borders of block elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._dropped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a paragraph at a block element; begin to drop text at an element without running text."""
        if tag in _DROPPED:
            self._dropped.append(tag)
        if tag not in _INLINE:
            self.flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """End a paragraph at an empty block element of XML."""
        if tag not in _INLINE:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        """End the paragraph of a block element, and the dropping of text that its start began."""
        if tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        if tag not in _INLINE:
            self.flush()

    def handle_data(self, data: str) -> None:
        """Add text to the current paragraph."""
        if not self._dropped:
            self._parts.append(data)

    def flush(self) -> None:
        """End the current paragraph."""
        text = " ".join("".join(self._parts).split())
        self._parts = []
        if text:
            self.paragraphs.append(text)


def paragraphs_of(markup: str) -> list[str]:
    """Return the paragraphs of a document, each with single spaces. Broken markup is read as browsers do."""
    parser = _Paragraphs()
    parser.feed(markup)
    parser.close()
    parser.flush()
    return parser.paragraphs
