"""Text as tokens, cut into sequences."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from burst_portable.errors import InputError, explain, in_a_line

_LARGEST = 1 << 30  # bytes of a text: every rank holds it in memory


def tokens_of(text: str | None, checkpoint: Path | None) -> tuple[Tensor, str]:
    """All tokens of a text, int64 ``[n]``, and what they are.

    Args:
        text: a file of any kind; None takes the English text that comes with Python (`pydoc_data.topics`).
        checkpoint: a folder whose tokenizer.json is used if it has one; bytes are tokens otherwise.

    Raises:
        InputError: a file that is missing, empty, too large or unreadable; a tokenizer that is malformed.
    """
    content, name = _content(text)
    tokenizer = checkpoint / "tokenizer.json" if checkpoint else None
    if tokenizer is not None and tokenizer.is_file():
        return _tokenized(content, tokenizer), f"{name}, tokenizer of the checkpoint"
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long(), f"{name}, bytes as tokens"


def _content(text: str | None) -> tuple[bytes, str]:
    if text is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n".join(topics[name] for name in sorted(topics)).encode(), "the help texts that come with Python"
    path = Path(text)
    try:
        if not text or not path.exists():
            raise InputError(explain("the text is not there", got=repr(text), next_step="--text takes a file's path"))
        size = path.stat().st_size
        if not path.is_file() or not 1 <= size <= _LARGEST:
            kind = "a folder" if path.is_dir() else f"{size:,} bytes" if path.is_file() else "no regular file"
            allowed = f"a file of 1 to {_LARGEST:,} bytes"
            raise InputError(explain(f"the text {text} cannot be used", got=kind, allowed=allowed))
        return path.read_bytes(), path.name
    except OSError as error:
        raise InputError(explain(f"the text {text} cannot be read", got=error.strerror)) from error


def _tokenized(content: bytes, tokenizer: Path) -> Tensor:
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(tokenizer))
        return torch.tensor(made.encode(content.decode("utf-8", "replace")).ids, dtype=torch.int64)
    # The library raises plain Exceptions of its own.
    except Exception as error:
        raise InputError(explain(f"{tokenizer} is not a tokenizer", got=in_a_line(error))) from error


def check_tokens(tokens: Tensor, seq_len: int, vocabulary: int) -> None:
    """Refuse a text that holds no whole sequence, or tokens that the model does not have."""
    if tokens.numel() < seq_len:
        raise InputError(
            explain(
                "the text is shorter than one sequence",
                got=f"{tokens.numel()} tokens",
                allowed=f"at least --seq-len {seq_len}",
                next_step="name a longer one with --text",
            )
        )
    if (largest := int(tokens.max())) >= vocabulary:
        raise InputError(
            explain(
                "the text has tokens that the model does not know",
                got=f"token {largest}",
                allowed=f"below its vocab_size {vocabulary}",
            )
        )


def batches(tokens: Tensor, seq_len: int, batch: int, steps: int) -> Iterator[Tensor]:
    """`steps` batches ``[B, N]`` of whole sequences, one after the other, from the start again at the end."""
    whole = tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len)
    return (whole[torch.arange(i * batch, (i + 1) * batch) % whole.shape[0]] for i in range(steps))
