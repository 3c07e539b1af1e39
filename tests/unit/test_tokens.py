"""Tokenizers, token files and samples."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dynatrain.data import prepare as preparing
from dynatrain.data.corpus import DataError
from dynatrain.data.prepare import Request, open_samples, open_validation, prepare
from dynatrain.data.samples import Samples, write_tokens
from dynatrain.data.tokenizer import END, byte_tokenizer, encode, load_tokenizer, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve 漢字 \0 \x7f\n", f"a {END} in the text"]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Tests that fork run in this process too; the tokenizers library would start threads in it that stay."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"document {i} says hello to the world\n" * 30)
    return str(folder)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def pairs_of(tokens, sequence):
    samples = Samples(tokens=np.asarray(tokens, dtype=np.uint16), sequence=sequence)
    return [tuple(side.tolist() for side in samples.sample(k)) for k in range(len(samples))]


def test_raw_bytes_are_their_own_numbers_and_256_ends():
    for text, tokens in zip(TEXTS, encode(byte_tokenizer(), TEXTS), strict=True):
        assert tokens.tolist() == [*text.encode(), 256]
        assert byte_tokenizer().decode(tokens[:-1].tolist()) == text
    assert byte_tokenizer().get_vocab_size() == 257


def test_bpe_has_at_most_its_size_reads_any_text_and_is_the_same_each_time():
    tokenizer = train_bpe(TEXTS, 300)

    assert 257 < tokenizer.get_vocab_size() <= 300
    assert train_bpe(TEXTS, 300).to_str() == tokenizer.to_str()
    end = tokenizer.token_to_id(END)
    for text, tokens in zip(TEXTS, encode(tokenizer, TEXTS), strict=True):
        assert tokenizer.decode(tokens[:-1].tolist()) == text
        assert [i for i, token in enumerate(tokens) if token == end] == [len(tokens) - 1]  # not the one that is text


def test_training_reads_a_bounded_share_of_every_text(monkeypatch):
    monkeypatch.setattr("dynatrain.data.tokenizer._TRAINED_CHARACTERS", 40)
    tokenizer = train_bpe(["ab" * 10 + "zzzzzzzz" * 100, "cd" * 10 + "qqqqqqqq" * 100], 4096)

    assert tokenizer.token_to_id("ab") is not None
    assert tokenizer.token_to_id("cd") is not None
    assert tokenizer.token_to_id("zz") is None


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(DataError, match="vocab_size is 200; at least 257"):
        train_bpe(TEXTS, 200)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_what_a_tokenizer_was_asked_to_cut_and_to_fill_up_is_neither(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(pad_id=3, pad_token="x")  # noqa: S106 - of text
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    found = list(encode(load_tokenizer(tmp_path / "tokenizer.json"), ["abcdefgh", "ab"]))

    assert [tokens.tolist() for tokens in found] == [[*b"abcdefgh", 256], [*b"ab", 256]]


def test_every_token_but_the_first_is_a_target_once():
    assert pairs_of(range(8), 3) == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6])]
    assert pairs_of(range(7), 3) == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6])]
    assert pairs_of(range(6), 3) == [([0, 1, 2], [1, 2, 3])]


def test_a_batch_is_its_samples_in_order():
    samples = Samples(tokens=np.arange(100, dtype=np.uint16), sequence=9)
    inputs, targets = samples.batch(np.array([7, 0, 7]))

    assert inputs.tolist() == [list(range(63, 72)), list(range(9)), list(range(63, 72))]
    assert (targets == inputs + 1).all()
    assert inputs.dtype == targets.dtype == np.int64
    for ids in ([-1], [11]):
        with pytest.raises(IndexError, match="of 11"):
            samples.batch(np.array(ids))


def test_every_token_of_a_sample_knows_where_its_document_begins():
    tokens, starts = np.arange(22, dtype=np.uint16), np.array([0, 2, 3, 9, 9, 10])  # one between them is empty
    samples = Samples(tokens=tokens, sequence=7, starts=starts)

    expected = [[0, 0, 2, 3, 3, 3, 3], [0, 0, 2, 3, 3, 3, 3], [0] * 7]  # what began before a sample begins with it
    assert samples.documents(np.arange(3)).tolist() == expected
    assert samples.documents(np.array([2, 0])).tolist() == [expected[2], expected[0]]
    assert samples.documents(np.array([1])).dtype == np.int64
    assert Samples(tokens=tokens, sequence=7).documents(np.arange(3)) is None


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, np.uint16), (65537, np.uint32)])
def test_tokens_are_kept_in_the_narrowest_type_and_mapped(tmp_path, vocab_size, width):
    texts = [np.array([1, vocab_size - 1], dtype=np.uint32), np.array([2], dtype=np.uint32)]
    assert write_tokens(tmp_path / "t.npy", tmp_path / "d.npy", texts, vocab_size) == 3

    samples = Samples.open(tmp_path / "t.npy", 2, tmp_path / "d.npy")
    tokens = samples.tokens
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == width
    assert tokens.tolist() == [1, vocab_size - 1, 2]
    assert samples.starts.tolist() == [0, 2]
    assert sorted(os.listdir(tmp_path)) == ["d.npy", "t.npy"]  # noqa: PTH208


def test_a_token_beyond_the_vocabulary_is_not_written_as_another(tmp_path):
    with pytest.raises(DataError, match="text 2 has token 70000; the vocabulary has 300, from 0 to 299"):
        write_tokens(tmp_path / "t.npy", tmp_path / "d.npy", [np.array([299]), np.array([70_000])], 300)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_whose_numbers_have_gaps_is_read_by_its_largest(run, corpus):
    far = json.loads(byte_tokenizer().to_str())
    far["model"]["vocab"]["h"] = 70_000
    (run / "tokenizer.json").write_text(json.dumps(far))

    prepared = prepare(Request(paths=(corpus,), tokenizer="model", validation=0.0), run)
    assert prepared.vocab_size == 70_001
    assert 70_000 in open_samples(run, 16).tokens


def test_a_failed_write_leaves_nothing(tmp_path):
    def texts():
        yield np.arange(5, dtype=np.uint32)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tokens(tmp_path / "t.npy", tmp_path / "d.npy", texts(), 300)
    assert not list(tmp_path.iterdir())


def test_too_little_text_says_what_would_fit(tmp_path):
    write_tokens(tmp_path / "t.npy", tmp_path / "d.npy", [np.arange(10, dtype=np.uint32)], 300)

    assert len(Samples.open(tmp_path / "t.npy", 9)) == 1
    with pytest.raises(DataError, match=r"10 tokens and a sample of sequence = 10 needs 11; .* sequence at most 9"):
        Samples.open(tmp_path / "t.npy", 10)
    with pytest.raises(DataError, match="cannot be read"):
        Samples.open(tmp_path / "missing.npy", 10)
    with pytest.raises(DataError, match=r"cannot be read\n.*missing.npy"):
        Samples.open(tmp_path / "t.npy", 9, tmp_path / "missing.npy")


THREADS_AFTER = """
import os, sys, pathlib
from dynatrain.data.prepare import Request, _make, prepare
request, folder = Request(paths=(sys.argv[1],), vocab_size=280), pathlib.Path(sys.argv[2])
prepare(request, folder)
print(len(os.listdir("/proc/self/task")))
_make(request, folder)  # what the child does: here it must show, or the line above shows nothing
print(len(os.listdir("/proc/self/task")))
"""


def test_preparing_starts_no_thread_in_the_process_that_asks(run, corpus, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads, started when it is imported
    shown = subprocess.run(
        [sys.executable, "-c", THREADS_AFTER, corpus, run], stdout=subprocess.PIPE, check=True
    ).stdout

    before, after = map(int, shown.split())
    assert before == 1
    assert after > 1


def test_preparing_is_done_once(run, corpus):
    request = Request(paths=(corpus,), vocab_size=280, validation=0.3, seed=4)
    prepared = prepare(request, run)

    assert sum(prepared.documents) == 12
    assert {path.name for path in run.iterdir()} == {
        "tokenizer.json", "data.json",
        "tokens_train.npy", "documents_train.npy", "tokens_validation.npy", "documents_validation.npy",
    }  # fmt: skip
    train, held_out = open_samples(run, 16), open_validation(run, 16)
    assert (len(train.tokens), len(held_out.tokens)) == prepared.tokens
    text = load_tokenizer(run / "tokenizer.json").decode(train.tokens[:400].tolist())
    assert "says hello to the world" in text
    begun = open_samples(run, 16, document_mask=True)
    assert len(begun.starts) == prepared.documents[0]
    end = load_tokenizer(run / "tokenizer.json").token_to_id(END)
    assert np.flatnonzero(begun.tokens == end).tolist() == [*(begun.starts[1:] - 1), prepared.tokens[0] - 1]
    assert len(open_validation(run, 16, document_mask=True).starts) == prepared.documents[1]

    times = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    assert prepare(request, run) == prepared
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == times

    np.save(run / "shorter.npy", train.tokens[:-1])
    (run / "shorter.npy").replace(run / "tokens_train.npy")
    with pytest.raises(DataError, match=r"tokens_train\.npy has .* says that .* were written"):
        open_samples(run, 16)


def test_an_interrupted_preparation_is_done_again_with_the_tokenizer_that_is_there(run, corpus):
    request = Request(paths=(corpus,), vocab_size=280)
    prepared = prepare(request, run)
    tokenizer = (run / "tokenizer.json").stat().st_mtime_ns
    (run / "data.json").unlink()
    (run / "tokens_train.npy").write_bytes(b"half")

    assert prepare(request, run) == prepared
    assert (run / "tokenizer.json").stat().st_mtime_ns == tokenizer
    assert len(open_samples(run, 16).tokens) == prepared.tokens[0]


def test_bytes_without_held_out_documents(run, corpus):
    prepared = prepare(Request(paths=(corpus,), tokenizer="bytes", validation=0.0), run)

    assert prepared.vocab_size == 257
    assert prepared.documents == (12, 0)
    assert len(open_samples(run, 16).tokens) == prepared.tokens[0]
    with pytest.raises(DataError, match=r"data\.validation = 0 holds out no document"):
        open_validation(run, 16)


def test_a_folder_of_other_settings_is_refused_with_the_difference(run, corpus):
    prepare(Request(paths=(corpus,), vocab_size=280), run)

    with pytest.raises(DataError, match=r"vocab_size was 280 and is now 300"):
        prepare(Request(paths=(corpus,), vocab_size=300), run)


def test_unusable_data_is_one_error_here_and_leaves_nothing_half_written(run):
    with pytest.raises(DataError, match=r"the data cannot be read\n  - .*missing.txt: does not exist") as caught:
        prepare(Request(paths=("missing.txt",)), run)

    assert len(caught.value.problems) == 1
    assert not list(run.iterdir())


def test_a_crash_of_the_child_is_not_taken_for_success(run, corpus, monkeypatch):
    monkeypatch.setattr(preparing, "asdict", lambda _: {"no such field": 1})

    with pytest.raises(RuntimeError, match="no such field"):
        prepare(Request(paths=(corpus,)), run)
