"""Makes the shipped corpus and tokenizer again, from a Debian package.

    apt-get download r-cran-janeaustenr
    python build.py r-cran-janeaustenr_1.0.0-1_all.deb DIRECTORY

Same package in, same bytes out. What is changed in the text is in README.md.
"""

import gzip
import io
import re
import struct
import sys
import tarfile
import zlib
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IN_DATABASE = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
"""The novels in the order of the R database, which is alphabetical."""
LEFT_OUT = "northangerabbey"
"""It ends with an editor's note of the twentieth century."""
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048


def data_archive(package: bytes) -> tarfile.TarFile:
    """data.tar of a Debian package, which is an `ar` archive:
    60-byte headers, members padded to even lengths."""
    position = len(b"!<arch>\n")
    while position < len(package):
        header = package[position : position + 60]
        name, size = header[:16].decode().strip(), int(header[48:58])
        position += 60
        if name.startswith("data.tar"):
            return tarfile.open(fileobj=io.BytesIO(package[position : position + size]))
        position += size + size % 2
    raise ValueError("no data.tar in the package")


def serialized_objects(database: bytes) -> list[bytes]:
    """Contents of an R .rdb file: per object its length (4 bytes) and a zlib stream."""
    objects = []
    while database:
        (length,) = struct.unpack_from(">I", database)
        stream = zlib.decompressobj()
        objects.append(stream.decompress(database[4:]))
        assert len(objects[-1]) == length, "the R database is damaged"
        database = stream.unused_data
    return objects


def character_vector(serialized: bytes) -> list[str]:
    """A character vector in R's XDR serialization, version 3 (R Internals, "Serialization Formats")."""
    assert serialized[:2] == b"X\n", "not XDR"
    version, _, _, encoding_length = struct.unpack_from(">4i", serialized, 2)
    assert version == 3, f"serialization version {version}, expected 3"
    position = 18 + encoding_length
    flags, count = struct.unpack_from(">2i", serialized, position)
    assert flags & 0xFF == 16, "not a character vector"
    position += 8
    lines = []
    for _ in range(count):
        _, length = struct.unpack_from(">2i", serialized, position)
        position += 8
        lines.append(serialized[position : position + length].decode("utf-8"))
        position += length
    assert position == len(serialized), "bytes left over"
    return lines


def clean(lines: list[str]) -> str:
    """One line per paragraph, an empty line between paragraphs; verse, which is indented, keeps its lines."""
    text = "\n".join(lines).replace("_", "")
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        parts = [" ".join(line.split()) for line in block.split("\n") if line.strip()]
        verse = any(line.startswith("  ") for line in block.split("\n"))
        if parts:
            paragraphs.append(("\n" if verse else " ").join(parts))
    return "\n\n".join(paragraphs) + "\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, and decoding gives the same text again."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def build(package: Path, target: Path) -> None:
    with data_archive(package.read_bytes()) as archive:
        member = next(name for name in archive.getnames() if name.endswith("data/Rdata.rdb"))
        database = archive.extractfile(member)
        assert database is not None
        objects = serialized_objects(database.read())
    lines = dict(zip(IN_DATABASE, map(character_vector, objects), strict=True))
    texts = {name: clean(lines[name]) for name in IN_DATABASE if name != LEFT_OUT}
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (target / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
    train_tokenizer(list(texts.values())).save_pretrained(target / "tokenizer")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
