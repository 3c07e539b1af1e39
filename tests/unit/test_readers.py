"""Parquet and WebDataset tar: what is read, in which order, and what is refused."""

import builtins
import io
import json
import tarfile

import pytest
from tests.apart import apart

from dynatrain.data.corpus import DataError, read_documents, split


def parquet(path, columns, **options):
    import pyarrow as pa  # noqa: PLC0415 - only apart
    import pyarrow.parquet as pq  # noqa: PLC0415

    pq.write_table(pa.table({name: pa.array(*column) for name, column in columns.items()}), path, **options)


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return path


def found(*paths, column="text"):
    return [(document.name, document.text) for document in read_documents(tuple(map(str, paths)), column)]


def refusal(*paths, column="text"):
    with pytest.raises(DataError) as caught:
        read_documents(tuple(map(str, paths)), column)
    assert len(caught.value.problems) == len(paths)
    return str(caught.value)


def test_line_ends_stay_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    (tmp_path / "b.py").write_bytes("# coding: latin-1\r\ns = '\xe9'\r\n".encode("latin-1"))

    assert [text for _, text in found(tmp_path)] == ["one\r\ntwo\rthree\n", "# coding: latin-1\r\ns = '\xe9'\r\n"]


def test_a_byte_order_mark_is_none_of_the_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_bytes(mark + b"three")
    (tmp_path / "c.py").write_bytes(mark + b"four = 4")
    tar_of(tmp_path / "d.tar", [("x.txt", mark + b"five"), ("y.json", mark + b'{"text": "six"}')])

    assert [text for _, text in found(tmp_path)] == ["one", "two", "three", "four = 4", "five", "six"]


@pytest.mark.parametrize("kind", ["string", "large_string"])
@apart
def test_rows_of_parquet_are_documents_across_row_groups_and_empty_ones_are_left_out(tmp_path, kind):
    texts = ["one", None, "two", " ", "three"]
    parquet(tmp_path / "a.parquet", {"id": (range(5),), "body": (texts, kind)}, row_group_size=2)

    rows = [("a.parquet#1", "one"), ("a.parquet#3", "two"), ("a.parquet#5", "three")]
    assert found(tmp_path / "a.parquet", column="body") == rows
    assert found(tmp_path, column="body") == rows
    assert split(read_documents((str(tmp_path),), "body"), seed=0, validation=0.4)[1]


@apart
def test_parquet_that_cannot_be_used_says_what_is_there(tmp_path):
    parquet(tmp_path / "a.parquet", {"id": ([1],), "body": (["x"],)})
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    (tmp_path / "no.parquet").write_bytes(b"not at all")

    said = refusal(*(tmp_path / name for name in ("a.parquet", "cut.parquet", "no.parquet")))
    assert "a.parquet: no column 'text'; there are 'id', 'body'; data.text_column says which to take" in said
    assert "cut.parquet: is not whole parquet: " in said
    assert "no.parquet: is not whole parquet: " in said
    assert "column 'id' is int64, and a column of strings is wanted" in refusal(tmp_path / "a.parquet", column="id")


def test_without_pyarrow_the_command_that_brings_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    plain = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "a.parquet: parquet needs pyarrow, which is not installed: pip install 'dynatrain[data]'" in refusal(
        tmp_path / "a.parquet"
    )


def test_members_of_one_key_are_one_document_and_a_txt_comes_before_a_json(tmp_path):
    members = [
        ("part", None),
        ("part/b.jpg", b"\xff"),
        ("part/b.txt", "b é".encode()),
        ("part/b.json", b'{"width": 3}'),
        ("a.meta.json", b"{}"),
        ("a.JSON", json.dumps({"text": "a", "body": "other"}).encode()),
        ("__notes__.txt", b"no"),
        (".hidden.txt", b"no"),
        ("README", b"no"),
    ]
    tar_of(tmp_path / "x.tar", members)

    assert found(tmp_path / "x.tar") == [("x.tar#part/b", "b é"), ("x.tar#a", "a")]
    assert found(tmp_path / "x.tar", column="body")[1] == ("x.tar#a", "other")


def test_a_tar_that_cannot_be_used_says_which_member(tmp_path):
    good = [(f"{i}.txt", b"x" * 600) for i in range(3)]
    whole = tar_of(tmp_path / "good.tar", good).read_bytes()
    spoilt = {
        "twice": [*good, ("0.txt", b"again")],
        "textless": [("a.jpg", b"")],
        "latin": [("a.txt", b"\xff")],
        "keyless": [("a.json", b'{"body": "x", "n": 1}')],
        "broken": [("a.json", b"{")],
    }
    for name, members in spoilt.items():
        tar_of(tmp_path / f"{name}.tar", members)
    (tmp_path / "inside.tar").write_bytes(whole[:900])
    (tmp_path / "between.tar").write_bytes(whole[: 3 * 512])
    (tmp_path / "no.tar").write_bytes(b"not at all")
    names = (*spoilt, "inside", "between", "no")

    said = refusal(*(tmp_path / f"{name}.tar" for name in names))
    for words in (
        "twice.tar: member 0.txt comes twice",
        "textless.tar: sample a has neither a.txt nor a.json",
        "latin.tar: member a.txt: byte 0 is not UTF-8",
        "keyless.tar: member a.json has no string under 'text'; there are 'body', 'n'; data.text_column says which",
        "broken.tar: member a.json is not JSON",
        "inside.tar: is no whole tar file: ",
        "between.tar: ends after 1,536 bytes without the two empty blocks that close a tar: cut short",
        "no.tar: is no whole tar file: ",
    ):
        assert words in said
    assert len(found(tmp_path / "good.tar")) == 3
