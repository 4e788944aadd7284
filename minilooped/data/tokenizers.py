"""Text to token ids and back: characters, GPT-2's byte pairs, or another encoding of tiktoken.

Nothing here touches the network, unless a tiktoken encoding other than GPT-2's is asked for.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    import tiktoken

CHUNK = 100_000  # characters that CharTokenizer encodes at a time

EMBEDDED_SHA256 = {
    "shakespeare.txt": "6aacfa576971da2edcb10579bb6ae7f2b7507c963dfb9a4a402b98813fe43fc4",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def embedded(name: str) -> Path:
    """Path of an embedded file: ``"shakespeare.txt"`` or ``"vocab.bpe"``."""
    package = Path(__file__).parents[1]
    # An installed wheel carries the files inside the package, a checkout keeps them in data/.
    for folder in (package / "embedded", package.parent / "data"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"the embedded file {name!r} is missing: install minilooped again")


def storage_dtype(vocab_size: int) -> str:
    """The type that ids are stored in: two bytes where the vocabulary allows it, else four."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class Tokenizer(ABC):
    """Text to ids and back. Tokenizers with equal hashes give the same ids for every text."""

    name: str  # "char", or the name of a tiktoken encoding
    vocab_size: int

    @property
    @abstractmethod
    def hash(self) -> str:
        """sha256 (hex) of all that defines the ids."""

    @abstractmethod
    def pack(self, text: str) -> np.ndarray:
        """Text -> ids, shape (T,), in the type that they are stored in. Takes a few times the memory of the text."""

    def encode(self, text: str) -> np.ndarray:
        """Text -> int64 ids, shape (T,). ``ValueError`` for a character that is not in the vocabulary."""
        return self.pack(text).astype(np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray | Tensor) -> str:
        """Ids, shape (T,) -> text. ``ValueError`` for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        check_ids(ids, self.vocab_size)
        return self._decode(ids.tolist())

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @property
    def end(self) -> int | None:
        """The id that closes a document in prepared data. None: the tokenizer has no such id."""
        return None

    @property
    def opening(self) -> str:
        """The prompt where none is given: a line break, or the first character where the vocabulary has no breaks."""
        return "\n"

    def spec(self) -> dict[str, Any]:
        """All that :func:`tokenizer_from_spec` needs to rebuild this tokenizer. It can be written as JSON."""
        return {"name": self.name, "hash": self.hash}


# The fields of a spec, for `files.read_json`.
SPEC = {"name": str, "hash": str, "chars": str | None}


class CharTokenizer(Tokenizer):
    """One id per character: its place in the sorted set of the characters of a text."""

    name = "char"

    def __init__(self, text: str) -> None:
        self.chars = "".join(sorted(set(text)))
        self.vocab_size = len(self.chars)

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(_code_points(self.chars).tobytes()).hexdigest()

    @cached_property
    def _id_of(self) -> np.ndarray:
        """Ids by code point, -1 for a character that is not in the vocabulary. The last entry is -1."""
        codes = _code_points(self.chars)
        table = np.full(int(codes.max(initial=0)) + 2, -1, dtype=np.int32)
        table[codes] = np.arange(self.vocab_size)
        return table

    def pack(self, text: str) -> np.ndarray:
        packed = np.empty(len(text), storage_dtype(self.vocab_size))
        for start in range(0, len(text), CHUNK):
            codes = _code_points(text[start : start + CHUNK])
            ids = self._id_of[np.minimum(codes, len(self._id_of) - 1)]
            if ids.min() < 0:
                position = start + int(np.argmin(ids))
                raise ValueError(
                    f"the character {text[position]!r} at position {position} is not one of the {self.vocab_size} that "
                    "this tokenizer knows: take it out, or use 'gpt2' or a tokenizer made from a text that has it"
                )
            packed[start : start + len(ids)] = ids
        return packed

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    @property
    def opening(self) -> str:
        return "\n" if "\n" in self.chars else self.chars[0]

    def spec(self) -> dict[str, Any]:
        return super().spec() | {"chars": self.chars}


class BPETokenizer(Tokenizer):
    """A tiktoken encoding. GPT-2's is built from the embedded merges; any other one is downloaded once by tiktoken.

    The text of a special token, such as ``<|endoftext|>``, is encoded as ordinary text.
    """

    def __init__(self, name: str = "gpt2") -> None:
        self.name = name
        self.encoding = _gpt2_encoding() if name == "gpt2" else _downloaded_encoding(name)
        self.vocab_size = self.encoding.n_vocab

    @property
    def hash(self) -> str:
        return _encoding_hash(self.name, self.encoding)

    def pack(self, text: str) -> np.ndarray:
        try:  # as encode_ordinary, but without a Python list, which would take ten times the memory
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair, which tiktoken's other methods replace too
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(storage_dtype(self.vocab_size))

    @property
    def end(self) -> int | None:
        try:
            return self.encoding.eot_token
        except KeyError:
            return None

    def _decode(self, ids: list[int]) -> str:
        try:
            return self.encoding.decode(ids)
        except KeyError as error:  # one of the unused ids
            raise ValueError(f"the tokenizer {self.name!r} has no token for one of these ids ({error})") from error


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


@cache
def _encoding_hash(name: str, encoding: "tiktoken.Encoding") -> str:
    digest = hashlib.sha256(name.encode("utf-8"))
    for token in range(encoding.n_vocab):
        try:
            content = encoding.decode_single_token_bytes(token)
        except KeyError:  # some encodings leave ids unused
            content = b""
        digest.update(len(content).to_bytes(4, "little") + content)
    return digest.hexdigest()


@cache  # to build it takes a third of a second
def _gpt2_encoding() -> "tiktoken.Encoding":
    """GPT-2's byte-pair encoding, from its list of merges alone: the 256 bytes come first, then one token per merge."""
    import tiktoken

    content = embedded("vocab.bpe").read_bytes()
    if hashlib.sha256(content).hexdigest() != EMBEDDED_SHA256["vocab.bpe"]:
        raise ValueError(f"{embedded('vocab.bpe')} is damaged (wrong sha256): install minilooped again")
    # The file spells each byte as one visible character: printable bytes as themselves, the others from chr(256) on.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokens = [bytes([byte]) for byte in visible + hidden]
    _version, *merges = content.decode("utf-8").splitlines()
    tokens += [bytes(byte_of[char] for char in merge.replace(" ", "")) for merge in merges]
    return tiktoken.Encoding(
        "gpt2",
        # Where merges may not cross: contractions; runs of letters, digits, or other signs, each with the space before;
        # white space, whose last character is left to the word that follows.
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )


