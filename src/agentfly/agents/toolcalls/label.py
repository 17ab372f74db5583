"""Labels: the word and the colon with which lines like ``Action: …`` begin, as models write them."""

from __future__ import annotations


def label(words: str) -> str:
    """The pattern of a label: ``Action:``, numbered (``Action 1:``) or in bold (``**Action:**``, ``**Action**:``).

    Bold type that is not closed with the label is none: it would go on into what the line says.

    Args:
        words: the pattern of the words, without a group.
    """
    numbered = rf"(?:{words})(?:[ \t]+\d{{1,3}})?[ \t]*"
    return rf"(?:{numbered}:|\*\*{numbered}(?::\*\*|\*\*[ \t]*:))"
