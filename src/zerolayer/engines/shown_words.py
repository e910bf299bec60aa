"""The operator's words for vLLM as they may be shown: status and logs are open to everybody."""

from collections.abc import Sequence

#: Flags whose values are secrets; each may have several.
SECRET_FLAGS = frozenset({"--api-key", "--hf-token"})
HIDDEN = "***"


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words with the values of secret flags hidden; their number stays."""
    shown, hide = [], False
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            hide = flag.replace("_", "-") in SECRET_FLAGS
            shown.append(f"{flag}={HIDDEN}" if hide and equals else word)
        else:
            shown.append(HIDDEN if hide else word)
    return shown
