"""Data of the examples: the windows of bytes of each step, and the held-out part."""

from __future__ import annotations

import pydoc_data.topics
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 4096  # bytes that go to the same side of the split together


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as two tensors of tokens."""

    train: Tensor
    held_out: Tensor

    @staticmethod
    def load(path: Path | None, context: int) -> Corpus:
        """Read ``path``, or the language reference that comes with Python, and split it.

        About a tenth is held out: the chunks whose checksum says so, whoever asks.
        """
        text = path.read_bytes() if path else _language_reference()
        chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
        is_held_out = [zlib.crc32(chunk) % 10 == 0 for chunk in chunks]
        if not any(is_held_out):  # a short text
            is_held_out[-1] = True
        train = [c for c, held_out in zip(chunks, is_held_out, strict=True) if not held_out]
        held_out = [c for c, held_out in zip(chunks, is_held_out, strict=True) if held_out]
        corpus = Corpus(_tokens(train), _tokens(held_out))
        if min(len(corpus.train), len(corpus.held_out)) <= context:
            raise ValueError(
                f"a text of {len(text)} bytes is too short for a context of {context}; "
                f"give --data a text of at least {10 * CHUNK} bytes."
            )
        return corpus

    def batch(self, step: int, *, num_windows: int, context: int, seed: int) -> Tensor:
        """Return the windows [num_windows, context + 1] of one step, of all ranks together.

        They depend on ``seed`` and ``step`` alone: not on the ranks, nor on the steps before, so
        a resumed run goes on where the other one would have.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (num_windows,), generator=generator)
        return self.train[starts[:, None] + torch.arange(context + 1)]

    def held_out_windows(self, context: int) -> Tensor:
        """Return all of the held-out text, as windows [count, context + 1] side by side."""
        return self.held_out.unfold(0, context + 1, context)


def _language_reference() -> bytes:
    topics = pydoc_data.topics.topics
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    # Topics repeat paragraphs of each other; one that is held out must not be trained on.
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def _tokens(chunks: list[bytes]) -> Tensor:
    return torch.tensor(list(b"".join(chunks)), dtype=torch.long)
