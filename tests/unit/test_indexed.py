"""Megatron's .bin and .idx, against bytes that are put together here by the format's description."""

import struct

import numpy as np
import pytest

from dynatrain.data.corpus import DataError
from dynatrain.data.indexed import Indexed, open_indexed, write_indexed
from dynatrain.data.prepare import Request, open_samples, open_validation, prepare
from dynatrain.data.readers import UnreadableError

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}
"""``struct``'s letter of each code."""


def pair(path, sequences, documents, *, code=8, version=1, magic=b"MMIDIDX\x00\x00", after=b""):
    """Write both files with nothing but ``struct``."""
    letter = LETTERS.get(code, "H")
    content, lengths, offsets = b"", [], []
    for tokens in sequences:
        offsets.append(len(content))
        lengths.append(len(tokens))
        content += struct.pack(f"<{len(tokens)}{letter}", *tokens)
    index = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(documents)}q", *documents)
    path.with_suffix(".bin").write_bytes(content)
    path.with_suffix(".idx").write_bytes(index + after)
    return path.with_suffix(".bin")


def texts(corpus):
    return [corpus.document(number).tolist() for number in range(len(corpus))]


@pytest.mark.parametrize("code", LETTERS)
def test_every_type_of_token_is_read_and_documents_join_their_sequences(tmp_path, code):
    sequences = [[1, 2, 3], [4], [], [5, 6], [7]]
    path = pair(tmp_path / "x", sequences, [0, 2, 3, 3, 5], code=code)

    corpus = Indexed.open(path)
    assert corpus.dtype == np.dtype("<" + LETTERS[code])
    assert texts(corpus) == [[1, 2, 3, 4], [], [], [5, 6, 7]]
    assert [corpus.size(number) for number in range(len(corpus))] == [4, 0, 0, 3]
    assert isinstance(corpus.content, np.memmap)
    assert texts(Indexed.open(tmp_path / "x.idx")) == texts(corpus)


def test_modes_behind_the_index_are_passed_over_and_an_empty_corpus_is_empty(tmp_path):
    assert texts(Indexed.open(pair(tmp_path / "x", [[1], [2]], [0, 1, 2], after=b"\0\1"))) == [[1], [2]]
    assert len(Indexed.open(pair(tmp_path / "y", [], [0]))) == 0


@pytest.mark.parametrize(("written", "said", "explained"), [("<i4", 8, "20"), ("<u2", 4, "40"), ("<i8", 4, "40")])
def test_an_index_that_does_not_explain_the_size_of_its_tokens_is_refused_with_both_numbers(
    tmp_path, written, said, explained
):
    path = pair(tmp_path / "x", [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]], [0, 1, 2], code=said)
    content = np.arange(1, 11).astype(written).tobytes()
    path.write_bytes(content)

    with pytest.raises(UnreadableError, match=rf"has {len(content)} bytes.*{explained}"):
        Indexed.open(path)


def test_an_index_of_the_other_endianness_or_whose_documents_go_on_behind_its_sequences_is_refused(tmp_path):
    path = pair(tmp_path / "x", [[1], [2]], [0, 1, 3])
    with pytest.raises(UnreadableError, match="do not ascend from 0 to its 2 sequences"):
        Indexed.open(path)
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:9] + struct.pack(">Q", 1) + index.read_bytes()[17:])
    with pytest.raises(UnreadableError, match="is of version 72057594037927936; 1 can be read"):
        Indexed.open(path)


