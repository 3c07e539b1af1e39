"""Text to token numbers: byte-level BPE, or raw bytes as a BPE without merges. Both are one ``tokenizer.json``.

Training and batch encoding start threads that a fork does not survive; both belong in the child process of
:mod:`dynatrain.data.prepare`. Loading a file, and encoding or decoding one text at a time, start none.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dynatrain.config.own import TOKENIZER
from dynatrain.data.corpus import DataError
from dynatrain.observe.objects import ObjectError, read_object

SETTINGS = "tokenizer_config.json"
"""What Hugging Face keeps beside it; names the end marker as ``eos_token``."""
BESIDE = (SETTINGS, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""What a folder with a tokenizer may have of it besides."""
END = "<|endoftext|>"
"""Follows every document, where a tokenizer's settings name nothing else. As a text it has no special meaning."""
SMALLEST_VOCABULARY = 257
"""All bytes and the end marker."""
_TRAINED_CHARACTERS = 4_000_000
"""Text that the merges are learnt from: about a second on two cores; more text hardly changes 4,096 entries."""
_BATCH = 64


def train_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries (fewer where the text has no more pairs to merge).

    Learns from the same leading share of every text, 4 million characters at most. The same texts give the same
    tokenizer. Starts threads.

    Raises:
        DataError: ``vocab_size`` leaves no room for all bytes and the end marker.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            "the tokenizer cannot be trained",
            (f"vocab_size is {vocab_size}; at least {SMALLEST_VOCABULARY}: 256 bytes and the end marker",),
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_shortened(texts, _TRAINED_CHARACTERS), trainer)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Raw bytes: token ``b`` is byte ``b``, token 256 the end marker."""
    letters = _letters_of_bytes()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``.

    Raises:
        DataError: the file is missing, is no tokenizer, or has no end marker.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise DataError("the tokenizer cannot be loaded", (f"{path}: {error}",)) from None
    # A file remembers what somebody's last call asked for; documents are whole, and nothing is put between them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = end_marker(path)
    if tokenizer.token_to_id(end) is None:
        rule = f"{path}: has no token {end}, which ends a document; {SETTINGS} beside it may name another as eos_token"
        raise DataError("the tokenizer cannot be used", (rule,))
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> int:
    """What every token is below; more than there are entries where their numbers have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def end_marker(path: Path) -> str:
    """The text of the token that ends a document: what the settings beside a ``tokenizer.json`` name, else ours.

    Raises:
        DataError: the settings cannot be read.
    """
    settings = path.parent / SETTINGS
    try:
        marker = read_object(settings).get("eos_token")
    except FileNotFoundError:
        return END
    except ObjectError as error:
        raise DataError("the tokenizer cannot be used", (str(error),)) from None
    marker = marker.get("content") if isinstance(marker, dict) else marker
    return marker if isinstance(marker, str) and marker else END


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a ``tokenizer.json``, and what belongs to it and lies beside it, into a folder."""
    shutil.copyfile(source, folder / TOKENIZER)
    for name in BESIDE:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, folder / name)


def encode(tokenizer: Tokenizer, texts: Sequence[str], marker: str = END) -> Iterator[NDArray[np.uint32]]:
    """The tokens of each text, each with the end marker behind it. Starts threads."""
    tokenizer.encode_special_tokens = True  # a text that spells the end marker does not end there
    end = tokenizer.token_to_id(marker)
    for start in range(0, len(texts), _BATCH):
        for encoding in tokenizer.encode_batch_fast(list(texts[start : start + _BATCH]), add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=np.uint32)


def _shortened(texts: Sequence[str], characters: int) -> Iterator[str]:
    """The same leading share of every text, so that about ``characters`` are taken from all over the corpus."""
    total = max(characters, sum(map(len, texts)))
    return (text[: len(text) * characters // total] for text in texts)


def _letters_of_bytes() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else one from 256 up."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]
