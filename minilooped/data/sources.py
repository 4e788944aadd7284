"""The documents of a data set, one after another, as `datasets` reads them from the hub or the disk.

That library is an extra: it is imported when a data set is opened.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files import in_a_line, say


@dataclass(frozen=True)
class Source:
    """A data set that `datasets` can stream: from the Hugging Face hub, or a folder or file of this computer.

    Such files are parquet, JSON, CSV or text. Of a folder of text files each file is one document.
    """

    dataset: str  # name on the hub, or path
    config: str | None = None  # which part of it, where it has several
    column: str = "text"  # the only one that is read
    revision: str | None = None  # commit on the hub; None: the newest

    @property
    def local(self) -> bool:
        return Path(self.dataset).exists()


FINEWEB_EDU = Source("HuggingFaceFW/fineweb-edu", "sample-10BT")


# Tables that have a column of text, by the end of the file's name.
TABLES = {".json": "JSON", ".jsonl": "JSON lines", ".csv": "CSV", ".tsv": "TSV", ".parquet": "parquet"}


class NoColumn(ValueError):
    """The column asked for is not in the data set, or not text."""


def open_stream(source: Source) -> tuple[Any, Source]:
    """The data set, to be read in order from the hub or the disk, and the source with the revision that this is."""
    try:
        from datasets import load_dataset_builder
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(f"streaming needs the datasets library ({error}): run `pip install datasets`") from error

    path = Path(source.dataset)
    try:
        if path.is_file():
            builder = load_dataset_builder(str(path.resolve().parent), source.config, data_files=path.name)
        else:
            if source.revision is None and not source.local:
                source = replace(source, revision=HfApi().dataset_info(source.dataset).sha)
            builder = load_dataset_builder(source.dataset, source.config, revision=source.revision)
            say_what_is_left_out(builder, path)
        return one_column(builder, source), source
    except (NoColumn, MemoryError):
        raise
    except Exception as error:  # of the hub, the network or a file format: they share no base class
        advice = "check name, config and network, or name a folder of parquet or JSON files"
        if source.local:
            advice = "name a folder or a file of parquet, JSON, CSV or text that can be read"
        raise OSError(f"the data set {source.dataset!r} cannot be opened ({in_a_line(error)}): {advice}") from error


def say_what_is_left_out(builder: Any, folder: Path) -> None:
    """A notice of the files of a folder that `datasets` does not read: it takes one format, and may set some apart."""
    taken = {Path(file).resolve() for file in (builder.config.data_files or {}).get("train", [])}
    there = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in {*TABLES, ".txt"}]
    if left_out := [path for path in there if path.resolve() not in taken]:
        say(f"notice   {len(taken)} files of {folder} are read, {len(left_out)} are not, such as {left_out[0].name}")


def one_column(builder: Any, source: Source) -> Any:
    """The stream of a builder of `datasets`, of the wanted column alone. ``NoColumn`` if it is known not to be there.

    Left to itself, `datasets` settles the types of all columns by the first rows, and fails at a later row that differs
    in a column that nobody asked for.
    """
    from datasets import Features, Value

    config, column = builder.config, source.column
    if hasattr(config, "sample_by"):  # text files
        config.encoding = "utf-8-sig"
        config.sample_by = "document" if source.local else config.sample_by
        if config.sample_by != "document":
            say(f"notice   {source.dataset} is of text files: each {config.sample_by} is taken for a document")
    if hasattr(builder, "_cast_table"):  # every format that is read in tables
        builder._cast_table = lambda table, *_, **__: text_of(table, source)
    stream = builder.as_streaming_dataset(split="train")
    if hasattr(config, "columns"):  # parquet, of which the other columns need not even be read
        need_column(column, stream.column_names, source)
        config.columns = [column]
        stream = builder.as_streaming_dataset(split="train")
    if stream.info.features is not None and column in stream.info.features:
        stream.info.features = Features({column: Value("string")})  # also where the first rows have no text
    return stream


def text_of(table: Any, source: Source) -> Any:
    """The wanted column of an Arrow table, as a table of its own. ``NoColumn`` unless it is there and has text."""
    import pyarrow as pa

    need_column(source.column, table.column_names, source)
    kind = table.schema.field(source.column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise NoColumn(
            f"the column {source.column!r} of {source.dataset} holds {kind}, not text: choose another with --column"
        )
    return table.select([source.column]).cast(pa.schema([(source.column, pa.string())]))


def need_column(column: str, columns: list[str], source: Source) -> None:
    if column not in columns:
        raise NoColumn(f"{source.dataset} has no column {column!r}: choose one of {', '.join(columns)}")


def read(stream: Any, source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    """The state of the stream before a document, and its text, for every row that has one."""
    rows = iter(stream)
    while True:
        try:
            state = stream.state_dict()
            row = next(rows, None)
        except (NoColumn, MemoryError):
            raise
        except Exception as error:  # as in open_stream
            raise OSError(f"reading {source.dataset} failed ({in_a_line(error)}): {way_out(error, source)}") from error
        if row is None:
            return
        need_column(source.column, list(row), source)
        text = row[source.column]
        if not isinstance(text, str | None):
            raise NoColumn(
                f"the column {source.column!r} of {source.dataset} holds {type(text).__name__}, not text: choose "
                "another with --column"
            )
        if text:
            yield state, text


NETWORK = {"aiohttp", "fsspec", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3"}


def way_out(error: Exception, source: Source) -> str:
    """What can be done about a failure to read. To try again helps where the network failed, and nowhere else."""
    if source.local:
        return f"see whether every file there is whole and has text in its column {source.column!r}"
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in NETWORK:
        return "the same command goes on from the last shard"
    return "its files cannot be read as they are: choose another part of it (--config), or another data set"
