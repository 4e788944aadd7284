"""Benchmarks: the adapter to lm-evaluation-harness, which has to be installed: pip install 'minilooped[eval]'.

    model, tokenizer = load_model("gpt2-small-loop")
    tasks = load_tasks(["loom"])                       # names of the harness, or of GROUPS
    rows = [row for n_loop in (1, 3) for row in scores(LoopedLM(model, tokenizer, n_loop), tasks)]
    print(table(rows))

The harness asks a model for three things: the log-likelihood of a continuation, that of a whole text, and a text that
goes on. All else, from the data to the metric, is its own, so that the numbers can stand beside those of others.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from ..data import Tokenizer
from ..files import in_a_line
from ..model import LoopedGPT, at_least_float32, evaluating

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"this needs lm-evaluation-harness ({error}): pip install 'minilooped[eval]'") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.tasks.manager import TaskDict

# Several tasks under one name. "loom": the zero-shot suite of LOOM, arXiv 2610.01153.
GROUPS = {"loom": ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande", "social_iqa")}
MAX_GEN_TOKS = 256  # where a task sets no length of its own; the harness's number
STOP_EVERY = 16  # tokens between two looks for a stop string


# ----------------------------------------------------------------------------------------------------------------------
# The model as the harness sees it


class LoopedLM(TemplateLM):
    """A model and its tokenizer as the harness wants them: text in, log-likelihoods (nats) or text out.

    n_loop: loops per token, None: as many as the model was made for. batch_size: rows per forward pass. Computes in the
    model's precision, or float32 if that is lower. ValueError for an n_loop below 1.
    """

    def __init__(self, model: LoopedGPT, tokenizer: Tokenizer, n_loop: int | None = None, batch_size: int = 16):
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.n_loop = model.loop_count(n_loop)
        self.block_size = model.config.block_size
        self._device = model.wte.weight.device
        # Byte pairs have a token that ends a document. Characters have none.
        self.end = tokenizer.end

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a document; None: there is none."""
        return self.end

    @property
    def prefix_token_id(self) -> int:
        """What a text without context begins behind: an end, or where there is none the tokenizer's `opening`."""
        return int(self.tokenizer.encode(self.tokenizer.opening)[0]) if self.end is None else self.end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without special tokens. ValueError for a character that the tokenizer does not know."""
        try:
            return self.tokenizer.encode(string).tolist()
        except ValueError as error:
            raise ValueError(f"the model cannot read the task's text {string[:60]!r}...: {error}") from error

    # -- log-likelihoods -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-likelihood, and whether greedy decoding gives it.

        The pair is tokenized as one text, spaces at the end of the context going to the continuation.
        """
        rows = []
        for context, continuation in (request.args for request in requests):
            before, ids = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            if not ids:
                raise ValueError(
                    f"the continuation {continuation!r} has no token of its own behind {context[-20:]!r}, so it cannot "
                    "be scored: let the task put a space between them (target_delimiter)"
                )
            rows.append(((context, continuation), before, ids))
        return self._loglikelihood_tokens(rows, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text. One longer than a window is cut as the harness cuts it."""
        rows: list[Any] = [
            (("", text), [], self.tok_encode(text)) for (text,) in (request.args for request in requests)
        ]
        return [total for total, _ in self._loglikelihood_tokens(rows, disable_tqdm=disable_tqdm)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The same for ids: of each request, only the continuation's count. An empty context is the prefix token."""
        rows, n_cut = [], 0
        for number, (_, context, continuation) in enumerate(requests):
            context = context or [self.prefix_token_id]
            pieces = windows(context, continuation, self.block_size)
            n_cut += bool(pieces) and len(pieces[0][0]) < len(context)
            rows += [(number, *piece) for piece in pieces]
        self._say_cut(n_cut, len(requests))

        # Rows of about one length together: little padding. The longest first: what does not fit fails at once.
        rows.sort(key=lambda row: len(row[1]) + len(row[2]), reverse=True)
        answers = [(0.0, True)] * len(requests)
        with self._progress("log-likelihoods", len(rows), disable_tqdm) as bar:
            for batch in batches(rows, self.batch_size):
                scored = self._score([(context, continuation) for _, context, continuation in batch])
                for (number, _, _), (total, greedy) in zip(batch, scored, strict=True):
                    answers[number] = answers[number][0] + total, answers[number][1] and greedy
                bar.update(len(batch))
        return answers

    @torch.no_grad()
    def _score(self, rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        """One forward pass over (context, continuation) rows of at most block_size + 1 ids each."""
        shape = len(rows), max(len(context) + len(continuation) for context, continuation in rows) - 1
        idx, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -100)  # (B, T), padded on the right
        for row, (context, continuation) in enumerate(rows):
            ids, first = torch.tensor(context + continuation), len(context) - 1
            idx[row, : len(ids) - 1] = ids[:-1]
            targets[row, first : len(ids) - 1] = ids[len(context) :]
        idx, targets = idx.to(self.device), targets.to(self.device)
        with evaluating(self.model):
            logits = at_least_float32(self.model(idx, n_loop=self.n_loop)[0])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(shape)  # 0 where ignored
        greedy = ((logits.argmax(dim=-1) == targets) | (targets == -100)).all(dim=1)  # (B,)
        return zip((-loss.cpu().double().sum(dim=1)).tolist(), greedy.tolist(), strict=True)

    # -- text ----------------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first stop string (left out) or max_gen_toks tokens. Greedy, unless the
        task samples (temperature, top_k).

        Rows of a batch have equal lengths, since the model knows no padding. Past block_size the window slides.
        """
        rows, n_cut = [], 0
        for number, (context, options) in enumerate(request.args for request in requests):
            ids = self.tok_encode(context) or [self.prefix_token_id]
            n_cut += len(ids) > self.block_size
            rows.append((number, ids[-self.block_size :], normalize_gen_kwargs(options, MAX_GEN_TOKS)))
        self._say_cut(n_cut, len(requests))

        def kind(row: tuple[int, list[int], dict[str, Any]]) -> tuple[int, str]:
            return -len(row[1]), json.dumps(row[2], sort_keys=True)

        answers = [""] * len(requests)
        generator = torch.Generator(device=self.device).manual_seed(DEFAULT_OTHER_SEED)
        with self._progress("texts", len(rows), disable_tqdm) as bar:
            for _, alike in groupby(sorted(rows, key=kind), key=kind):
                for batch in batches(list(alike), self.batch_size):
                    idx = torch.tensor([ids for _, ids, _ in batch], device=self.device)  # (B, T)
                    for (number, _, _), text in zip(batch, self._continue(idx, batch[0][2], generator), strict=True):
                        answers[number] = text
                    bar.update(len(batch))
        return answers

    def _continue(self, idx: Tensor, options: dict[str, Any], generator: torch.Generator) -> list[str]:
        """Continue idx (B, T) until every row has a stop string or its tokens are used up."""
        end = None if self.end is None else self.tokenizer.decode([self.end])
        stops = [stop for stop in handle_stop_sequences(options["until"], eos=end) if stop]
        how: dict[str, Any] = dict(
            temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
            top_k=options.get("top_k"),
            n_loop=self.n_loop,
            generator=generator,
        )
        T, texts = idx.shape[1], [""] * len(idx)
        for left in range(options["max_gen_toks"], 0, -STOP_EVERY):
            idx = self.model.generate(idx, min(left, STOP_EVERY), **how)
            texts = [self.tokenizer.decode(row) for row in idx[:, T:].cpu()]
            if all(any(stop in text for stop in stops) for text in texts):
                break
        return [postprocess_generated_text(text, stops, think_end_token=None) for text in texts]

    # -- what is said on the way ---------------------------------------------------------------------------------------

    def _progress(self, what: str, total: int, disable: bool) -> tqdm:
        return tqdm(total=total, desc=f"{what} at n_loop={self.n_loop}", disable=disable)

    def _say_cut(self, n_cut: int, n_all: int):
        if n_cut:
            tqdm.write(f"notice   {n_cut:,} of {n_all:,} contexts are cut from the left: block_size={self.block_size}")


def windows(context: list[int], continuation: list[int], block_size: int) -> list[tuple[list[int], list[int]]]:
    """Cut a row into (context, continuation) pieces of at most block_size + 1 ids; every id is predicted once.

    The context, at least one id, gives way from the left. A continuation that is longer than block_size is cut as the
    harness cuts a text, with the context's last id before it.
    """
    room = block_size + 1 - len(continuation)
    if continuation and room > 0:
        return [(context[-room:], continuation)]
    pieces = get_rolling_token_windows(continuation, context[-1], max_seq_len=block_size, context_len=1)
    return [make_disjoint_window(piece) for piece in pieces]


def batches(rows: list, size: int) -> Iterator[list]:
    """Up to `size` rows at a time."""
    return (rows[first : first + size] for first in range(0, len(rows), size))


# ----------------------------------------------------------------------------------------------------------------------
# Tasks


def load_tasks(
    names: Sequence[str], include_path: str | Path | None = None, num_fewshot: int | None = None
) -> "TaskDict":
    """The tasks of these names, with their data, which the harness may have to download.

    names: tasks and groups of the harness, of GROUPS, or of the YAML files in the folder `include_path`, whose Python
    functions run too. num_fewshot: solved examples before each question; None: as many as the task says, else none.
    ValueError for a name that nothing answers to, OSError where the data cannot be had.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"no folder {include_path}: --include-path takes one with the YAML files of your tasks")
    names = list(chain.from_iterable(GROUPS.get(name, (name,)) for name in names))
    manager = None if include_path is None else TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include_path)  # with the harness's own: thousands of files, some seconds
    for name in names:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, [*GROUPS, *manager.all_tasks])
            hint = f" (do you mean {' or '.join(close)}?)" if close else ""
            raise ValueError(
                f"no task {name!r}{hint}: `lm-eval ls tasks` lists those of the harness, --include-path takes a folder "
                "of your own"
            )
    try:
        tasks = manager.load(names)
    except Exception as error:  # of the hub, the network, a file format or a task's own code: they share no base class
        raise OSError(
            f"these tasks cannot be loaded ({in_a_line(error)}): data of the harness's own tasks takes a network once, "
            "tasks of your own (--include-path) take none"
        ) from error
    for name, task in tasks["tasks"].items():
        own = task.get_config("num_fewshot")
        if own == 0 and num_fewshot:
            print(f"notice   {name} is zero-shot by its own definition, and stays so")
        else:
            task.set_config(key="num_fewshot", value=(own or 0) if num_fewshot is None else num_fewshot)
    return tasks


