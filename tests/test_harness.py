"""The adapter to lm-evaluation-harness, against models whose numbers are known by hand, and the command around it."""

import json
import math
import socket
import string
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiny_runs import DENSE, LOOM, prepared, settings

from minilooped.cli import main
from minilooped.data import BPETokenizer, CharTokenizer
from minilooped.model import LoopedConfig, LoopedGPT
from minilooped.science.provenance import provenance
from minilooped.train import train

datasets = pytest.importorskip("datasets")
pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'minilooped[eval]'")

import lm_eval.tasks  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from minilooped.tools import harness  # noqa: E402
from minilooped.tools.harness import GROUPS, LoopedLM, Score, load_tasks, scores, table  # noqa: E402

LETTERS = CharTokenizer("\n :?.!" + string.ascii_lowercase)
BYTES = CharTokenizer("".join(map(chr, range(256))))
V = LETTERS.vocab_size


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No test reaches for the network, or leaves data in the user's cache."""

    def refuse(*args):
        raise AssertionError("a test reaches for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def asks(*arguments):
    """Requests as the harness makes them."""
    return [SimpleNamespace(args=one) for one in arguments]


# ----------------------------------------------------------------------------------------------------------------------
# Models


def random_model(config: LoopedConfig, vocab_size: int = V) -> LoopedGPT:
    torch.manual_seed(0)
    return LoopedGPT(replace(config, vocab_size=vocab_size)).double().eval()


def bigram(logprob: torch.Tensor, block_size: int = 8) -> LoopedGPT:
    """A model with silent branches and a one-hot stream: from token i to token j by logprob[i, j]."""
    config = LoopedConfig(
        vocab_size=V, block_size=block_size, n_layer=1, n_loop=2, n_head=1, n_embd=V, tie_embeddings=False, rule="none"
    )
    model = LoopedGPT(config).double()
    with torch.no_grad():
        for matrix in (model.blocks[0].attn.proj, model.blocks[0].mlp.w_out):
            matrix.weight.zero_()
        model.wte.weight.copy_(1e6 * torch.eye(V))  # large: the norm's epsilon then changes nothing
        model.head.weight.copy_(logprob.T / math.sqrt(V))  # the final norm makes the stream's one coordinate sqrt(V)
    return model


def alphabet(p: float = 0.9) -> torch.Tensor:
    """Log-probabilities (V, V): p from each letter to the next one, and from a line break to a; the rest shared out."""
    logprob = torch.full((V, V), math.log((1 - p) / (V - 1)), dtype=torch.float64)
    for one, other in zip("\n" + string.ascii_lowercase, string.ascii_lowercase + "a", strict=True):
        logprob[LETTERS.chars.index(one), LETTERS.chars.index(other)] = math.log(p)
    return logprob


def reference(model: LoopedGPT, context: list[int], continuation: list[int], n_loop: int | None = None):
    """One row at a time, cut from the left to the window."""
    ids = (context + continuation)[-(model.config.block_size + 1) :]
    with torch.no_grad():
        logprob = model(torch.tensor([ids[:-1]]), n_loop=n_loop)[0][0].log_softmax(dim=-1)[-len(continuation) :]
    total = sum(logprob[i, token].item() for i, token in enumerate(continuation))
    return total, logprob.argmax(dim=-1).tolist() == continuation


def rolling_reference(model: LoopedGPT, prefix: int, ids: list[int], n_loop: int | None = None) -> float:
    """Every id once: windows of block_size ids, each behind one id; a shorter last one looks further back."""
    size, total = model.config.block_size, 0.0
    for first in range(0, len(ids), size):
        window = ids[first : first + size]
        before = ids[max(0, first + len(window) - size - 1) : first]
        total += reference(model, before or [prefix], window, n_loop)[0]
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Log-likelihoods


@pytest.mark.parametrize("config", [DENSE, LOOM], ids=["dense", "loom"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_log_likelihoods_of_mixed_lengths_are_those_of_one_row_at_a_time(config, batch_size, capsys):
    model, encode = random_model(config), lambda text: LETTERS.encode(text).tolist()
    greedy = LETTERS.decode(model.generate(torch.tensor([encode("to")]), 3, temperature=0)[0, 2:])
    pairs = [
        ("to", " be"),
        ("a", "b"),
        ("or not to be that is the question", ":"),
        ("", "whether"),
        ("to", greedy),
        ("tis nobler in the mind to suffer", "the sli"),
        ("to", greedy[:-1] + "\n"),
        ("the", "slingsan"),
    ]
    expected = [reference(model, encode(context) or encode("\n"), encode(ending)) for context, ending in pairs]
    model.train()
    answers = LoopedLM(model, LETTERS, batch_size=batch_size).loglikelihood(asks(*pairs))
    assert model.training, "the mode is given back"
    assert [total for total, _ in answers] == pytest.approx([total for total, _ in expected], abs=1e-10)
    assert [flag for _, flag in answers] == [flag for _, flag in expected]
    assert answers[4][1] and not answers[6][1], "a greedy continuation, and one that leaves it at the last token"
    assert "notice   3 of 8 contexts are cut from the left: block_size=8" in capsys.readouterr().out


def test_rows_of_about_one_length_go_together_and_the_longest_first(monkeypatch):
    lm, lengths = LoopedLM(bigram(alphabet()), LETTERS, batch_size=2), []
    score = lm._score
    monkeypatch.setattr(lm, "_score", lambda rows: lengths.append([len(a + b) for a, b in rows]) or score(rows))
    lm.loglikelihood(asks(("a", "b"), ("to be", "or"), ("a", "bcd"), ("not", "to"), ("bc", "d")))
    assert lengths == [[7, 5], [4, 3], [2]]


def test_a_bigram_model_gives_the_sum_of_its_table():
    logprob = torch.randn(V, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(dim=-1)
    text = "the rest is silence."
    ids = LETTERS.encode(text)
    lm = LoopedLM(bigram(logprob), LETTERS)
    ((total, _),) = lm.loglikelihood(asks((text[:7], text[7:])))
    assert total == pytest.approx(sum(logprob[i, j].item() for i, j in zip(ids[6:], ids[7:], strict=False)), abs=1e-9)
    (whole,) = lm.loglikelihood_rolling(asks((text,)))
    first = logprob[LETTERS.chars.index("\n"), ids[0]].item()  # the first letter comes behind a line break
    assert whole == pytest.approx(
        first + sum(logprob[i, j].item() for i, j in zip(ids, ids[1:], strict=False)), abs=1e-9
    )


def test_a_context_of_spaces_and_a_continuation_longer_than_the_window():
    model = random_model(DENSE)
    lm = LoopedLM(model, LETTERS)
    line_break = LETTERS.chars.index("\n")
    long = "something is rotten in the state"
    ((spaces, _), (total, _)) = lm.loglikelihood(asks(("  ", "ab"), ("the truth: x", long)))
    assert spaces == pytest.approx(reference(model, [line_break], LETTERS.encode("  ab").tolist())[0], abs=1e-10)
    before = LETTERS.chars.index("x")  # the only part of the context for which there is room
    assert total == pytest.approx(rolling_reference(model, before, LETTERS.encode(long).tolist()), abs=1e-10)


@pytest.mark.parametrize("wrong", [None, 3, 12, 19])
def test_a_continuation_in_several_windows_is_greedy_if_all_of_it_is(wrong):
    continuation = list("bcdefghijklmnopqrstu")
    if wrong is not None:
        continuation[wrong] = "?"
    ((_, greedy),) = LoopedLM(bigram(alphabet()), LETTERS).loglikelihood(asks(("a", "".join(continuation))))
    assert greedy == (wrong is None)


@pytest.mark.parametrize("n_chars", [0, 1, 7, 8, 9, 15, 16, 17, 61])
def test_a_whole_text_counts_every_token_once(n_chars):
    model, text = random_model(DENSE), ("a little more than kin. " * 3)[:n_chars]
    (total,) = LoopedLM(model, LETTERS, batch_size=3).loglikelihood_rolling(asks((text,)))
    ids = LETTERS.encode(text).tolist()
    assert total == pytest.approx(rolling_reference(model, LETTERS.chars.index("\n"), ids), abs=1e-10)


def test_texts_of_several_windows_do_not_mix():
    model, texts = random_model(DENSE), ["to be or not to be", "ay", "", "there is the rub. " * 3]
    lm = LoopedLM(model, LETTERS, batch_size=2)
    alone = [lm.loglikelihood_rolling(asks((text,)))[0] for text in texts]
    assert lm.loglikelihood_rolling(asks(*[(text,) for text in texts])) == pytest.approx(alone, abs=1e-10)
    assert alone[2] == 0


def test_byte_pairs_are_split_as_the_harness_splits_them():
    tokenizer = BPETokenizer()
    model = random_model(replace(DENSE, n_embd=4, n_head=1), tokenizer.vocab_size)
    lm = LoopedLM(model, tokenizer)
    encode = lambda text: tokenizer.encode(text).tolist()  # noqa: E731
    moved, plain, empty = lm.loglikelihood(asks(("Answer: ", "no one"), ("Answer:", " no one"), ("", "no one")))
    assert moved == pytest.approx(plain) and plain[0] == pytest.approx(
        reference(model, encode("Answer:"), encode(" no one"))[0], abs=1e-10
    )
    assert empty[0] == pytest.approx(reference(model, [50256], encode("no one"))[0], abs=1e-10), "behind <|endoftext|>"
    with pytest.raises(ValueError, match="'s' has no token of its own behind 'the answer'.*target_delimiter"):
        lm.loglikelihood(asks(("the answer", "s")))


@pytest.mark.parametrize("config", [DENSE, LOOM], ids=["dense", "loom"])
@pytest.mark.parametrize("n_loop", [1, 3, 6])
def test_another_loop_count_is_the_models_own(config, n_loop):
    model, text = random_model(config), "to be or not to be"
    ids = LETTERS.encode(text).tolist()
    lm, default = LoopedLM(model, LETTERS, n_loop), LoopedLM(model, LETTERS)
    assert default.n_loop == config.n_loop
    ask = asks((text[:5], text[5:9]))
    ((total, _),), ((other, _),) = lm.loglikelihood(ask), default.loglikelihood(ask)
    assert total == pytest.approx(reference(model, ids[:5], ids[5:9], n_loop)[0], abs=1e-10)
    assert abs(total - other) > 1e-3
    (whole,) = lm.loglikelihood_rolling(asks((text,)))
    assert whole == pytest.approx(rolling_reference(model, LETTERS.chars.index("\n"), ids, n_loop), abs=1e-10)
    (continued,) = lm.generate_until(asks((text[:5], {"max_gen_toks": 20})))
    idx = model.generate(torch.tensor([ids[:5]]), 20, temperature=0, n_loop=n_loop)
    assert continued == LETTERS.decode(idx[0, 5:])


# ----------------------------------------------------------------------------------------------------------------------
# Text


def generate(lm: LoopedLM, *arguments) -> list[str]:
    return lm.generate_until(asks(*arguments))


def test_generation_ends_at_the_first_stop_string_or_after_its_tokens(capsys):
    cases = [
        ("abc", {"until": ["hi", "h"], "max_gen_toks": 20}, "defg"),
        ("abc", {"until": "jk", "max_gen_toks": 20}, "defghi"),  # a stop of two tokens
        ("abc", {"until": ["\n"], "max_gen_toks": 5}, "defgh"),
        ("abc", {"until": ["fgh"], "max_gen_toks": 5}, "de"),
        ("abc", {"until": ["m"], "max_gen_toks": 40}, "defghijkl"),
        ("nop", {"until": ["m"], "max_gen_toks": 40}, "qrstuvwxyzabcdefghijkl"),  # in one batch with the one above
        ("wxyz", {"until": ["."], "max_gen_toks": 30}, "abcdefghijklmnopqrstuvwxyzabcd"),  # longer than the window
        ("xx the alphabet: m", {"max_gen_toks": 2}, "no"),
        ("", {"max_gen_toks": 2}, "ab"),
        ("a", {"max_gen_toks": 0}, ""),
    ]
    texts = generate(LoopedLM(bigram(alphabet()), LETTERS), *[(context, options) for context, options, _ in cases])
    assert texts == [text for _, _, text in cases]
    assert "notice   1 of 10 contexts are cut from the left: block_size=8" in capsys.readouterr().out


def test_generation_looks_for_stop_strings_on_the_way(monkeypatch):
    """256 tokens is what tasks get that do not say how many."""
    lm, added = LoopedLM(bigram(alphabet()), LETTERS), []
    generate_more = lm.model.generate
    monkeypatch.setattr(lm.model, "generate", lambda idx, n, **how: added.append(n) or generate_more(idx, n, **how))
    assert generate(lm, ("a", {"until": ["e"]})) == ["bcd"] and sum(added) < 256
    added.clear()
    assert len(generate(lm, ("a", {"until": ["!"]}))[0]) == sum(added) == 256


def test_contexts_of_one_length_are_continued_together(monkeypatch):
    lm, shapes = LoopedLM(bigram(alphabet()), LETTERS, batch_size=2), []
    generate_more = lm.model.generate
    monkeypatch.setattr(
        lm.model, "generate", lambda idx, n, **how: shapes.append(tuple(idx.shape)) or generate_more(idx, n, **how)
    )
    short, long = {"max_gen_toks": 2}, {"max_gen_toks": 3}
    texts = generate(lm, ("ab", short), ("xyz", short), ("bc", short), ("cd", short), ("de", long), ("lmn", short))
    assert texts == ["cd", "ab", "de", "ef", "fgh", "op"]
    assert sorted(shapes) == [(1, 2), (1, 2), (2, 2), (2, 3)]


def test_a_task_that_samples_gets_samples():
    logprob = torch.full((V, V), -1e4, dtype=torch.float64)
    logprob[:, [LETTERS.chars.index("a"), LETTERS.chars.index("b")]] = math.log(0.5)
    lm = LoopedLM(bigram(logprob), LETTERS)
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    one, two = generate(lm, ("c", options), ("c", options))
    assert one != two and set(one) == {"a", "b"} == set(two)
    assert generate(lm, ("c", options), ("c", options)) == [one, two], "the same ones every time"
    (greedy,) = generate(lm, ("c", options | {"top_k": 1}))
    assert len(set(greedy)) == 1


def test_byte_pairs_end_with_the_document(monkeypatch):
    lm = LoopedLM(random_model(replace(DENSE, n_embd=4, n_head=1), 50257), BPETokenizer())
    ids = [*BPETokenizer().encode(" and so").tolist(), 50256, *BPETokenizer().encode(" it goes").tolist()]
    monkeypatch.setattr(lm.model, "generate", lambda idx, n, **how: torch.cat((idx, torch.tensor([ids])), dim=1))
    assert generate(lm, ("On", {"until": ["\n"], "max_gen_toks": 5})) == [" and so"]


# ----------------------------------------------------------------------------------------------------------------------
# Tasks of our own, through the harness

QUESTIONS = [  # the model knows the alphabet: it is right three times of four
    dict(question="abc", choices=["x", "d", "q"], answer=1),
    dict(question="what comes after lm", choices=["no", "on", "mn"], answer=0),
    dict(question="xyz", choices=["ab", "ba"], answer=0),
    dict(question="abc", choices=["d", "e"], answer=1),
]
# Behind c, "dx" has one unlikely letter like "x", but two over which to spread it: right by acc_norm only.
SPREAD = [dict(question="abc", choices=["x", "dx"], answer=1)]
PAGES = [dict(text=text) for text in ("Whether 'tis nobler", "in the mind", "to suffer\nThe slings and arrows " * 9)]
COUNT = [dict(question="abc", answer="defg"), dict(question="mn", answer="opqr"), dict(question="a", answer="bcdefg")]


def means(*metrics: str) -> list[dict]:
    return [dict(metric=metric, aggregation="mean", higher_is_better=True) for metric in metrics]


def choice(rows: list[dict]) -> tuple[list[dict], dict]:
    return rows, dict(
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=means("acc", "acc_norm"),
    )


TASKS = {
    "alphabet": choice(QUESTIONS),
    "spread": choice(SPREAD),
    "pages": (
        PAGES,
        dict(
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[dict(metric=metric) for metric in ("bits_per_byte", "byte_perplexity")],
        ),
    ),
    "count": (
        COUNT,
        dict(
            output_type="generate_until",
            doc_to_text="{{question}}",
            doc_to_target="{{answer}}",
            target_delimiter="",
            generation_kwargs=dict(until=["h"], max_gen_toks=4),
            metric_list=means("exact_match"),
        ),
    ),
}


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory) -> Path:
    """YAML and JSON, as a user would write them."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, (rows, task) in TASKS.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        files = {split: str(folder / f"{name}.jsonl") for split in ("train", "test")}
        data = dict(
            dataset_path="json", dataset_kwargs=dict(data_files=files), training_split="train", test_split="test"
        )
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(task=name) | data | task), encoding="utf-8")
    return folder


def measured(lm: LoopedLM, folder: Path, *names: str, **options) -> dict[tuple[str, str], Score]:
    rows = scores(lm, load_tasks(names, folder), **options)
    return {(row.task, row.metric.removesuffix(",none")): row for row in rows}


@pytest.mark.parametrize("n_loop", [1, 5])
def test_a_uniform_model_over_bytes_takes_8_bits_per_byte(tasks_folder, n_loop):
    config = replace(DENSE, vocab_size=256, tie_embeddings=False)
    model = LoopedGPT(config)
    torch.nn.init.zeros_(model.head.weight)
    found = measured(LoopedLM(model, BYTES, n_loop), tasks_folder, "pages")
    assert found["pages", "bits_per_byte"].value == pytest.approx(8, abs=1e-7)
    assert found["pages", "byte_perplexity"].value == pytest.approx(256, abs=1e-4)
    assert found["pages", "bits_per_byte"].samples == 3


def test_a_model_that_knows_the_alphabet_scores_what_it_must(tasks_folder):
    found = measured(LoopedLM(bigram(alphabet()), LETTERS), tasks_folder, "alphabet", "spread", "count")
    accuracy = found["alphabet", "acc"]
    assert accuracy.value == 0.75 and accuracy.stderr == pytest.approx(0.25)  # of 4 draws: sqrt(3/4 * 1/4 / (4 - 1))
    assert (accuracy.n_loop, accuracy.num_fewshot, accuracy.samples) == (2, 0, 4)
    assert (found["spread", "acc"].value, found["spread", "acc_norm"].value) == (0, 1)
    assert found["count", "exact_match"].value == pytest.approx(2 / 3)  # the third is cut by max_gen_toks
    assert (
        measured(LoopedLM(bigram(alphabet()), LETTERS), tasks_folder, "alphabet", limit=3)["alphabet", "acc"].value == 1
    )


def test_every_loop_count_gets_the_same_solved_examples(tasks_folder):
    class Recorder(LoopedLM):
        def loglikelihood(self, requests, disable_tqdm=False):
            asked.append([request.args for request in requests])
            return super().loglikelihood(requests, disable_tqdm)

    model, asked = bigram(alphabet()), []
    tasks = load_tasks(["alphabet"], tasks_folder, num_fewshot=2)
    rows = [scores(Recorder(model, LETTERS, n_loop), tasks)[0] for n_loop in (1, 4)]
    assert asked[0] == asked[1] and len(asked[0]) == 10
    assert all(context.count("\n\n") == 2 for context, _ in asked[0]), "two examples, then the question"
    assert [(row.n_loop, row.num_fewshot, row.value) for row in rows] == [(1, 2, 0.75), (4, 2, 0.75)]


def test_the_table_has_a_column_per_loop_count():
    rows = [
        Score("alphabet", "acc,none", 1, 0.25, 0.125, 0, 4),
        Score("pages", "bits_per_byte,none", 1, 8.0, None, 0, 3),
        Score("alphabet", "acc,none", 6, 0.5, 0.25, 0, 4),
        Score("pages", "bits_per_byte,none", 6, 4.0, None, 0, 3),
        Score("count", "exact_match,strict", 6, 1.0, None, 0, 3),
    ]
    assert table(rows).splitlines() == [
        "task      metric              n_loop=1         n_loop=6",
        "alphabet  acc                 0.2500 ± 0.1250  0.5000 ± 0.2500",
        "pages     bits_per_byte       8.0000           4.0000",
        "count     exact_match,strict                   1.0000",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The harness's own tasks, whose data is not here


@pytest.fixture
def looms_folders(monkeypatch):
    """As if the harness had the folders of LOOM's tasks only. To read all of them takes it many seconds."""
    own = Path(lm_eval.tasks.__file__).parent
    folders = [own / name for name in ("arc", "hellaswag", "openbookqa", "piqa", "winogrande", "siqa")]

    def manager(include_path=None, include_defaults=True):
        paths = [*(folders if include_defaults else []), *([include_path] if include_path else [])]
        return TaskManager(include_path=paths, include_defaults=False)

    monkeypatch.setattr(harness, "TaskManager", manager)
    return manager()


def test_looms_tasks_are_seven_of_the_harness(looms_folders, tasks_folder, monkeypatch):
    asked = []

    def refuse(path, *args, **options):
        asked.append(path)
        raise ConnectionError("cannot reach it")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert len(GROUPS["loom"]) == 7 and set(GROUPS["loom"]) <= set(looms_folders.all_subtasks)
    with pytest.raises(OSError, match=r"ConnectionError: cannot reach it.*takes a network once.*--include-path"):
        load_tasks(["loom"])
    with pytest.raises(OSError, match="cannot reach it"):
        load_tasks(["piqa", "spread"], tasks_folder)  # beside those of a folder
    assert asked == ["allenai/ai2_arc", "baber/piqa"]


def test_an_unknown_task_is_named_with_what_it_may_have_been(looms_folders):
    with pytest.raises(ValueError, match=r"no task 'hellaswagg' \(do you mean hellaswag.*`lm-eval ls tasks`"):
        load_tasks(["loom", "hellaswagg"])
    with pytest.raises(ValueError, match=r"no task 'loon' \(do you mean loom"):
        load_tasks(["loon"])


# ----------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a trained run of characters in it."""
    folder = tmp_path_factory.mktemp("trained")
    prepared(folder, text="abcdefghijklmnopqrstuvwxyz\n" * 40)
    train(DENSE, settings(folder, max_steps=2, threads=1))
    return folder


def command(capsys, *argv) -> tuple[int, str, str]:
    status = main(["eval", *map(str, argv)])
    return status, *capsys.readouterr()


def test_one_call_scores_a_run_at_several_loop_counts(trained, tasks_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    out = tmp_path / "new" / "scores.json"
    options = ["--n-loop", 1, 3, 3, "--tasks", "count", "spread", "--include-path", tasks_folder, "--out", out]
    status, printed, _ = command(capsys, "tiny", *options, "--device", "cpu", "--batch-size", 2)
    assert status == 0 and "task    metric       n_loop=1" in printed and f"Wrote {out}" in printed
    record = json.loads(out.read_text(encoding="utf-8"))
    assert set(provenance("")) | {"lm_eval"} == set(record["provenance"])
    assert record["provenance"]["made_by"].startswith("minilooped eval tiny --n-loop 1 3 3")
    assert record["model"]["n_loop"] == 2
    rows = [Score(**row) for row in record["scores"]]
    assert [(row.task, row.metric, row.n_loop) for row in rows] == [
        (task, metric, n_loop)
        for n_loop in (1, 3)
        for task, metric in (("count", "exact_match,none"), ("spread", "acc,none"), ("spread", "acc_norm,none"))
    ]
    assert table(rows) in printed
    before = out.read_bytes()
    status, _, err = command(capsys, "tiny", *options)
    assert status == 1 and f"{out} exists: give another file with --out" in err and out.read_bytes() == before


def test_what_is_scored_stays_when_a_later_loop_count_fails(trained, tasks_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    score = LoopedLM._score

    def fail_at_three(lm, rows):
        if lm.n_loop == 3:
            raise MemoryError("no room")
        return score(lm, rows)

    monkeypatch.setattr(LoopedLM, "_score", fail_at_three)
    out = tmp_path / "scores.json"
    options = ["--n-loop", 1, 3, "--tasks", "spread", "--include-path", tasks_folder, "--out", out]
    status, _, err = command(capsys, "tiny", *options)
    assert status == 1 and err.endswith("minilooped eval: no room\n")
    assert {row["n_loop"] for row in json.loads(out.read_text(encoding="utf-8"))["scores"]} == {1}


def test_by_default_a_run_is_scored_as_it_was_trained_and_a_limit_is_said(trained, tasks_folder, tmp_path, capsys):
    out = tmp_path / "scores.json"
    options = ["--tasks", "count", "--include-path", tasks_folder, "--limit", 1, "--out", out]
    status, printed, _ = command(capsys, trained / "runs/tiny", *options)
    assert status == 0 and "n_loop=2" in printed
    assert "Only the first 1 documents of each task count here." in printed
    assert [row["samples"] for row in json.loads(out.read_text(encoding="utf-8"))["scores"]] == [1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("nothing --tasks alphabet", "no run 'nothing' in runs; there are tiny"),
        (
            "tiny --tasks pages",
            "cannot read the task's text \"Whether 'tis nobler\"...: the character 'W' at position 0",
        ),
        ("tiny --tasks alphabet --n-loop 2 0", "n_loop=0 must be an int >= 1"),
        ("tiny --tasks alphabet --limit 0", "limit=0 must be >= 1"),
        ("tiny --tasks alphabet --num-fewshot -1", "num_fewshot=-1 must be >= 0"),
        ("tiny --tasks alphabet --batch-size 0", "batch_size=0 must be >= 1"),
        (
            "tiny --tasks alphabet --include-path nowhere",
            "no folder nowhere: --include-path takes one with the YAML files",
        ),
    ],
)
def test_what_cannot_work_is_one_clear_line(trained, tasks_folder, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(trained)
    argv = argv.split()
    if "--include-path" not in argv:
        argv += ["--include-path", str(tasks_folder)]
    status, out, err = command(capsys, *argv)
    assert status == 1 and message in err and "Traceback" not in err and "n_loop=" not in out


def test_without_the_harness_the_command_says_how_to_get_it(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "minilooped.tools.harness")
    status, _, err = command(capsys, "tiny", "--tasks", "loom")
    assert status == 1 and err.count("\n") == 1
    assert "this needs lm-evaluation-harness" in err and "pip install 'minilooped[eval]'" in err