def test_what_is_no_whole_corpus_is_refused_by_name(tmp_path):
    def refused(**changes):
        given = {"sequences": [[1, 2], [3]], "documents": [0, 1, 2]} | changes
        return pair(tmp_path / "x", **given)

    def said(path):
        with pytest.raises(UnreadableError) as caught:
            Indexed.open(path)
        return str(caught.value)

    assert "x.idx is no Megatron index: it begins with b'MNIST" in said(refused(magic=b"MNIST\0\0\0\0"))
    assert "x.idx is of the older kind TNTIDX" in said(refused(magic=b"TNTIDX\0\0\0"))
    assert "x.idx is of version 2; 1 can be read" in said(refused(version=2))
    assert "x.idx has tokens of type 9; known are 1 uint8, 2 int8" in said(refused(code=9))
    assert "x.idx is too long: it has 85 bytes" in said(refused(after=b"\0\0\0"))
    for entries in ([0, 1], [1, 2], [0, 2, 1, 2], []):
        assert "document entries of x.idx do not ascend from 0 to its 2 sequences" in said(refused(documents=entries))
    whole = refused().with_suffix(".idx").read_bytes()
    for size in (0, 5, 9, 20, 40, len(whole) - 1):
        (tmp_path / "x.idx").write_bytes(whole[:size])
        assert ("x.idx is cut short" if size > 8 else "x.idx is no Megatron index") in said(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_bytes(whole[:34] + struct.pack("<i", -2) + whole[38:])
    assert "negative length" in said(tmp_path / "x.bin")
    content = refused().read_bytes()
    (tmp_path / "x.bin").write_bytes(content[:-1])
    assert "x.bin is cut short: it has 5 bytes, and x.idx says 6" in said(tmp_path / "x.bin")


@pytest.mark.parametrize(("vocab_size", "code"), [(300, 8), (65536, 8), (65537, 4)])
def test_what_is_written_is_the_format_byte_by_byte(tmp_path, vocab_size, code):
    documents = [[1, 2, vocab_size - 1], [], np.array([0], np.uint8)]
    assert write_indexed(tmp_path / "x.idx", iter(documents), vocab_size) == 4

    expected = pair(tmp_path / "y", [list(map(int, d)) for d in documents], [0, 1, 2, 3], code=code)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"x{suffix}").read_bytes() == expected.with_suffix(suffix).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "y.bin", "y.idx"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([1, 300], "document 2 has token 300; the vocabulary has 300, from 0 to 299"),
        ([-1], "document 2 has token -1;"),
        ([1.0], "document 2 has values of type float64"),
        ([[1], [2]], "document 2 has 2 dimensions"),
    ],
)
def test_what_is_no_document_is_not_written_and_leaves_nothing(tmp_path, document, said):
    with pytest.raises(DataError, match="cannot be written") as caught:
        write_indexed(tmp_path / "x", [[1], document], 300)

    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_all_that_is_wrong_with_the_paths_is_said_at_once(tmp_path):
    pair(tmp_path / "good", [[1]], [0, 1])
    pair(tmp_path / "half", [[1]], [0, 1]).unlink()
    pair(tmp_path / "cut", [[1]], [0, 1]).write_bytes(b"")
    paths = tuple(str(tmp_path / name) for name in ("good.bin", "half.idx", "cut.idx", "x.txt", "none.bin"))

    with pytest.raises(DataError) as caught:
        open_indexed(paths)

    assert len(caught.value.problems) == 4
    for said in (
        "half.idx: half.bin cannot be found; tokens are a pair",
        "cut.bin: cut.bin is cut short: it has 0 bytes, and cut.idx says 2",
        "x.txt: is text or a folder, beside tokens",
        "none.bin: none.bin and none.idx cannot be found",
    ):
        assert said in str(caught.value)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_tokens_go_to_their_side_of_the_split_as_they_are_whatever_else_is_there(tmp_path, run):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, rng.integers(0, 30)).tolist() for _ in range(60)]
    write_indexed(tmp_path / "a.bin", documents[:40], 1000)
    write_indexed(tmp_path / "b.bin", documents[40:], 70_000)  # of another type
    request = Request(paths=(str(tmp_path / "b.idx"), str(tmp_path / "a.bin")), vocab_size=1000, validation=0.3)

    prepared = prepare(request, run)
    assert sum(prepared.documents) == sum(map(bool, documents))
    assert 5 < prepared.documents[1] < 30
    sides_files = [f"{what}_{side}.npy" for what in ("tokens", "documents") for side in ("train", "validation")]
    assert {path.name for path in run.iterdir()} == {"data.json", *sides_files}
    sides = [open_samples(run, 4).tokens.tolist(), open_validation(run, 4).tokens.tolist()]
    assert tuple(map(len, sides)) == prepared.tokens
    starts = [open_samples(run, 4, document_mask=True).starts.tolist()]
    starts += [open_validation(run, 4, document_mask=True).starts.tolist()]
    begun = [[], []]
    for document in filter(None, documents):
        side = sides[0] if sides[0][: len(document)] == document else sides[1]
        assert side[: len(document)] == document  # each side has its documents in order
        at = int(side is sides[1])
        begun[at].append(prepared.tokens[at] - len(side))
        del side[: len(document)]
    assert sides == [[], []]
    assert begun == starts

    (run / "data.json").unlink()
    (tmp_path / "alone").mkdir()
    only = Request(paths=(str(tmp_path / "a.bin"),), vocab_size=1000, validation=0.3)
    alone = prepare(only, tmp_path / "alone")
    assert alone.documents[1] <= prepared.documents[1]
    assert prepare(request, run) == prepared


def test_tokens_that_the_model_does_not_know_are_refused_with_their_document(tmp_path, run):
    write_indexed(tmp_path / "a.bin", [[1], [5], [7, 2]], 10)
    pair(tmp_path / "b", [[1.5, 2.0]], [0, 1], code=7)
    pair(tmp_path / "c", [[-1]], [0, 1], code=2)
    paths = tuple(str(tmp_path / name) for name in ("a.bin", "b.bin", "c.bin"))

    with pytest.raises(DataError, match="the tokens do not fit the model") as caught:
        prepare(Request(paths=paths, vocab_size=5, validation=0.0), run)

    assert len(caught.value.problems) == 3
    for said in (
        "a.bin: document 2 has token 5; the vocabulary has 5, from 0 to 4",
        "b.bin: document 1 has values of type float32; token numbers are integers",
        "c.bin: document 1 has token -1;",
    ):
        assert said in str(caught.value)
    assert not (run / "data.json").exists()


def test_a_corpus_without_a_token_is_refused(tmp_path, run):
    write_indexed(tmp_path / "a.bin", [[], []], 10)

    with pytest.raises(DataError, match="no document with a token in it"):
        prepare(Request(paths=(str(tmp_path / "a.bin"),), vocab_size=10), run)
    assert not list(run.iterdir())