class Score(NamedTuple):
    """One number of the table."""

    task: str
    metric: str  # as the harness names it: "acc,none" is accuracy, the answers taken without a filter
    n_loop: int
    value: float
    stderr: float | None  # None: the harness has none for this metric
    num_fewshot: int | None  # None: of a group whose tasks differ
    samples: int | None  # documents scored; None: of a group


def scores(lm: LoopedLM, tasks: "TaskDict", limit: int | None = None) -> list[Score]:
    """Score a model. limit: only the first so many documents of each task, to try things out."""
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # each call shows the same examples
    result = evaluate(lm, tasks, limit=limit, log_samples=False)
    rows = []
    for task, values in result["results"].items():
        for key, value in values.items():
            metric, _, answer_filter = key.partition(",")
            if answer_filter and not metric.endswith("_stderr"):
                stderr = values.get(f"{metric}_stderr,{answer_filter}")
                stderr = stderr if isinstance(stderr, float) else None  # the harness writes "N/A"
                samples = result["n-samples"].get(task, {}).get("effective")
                rows.append(Score(task, key, lm.n_loop, value, stderr, result["n-shot"].get(task), samples))
    return rows


def table(rows: Sequence[Score]) -> str:
    """Scores as text: a line per task and metric, a column per loop count, each value with its standard error."""
    loops = list(dict.fromkeys(row.n_loop for row in rows))
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
        lines.setdefault((row.task, row.metric.removesuffix(",none")), {})[row.n_loop] = f"{row.value:.4f}{error}"
    head = ("task", "metric", *(f"n_loop={n_loop}" for n_loop in loops))
    body = [(*line, *(values.get(n_loop, "") for n_loop in loops)) for line, values in lines.items()]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (head, *body))
