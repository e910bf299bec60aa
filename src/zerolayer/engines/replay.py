"""Random generators of seeded requests, put where a request's tokens say that they must be."""

from typing import Any

import torch


class ReplayGenerator(torch.Generator):
    """A CPU generator that can take back a draw, by drawing again from its seed on.

    vLLM draws for each row of a step and throws the draw of an unfinished prefill away: it sets the
    generator's offset back. CPU generators have no offset, and vLLM's worker dies of asking for it;
    a seeded request with a prompt of several chunks would end every engine that it is sent to.
    """

    def __new__(cls, seed: int) -> "ReplayGenerator":
        """One for a request with this seed."""
        made: ReplayGenerator = super().__new__(cls, device="cpu")
        return made

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.state: Any = None  # the request's `CachedRequestState`, once it is there
        self.manual_seed(seed)

    def get_offset(self) -> int:
        """No position of its own: the tokens of the request are."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Go to where the next token of the request is drawn, whatever was drawn meanwhile."""
        self.manual_seed(self._seed)
        advance_generator(self, len(self.state.output_token_ids), vocabulary=0)


def advance_generator(generator: torch.Generator, draws: int, vocabulary: int) -> None:
    """Move a seeded generator on by one draw per delivered token.

    The draws repeat those of vLLM's samplers: on CPU one integer a token (`forward_cpu`), elsewhere
    one row of exponential noise over the vocabulary (`random_sample`).
    """
    on_cpu = generator.device.type == "cpu"
    noise = None if on_cpu else torch.empty(vocabulary, device=generator.device)
    for _ in range(draws):
        if noise is None:
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        else:
            noise.exponential_(generator=generator)