def _downloaded_encoding(name: str) -> "tiktoken.Encoding":
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        others = ", ".join(sorted(set(tiktoken.list_encoding_names()) - {"gpt2"}))
        raise ValueError(
            f"unknown tokenizer {name!r}: choose 'char', 'gpt2', or one that is downloaded once ({others})"
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # what requests raises is an OSError too
        raise ConnectionError(
            f"the tokenizer {name!r} has to be downloaded and that failed ({type(error).__name__}): go online once, "
            "set TIKTOKEN_CACHE_DIR to a folder that already holds it, or use 'gpt2' or 'char', which need no network"
        ) from error


def make_tokenizer(name: str, text: str) -> Tokenizer:
    """``"char"``: the characters of `text`; ``"gpt2"``, or another tiktoken encoding: the same for every text."""
    return CharTokenizer(text) if name == "char" else BPETokenizer(name)


def tokenizer_from_spec(spec: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose :meth:`Tokenizer.spec` this is. ``ValueError`` if it can't be rebuilt exactly."""
    tokenizer = make_tokenizer(spec["name"], spec.get("chars") or "")
    if tokenizer.hash != spec["hash"]:
        raise ValueError(
            f"the tokenizer {spec['name']!r} that was recorded here can't be rebuilt (hash {spec['hash'][:8]}, rebuilt "
            f"{tokenizer.hash[:8]}): the record was edited, or another version of the tokenizer made it"
        )
    return tokenizer


def check_same_tokenizer(checkpoint: Tokenizer, data: Tokenizer) -> None:
    """``ValueError`` unless a model trained with the one tokenizer can read what the other one wrote."""
    if checkpoint.hash != data.hash:
        a, b = (f"{t.name!r} ({t.vocab_size} tokens, hash {t.hash[:8]})" for t in (checkpoint, data))
        raise ValueError(
            f"the checkpoint was trained with the tokenizer {a}, the data was made with {b}: "
            "use the data that it was trained on, or train a new model"
        )


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """``ValueError`` if an id is not in ``[0, vocab_size)``."""
    if ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: another tokenizer made these ids"
        )
