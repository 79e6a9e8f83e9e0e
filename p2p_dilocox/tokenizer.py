"""Tokenizers by their files. Only `tokenizer.json` is read: plain data, no code."""

import json
from importlib import resources
from pathlib import Path

from p2p_dilocox.errors import DataError

__all__ = ["EMBEDDED_TOKENIZER", "end_of_document", "end_of_text_id", "tokenizer_dir", "vocabulary_size"]

EMBEDDED_TOKENIZER = "embedded"


def tokenizer_dir(name: str) -> Path:
    """Directory of the tokenizer `name` of data.tokenizer. Raises DataError if it has no tokenizer.json."""
    if name == EMBEDDED_TOKENIZER:
        return Path(str(resources.files("p2p_dilocox") / "data" / "corpus" / "tokenizer"))
    directory = Path(name)
    try:
        found = (directory / "tokenizer.json").is_file()
    except (OSError, ValueError):
        found = False
    if not found:
        raise DataError(
            f"data.tokenizer = {json.dumps(name)}: no tokenizer.json there; a directory is needed that "
            "tokenizer.save_pretrained() wrote"
        )
    return directory


def vocabulary_size(name: str) -> int:
    """Highest token id plus one: the vocabulary a model must have at least. Raises DataError."""
    file = tokenizer_dir(name) / "tokenizer.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens", [])]
        return 1 + max(int(token_id) for token_id in ids)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a tokenizer that the tokenizers library wrote ({error!r})") from error


def end_of_text_id(name: str) -> int | None:
    """Id of the token that ends a document: eos_token of tokenizer_config.json; None if it names none.

    Raises DataError if that token is not in the vocabulary, or a file cannot be read.
    """
    directory = tokenizer_dir(name)
    config_file = directory / "tokenizer_config.json"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        token = config.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        added = {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens", [])}
        return added[content] if content in added else int(tokenizer["model"]["vocab"][content])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{config_file}: its eos_token cannot be found in tokenizer.json ({error!r})"
        ) from error


def end_of_document(name: str) -> int:
    """`end_of_text_id`, where documents must be told apart. Raises DataError if there is no such token."""
    end = end_of_text_id(name)
    if end is None:
        raise DataError(
            f"data.tokenizer = {json.dumps(name)} has no end-of-text token, which tells documents apart. "
            'Name its eos_token in tokenizer_config.json, or set data.packing = "stream"'
        )
    return end
