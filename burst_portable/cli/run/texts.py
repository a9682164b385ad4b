"""Load texts that the command line names, as tokens, and divide them into batches."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from burst_portable.errors import InputError, in_a_line

_LARGEST_TEXT = 1 << 30  # bytes: every rank has it in memory


def tokens_of(text: str | None, checkpoint: Path | None) -> tuple[Tensor, str]:
    """Return all tokens of a text, int64 ``[n]``, and a description.

    The text is a file, or for None the English text of Python's `pydoc_data.topics`. Bytes are tokens unless the folder
    `checkpoint` has a tokenizer.json.

    Raises:
        InputError: If the file is missing, empty, too large or unreadable, or the tokenizer is malformed.
    """
    content, name = _content(text)
    tokenizer = checkpoint / "tokenizer.json" if checkpoint else None
    if tokenizer is not None and tokenizer.is_file():
        return _tokenized(content, tokenizer), f"{name}, tokenizer of the checkpoint"
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long(), f"{name}, bytes as tokens"


def _content(text: str | None) -> tuple[bytes, str]:
    if text is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n".join(topics[name] for name in sorted(topics)).encode(), "help texts of Python"
    path = Path(text)
    try:
        if not text or not path.exists():
            raise InputError("the text does not exist", got=repr(text), next_step="pass the path of a file to --text")
        size = path.stat().st_size
        if not path.is_file() or not 1 <= size <= _LARGEST_TEXT:
            kind = "a folder" if path.is_dir() else f"{size:,} bytes" if path.is_file() else "not a regular file"
            allowed = f"a file of 1 to {_LARGEST_TEXT:,} bytes"
            raise InputError(f"the text {text} cannot be used", got=kind, allowed=allowed)
        return path.read_bytes(), path.name
    except OSError as error:
        raise InputError(f"the text {text} cannot be read", got=error.strerror) from error


def _tokenized(content: bytes, tokenizer: Path) -> Tensor:
    from tokenizers import Tokenizer

    try:
        ids = Tokenizer.from_file(str(tokenizer)).encode(content.decode("utf-8", "replace")).ids
        return torch.tensor(ids, dtype=torch.int64)
    # The library raises plain exceptions.
    except Exception as error:
        raise InputError(f"{tokenizer} is not a tokenizer", got=in_a_line(error)) from error


def check_tokens(tokens: Tensor, seq_len: int, vocabulary: int) -> None:
    """Raise `InputError` if a text is shorter than a sequence, or has tokens outside the vocabulary."""
    if tokens.numel() < seq_len:
        raise InputError(
            "the text is shorter than one sequence",
            got=f"{tokens.numel()} tokens",
            allowed=f"at least --seq-len {seq_len}",
            next_step="use a longer file as --text",
        )
    if (largest := int(tokens.max())) >= vocabulary:
        raise InputError(
            "the text has tokens outside the model's vocabulary",
            got=f"token {largest}",
            allowed=f"below its vocab_size {vocabulary}",
        )


def batches(tokens: Tensor, seq_len: int, batch: int, steps: int) -> Iterator[Tensor]:
    """Yield `steps` batches ``[B, N]`` of successive sequences. After the last sequence the first one follows."""
    sequences = tokens[: tokens.numel() // seq_len * seq_len].view(-1, seq_len)
    return (sequences[torch.arange(i * batch, (i + 1) * batch) % sequences.shape[0]] for i in range(steps))
