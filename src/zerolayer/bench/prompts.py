"""Prompts of an exact number of tokens, from text that does not repeat itself, by a seed."""

from collections.abc import Awaitable, Callable
from random import Random

Tokenize = Callable[[str], Awaitable[list[int]]]

WORDS_PER_TOKEN = 1.2
"""More words than any tokenizer makes tokens of plain English; the surplus is cut."""
_WHO = ("The keeper", "A sailor", "The old captain", "Her brother", "The child", "A stranger")
_DID = ("watched", "painted", "remembered", "repaired", "counted", "followed", "lost", "drew")
_WHAT = (
    "the lamp", "a small boat", "the northern rocks", "every passing ship", "the broken clock",
    "a letter from the harbour", "the gulls above the bay", "the stairs of the tower",
)  # fmt: skip
_WHEN = (
    "before the storm came", "while the tide was low", "in the first light of morning",
    "as the fog rolled in", "long after midnight", "when nobody was looking",
)  # fmt: skip


def story(rng: Random, words: int) -> str:
    """At least `words` words of a story, one sentence after the other."""
    sentences: list[str] = []
    count = 0
    while count < words:
        number = len(sentences) + 1
        sentence = (
            f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}, "
            f"and wrote down {rng.randrange(100, 1000)} as entry {number} of the log."
        )
        sentences.append(sentence)
        count += len(sentence.split())
    return " ".join(sentences)


async def prompt_of(tokenize: Tokenize, rng: Random, tokens: int) -> list[int]:
    """Exactly `tokens` token ids of a story. Raises ValueError if the tokenizer gives fewer."""
    ids = await tokenize(story(rng, int(tokens * WORDS_PER_TOKEN) + 20))
    if len(ids) < tokens:
        raise ValueError(f"{len(ids)} tokens where {tokens} were needed")
    return ids[:tokens]
