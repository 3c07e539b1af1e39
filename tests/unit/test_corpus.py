"""Documents: what is read, in which order, what is refused, and who is held out."""

import json
import os

import pytest

from dynatrain.data.corpus import DataError, Document, read_documents, split


def folder_of(tmp_path, files):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(tmp_path)


def many(count):
    return tuple(Document(name=f"d{i}.txt", text="x") for i in range(count))


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    documents = read_documents(())
    names = [document.name for document in documents]

    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert not [name for name in names if name.split("/")[0] in {"test", "site-packages"}]
    assert names == sorted(names)


def test_files_of_a_folder_come_in_order_of_name_and_lines_in_theirs(tmp_path):
    lines = "\n".join(json.dumps({"text": text}) for text in ("one", "two", "  ")) + "\n\n"
    latin = "# -*- coding: latin-1 -*-\nx = 'é'\n"
    files = {"b/z.txt": "zed", "a.jsonl": lines, "b/a.py": latin.encode("latin-1")}
    files |= {"empty.txt": "\n", "c.bin": b"\xff", ".hidden/d.txt": "no"}
    root = folder_of(tmp_path, files)

    assert [(d.name, d.text) for d in read_documents((root,))] == [
        ("a.jsonl#1", "one"),
        ("a.jsonl#2", "two"),
        ("b/a.py", latin),
        ("b/z.txt", "zed"),
    ]


def test_names_do_not_depend_on_where_the_corpus_lies_or_how_often_it_is_named(tmp_path, monkeypatch):
    files = {"a/x.txt": "one", "b/x.txt": "two"}
    roots = [folder_of(tmp_path / place, files) for place in ("here", "there")]
    monkeypatch.chdir(tmp_path)

    here = read_documents((roots[0],))
    assert [d.name for d in here] == ["a/x.txt", "b/x.txt"]
    assert read_documents((roots[1],)) == here
    assert read_documents(("there", "there/b/x.txt", "there/a", roots[1] + "/a/x.txt")) == here


def test_a_path_that_is_added_moves_no_document(tmp_path):
    folder_of(tmp_path, {f"a/{i}.txt": f"text {i}" for i in range(40)} | {"b/0.txt": "else", "b/z.txt": "z"})
    before = read_documents((str(tmp_path / "a"),))
    after = read_documents((str(tmp_path / "a"), str(tmp_path / "b/0.txt"), str(tmp_path / "b")))

    assert set(after) - set(before) == {Document(name="0.txt@2", text="else"), Document(name="z.txt", text="z")}
    sides = [{d.name for d in split(documents, seed=0, validation=0.4)[1]} for documents in (before, after)]
    assert sides[0] == sides[1] & {d.name for d in before}
    assert sides[0]


def test_files_of_one_name_can_be_split(tmp_path):
    paths = folder_of(tmp_path, {"a/x.txt": "one", "b/x.txt": "two"})
    both = read_documents((f"{paths}/b/x.txt", f"{paths}/a/x.txt"))

    assert [d.name for d in both] == ["x.txt", "x.txt@2"]
    assert all(split(both, seed=0, validation=0.5))


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    folder_of(
        tmp_path,
        {
            "bad.txt": b"fine\xff",
            "bad.jsonl": '{"text": "x"}\n[1]\n',
            "worse.jsonl": "no json\n",
            "half.jsonl": '{"text": "whole"}\n{"text": "a\\ud800"}\n',
            "bad.py": "# coding: klingon\n",
            "x.csv": "a,b",
        },
    )
    (tmp_path / "nothing").mkdir()
    names = ("bad.txt", "bad.jsonl", "worse.jsonl", "half.jsonl", "bad.py", "x.csv", "nothing", "missing.txt")

    with pytest.raises(DataError) as caught:
        read_documents(tuple(str(tmp_path / name) for name in names))

    text = str(caught.value)
    assert len(caught.value.problems) == len(names)
    for said in (
        "bad.txt: byte 4 is not UTF-8",
        "bad.jsonl: line 2 has no string under 'text'",
        "worse.jsonl: line 1 is not JSON",
        "half.jsonl: text #2 has U+D800, half of a surrogate pair, as character 2",
        "bad.py: ",
        "x.csv: ends in '.csv'; accepted are .txt, .py, .jsonl",
        "nothing: a folder without a file",
        "missing.txt: does not exist",
    ):
        assert said in text


def test_what_a_folder_has_beside_its_texts_is_not_passed_over_where_it_was_meant(tmp_path):
    files = {"LICENSE.txt": "MIT", "in/BOOK.TXT": "long", "in/corpus.bin": "\0", "in/corpus.idx": "\0"}
    folder_of(tmp_path, files | {"web.jsonl.gz": "packed", "in/page.txt.zst": "packed", "picture.png": "", "x.gz": ""})

    with pytest.raises(DataError) as caught:
        read_documents((str(tmp_path),))

    said = sorted(problem.removeprefix(f"{tmp_path}/").split(";")[0] for problem in caught.value.problems)
    assert said == [
        "in/corpus.idx: tokens in a folder of texts",
        "in/page.txt.zst: is packed",
        "web.jsonl.gz: is packed",
    ]
    for name in ("in/corpus.idx", "in/page.txt.zst", "web.jsonl.gz"):
        (tmp_path / name).unlink()
    assert [document.text for document in read_documents((str(tmp_path),))] == ["MIT", "long"]


def test_only_empty_documents_are_refused(tmp_path):
    with pytest.raises(DataError, match="no text in any file"):
        read_documents((folder_of(tmp_path, {"a.txt": " \n", "b.jsonl": ""}),))


def test_an_unreadable_folder_is_not_passed_over(tmp_path, monkeypatch):
    """As for a user other than root, whom no mode keeps out."""
    root = folder_of(tmp_path, {"a.txt": "x", "closed/b.txt": "y"})
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(DataError, match="closed: Permission denied"):
        read_documents((root,))


def test_the_side_of_a_document_depends_on_its_name_and_the_seed_alone():
    documents = many(400)
    _, held_out = split(documents, seed=1, validation=0.2)
    _, of_half = split(documents[::-2], seed=1, validation=0.2)
    _, of_other_seed = split(documents, seed=2, validation=0.2)

    assert 50 < len(held_out) < 110
    assert set(of_half) == set(held_out) & set(documents[::-2])
    assert set(of_other_seed) != set(held_out)


@pytest.mark.parametrize("count", [2, 3, 10, 100])
@pytest.mark.parametrize("validation", [0.001, 0.5, 0.999])
def test_every_document_is_on_one_side_and_no_side_is_empty(count, validation):
    for seed in range(5):
        train, held_out = split(many(count), seed=seed, validation=validation)

        assert train
        assert held_out
        assert sorted((*train, *held_out), key=lambda d: d.name) == sorted(many(count), key=lambda d: d.name)


def test_one_document_cannot_be_split_but_can_be_trained_on():
    with pytest.raises(DataError, match="validation = 0"):
        split(many(1), seed=0, validation=0.05)

    assert split(many(1), seed=0, validation=0) == (many(1), ())
