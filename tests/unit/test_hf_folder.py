"""Folders in Hugging Face's form: written and read back bit by bit, and refused by name where something is wrong."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import MIXTRAL, QWEN3_MOE, experts_shape, latent_shape, small_shape
from tests.shelves import common, export, load, random_weights

from dynatrain.data.tokenizer import byte_tokenizer
from dynatrain.execute.hf_export import WRITTEN_DTYPES, Export
from dynatrain.execute.hf_folder import open_folder, read_tensors
from dynatrain.execute.tensor_file import WeightsError, allocate, open_tensors
from dynatrain.space.decoder import DecoderShape

SHAPES = {
    "llama": small_shape(dropout=0.0),
    "llama, tied": small_shape(tie_word_embeddings=True),
    "qwen3": small_shape(qk_norm=True),
    "mixtral": experts_shape(MIXTRAL),
    "qwen3 moe": experts_shape(QWEN3_MOE, qk_norm=True),
    "deepseek v3": latent_shape(),
    "gpt2": small_shape(family="gpt2", num_key_value_heads=4),
    "gpt2, tied": small_shape(family="gpt2", num_key_value_heads=4, tie_word_embeddings=True),
}
LLAMA = SHAPES["llama"]
SHARDED = {"max_shard_bytes": 30_000}


@pytest.fixture
def folder(tmp_path):
    """A Llama in shards."""
    return export(tmp_path / "model", LLAMA, random_weights(LLAMA), dtype="fp32", **SHARDED)


KEYS = "model.layers.0.self_attn.k_proj"


def rewrite(file, change):
    """Give a file other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shards_of(folder):
    return sorted(folder.glob("model-*.safetensors"))


def shard_of_keys(folder):
    """The shard that has :data:`KEYS`."""
    return next(file for file in shards_of(folder) if f"{KEYS}.weight" in load_file(file))


def refusal(folder, shape=LLAMA):
    with pytest.raises(WeightsError) as caught:
        open_folder(folder, shape)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", WRITTEN_DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_exported_is_read_back_bit_by_bit(tmp_path, shape, dtype, options):
    weights = random_weights(shape, WRITTEN_DTYPES[dtype])
    path = export(tmp_path / "model", shape, weights, dtype=dtype, **options)

    assert DecoderShape.read_config(path) == shape
    assert bool(shards_of(path)) == bool(options) != (path / "model.safetensors").exists()
    found = load(path, shape, WRITTEN_DTYPES[dtype])
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_files_have_the_bytes_that_the_library_writes(tmp_path, shape, dtype):
    path = export(tmp_path / "model", shape, random_weights(shape), dtype=dtype, **SHARDED)

    for file in path.glob("*.safetensors"):
        save_file(load_file(file), tmp_path / "again", metadata={"format": "pt"})
        assert file.read_bytes() == (tmp_path / "again").read_bytes()


def test_shards_stay_below_the_limit_and_the_index_names_every_tensor(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {file.name: load_file(file) for file in shards_of(folder)}

    assert len(shards) > 5
    assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(value.nbytes for one in shards.values() for value in one.values())
    sizes = [sum(value.nbytes for value in tensors.values()) for tensors in shards.values()]
    assert max(sizes) <= SHARDED["max_shard_bytes"]
    assert min(a + b for a, b in pairwise(sizes)) > SHARDED["max_shard_bytes"] / 2


def test_what_fits_the_limit_to_the_byte_is_one_file(tmp_path):
    weights = random_weights(LLAMA)
    size = sum(value.nbytes for value in weights.values())

    for limit, count in ((size, 0), (size - 1, 2)):
        path = export(tmp_path / str(limit), LLAMA, weights, dtype="fp32", max_shard_bytes=limit)
        assert len(shards_of(path)) == count


def test_a_tensor_longer_than_the_limit_has_a_file_of_its_own(tmp_path):
    path = export(tmp_path / "model", LLAMA, random_weights(LLAMA), max_shard_bytes=1)

    assert len(shards_of(path)) == len(random_weights(LLAMA))
    assert load(path, LLAMA, torch.bfloat16).keys() == random_weights(LLAMA).keys()


def test_writing_casts_to_the_dtype_of_the_files(tmp_path):
    weights = random_weights(LLAMA, torch.float64)
    path = export(tmp_path / "model", LLAMA, weights, dtype="bf16")

    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(path / "model.safetensors").values()} == {torch.bfloat16}
    found = load(path, LLAMA, torch.float64)
    assert all(torch.equal(found[name], value.bfloat16().double()) for name, value in weights.items())


def test_several_openings_fill_one_export(tmp_path):
    """As ranks do: each with mappings of its own, each its own boxes, of tensors that the files fuse, too."""
    shape = SHAPES["gpt2, tied"]
    weights = random_weights(shape)
    made = Export.create(tmp_path / "model", shape, dtype="fp32")
    for half in range(2):
        shelf = made.open()
        for name, value in weights.items():
            rows = value.shape[0]
            box = ((half * rows // 2, (half + 1) * rows // 2), *((0, size) for size in value.shape[1:]))
            for stored, at in common(shelf, name, box):
                stored.copy_(value[slice(*box[0])][at])
        assert not (tmp_path / "model").exists()
    made.finish()

    found = load(tmp_path / "model", shape)
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_what_is_written_into_an_opened_folder_stays_out_of_it(folder):
    shelf = open_folder(folder, LLAMA)
    shelf["norm.weight", "param"][0].tensor.fill_(7)

    assert not (load(folder, LLAMA)["norm.weight"] == 7).any()


def test_an_export_that_is_not_finished_leaves_nothing_under_its_name(tmp_path):
    made = Export.create(tmp_path / "model", LLAMA)
    made.open()
    assert [path.name.endswith(".draft") for path in tmp_path.iterdir()] == [True]
    made.discard()

    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    happened = []
    made = Export.create(tmp_path / "model", LLAMA, **SHARDED)
    rename = Path.rename
    monkeypatch.setattr("os.fsync", lambda handle: happened.append(Path(f"/proc/self/fd/{handle}").readlink()))
    monkeypatch.setattr(Path, "rename", lambda old, new: happened.append("renamed") or rename(old, new))
    made.finish()

    renamed = happened.index("renamed")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {path.name for path in happened[:renamed]} == names | {made.draft.name}
    assert happened[renamed + 1 :] == [tmp_path]


def test_the_space_of_a_new_export_is_taken_at_once(tmp_path):
    made = Export.create(tmp_path / "model", LLAMA, dtype="fp32")
    (file,) = made.draft.iterdir()

    data = sum(value.nbytes for value in random_weights(LLAMA).values())
    assert file.stat().st_blocks * 512 >= file.stat().st_size > data


def test_a_taken_place_and_wrong_options_are_refused_together(folder):
    with pytest.raises(WeightsError) as caught:
        Export.create(folder, LLAMA, dtype="int8", max_shard_bytes=0)

    taken, dtype, shard = caught.value.problems
    assert f"is taken; nearest free place: {folder}-2" in taken
    assert "dtype is 'int8'; one of bf16, fp32, fp16" in dtype
    assert "max_shard_bytes is 0; at least 1" in shard


def test_a_place_that_is_taken_meanwhile_is_left_alone(tmp_path):
    made = Export.create(tmp_path / "model", LLAMA)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()

    with pytest.raises(WeightsError, match="cannot be written"):
        made.finish()
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]
    assert made.draft.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(WeightsError, match="cannot be written"):
        Export.create(tmp_path / "file" / "model", LLAMA)


def test_a_disk_that_is_too_small_is_refused_and_left_empty(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WeightsError, match="No space left"):
        Export.create(tmp_path / "model", LLAMA)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_goes_along_and_ends_a_text(tmp_path):
    shape = replace(LLAMA, vocab_size=257)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = export(tmp_path / "model", shape, random_weights(shape), tmp_path / "tokenizer.json")
    again = export(tmp_path / "again", shape, load(path, shape), path)

    for folder in (path, again):
        assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 256
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 256
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert (settings["eos_token"], settings["model_max_length"]) == ("<|endoftext|>", 64)


def test_a_missing_tokenizer_is_refused_before_anything_is_there(tmp_path):
    made = Export.create(tmp_path / "model", LLAMA)

    with pytest.raises(WeightsError, match=r"the tokenizer cannot be exported[\s\S]*nowhere"):
        made.finish(tmp_path / "nowhere")
    assert not (tmp_path / "model").exists()
    made.finish()


def test_a_folder_without_weights_is_refused_with_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()

    assert "model.safetensors.index.json and its shards, is needed; there are pytorch_model.bin" in refusal(tmp_path)


def test_a_missing_shard_is_refused_by_name(folder):
    gone = shards_of(folder)[2:5:2]
    for shard in gone:
        shard.unlink()

    assert [line.split()[2] for line in refusal(folder).splitlines()] == [f"{shard.name}," for shard in gone]


def test_a_shard_that_is_cut_short_is_refused_by_name(folder):
    shard = shards_of(folder)[2]
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])

    found = refusal(folder)
    assert shard.name in found
    assert f"cut short: its header promises {size} bytes, it has {size - 1}" in found


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "it has 0 bytes"),
        (b"\x05\0\0", "it has 3 bytes"),
        (b"\xff" * 64, "cut short inside its header"),
        ((8).to_bytes(8, "little") + b"not json" * 4, "its header is not JSON"),
        ((8).to_bytes(8, "little") + b"[1, 2]  ", "its header holds a list"),
        ((10).to_bytes(8, "little") + b'{"a": {}} ', "not one of a safetensors file"),
        (
            (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'.ljust(60) + bytes(4),
            "not one of a safetensors file",
        ),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content, named):
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(WeightsError) as caught:
        read_tensors(tmp_path)
    assert named in str(caught.value)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "too many brackets are open at once"),
        ("[]", "holds a list, not a JSON object"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "elsewhere/model.safetensors"}}', "a shard lies in the folder"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, content, named):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    (tmp_path / "elsewhere").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "elsewhere" / "model.safetensors")

    assert named in refusal(tmp_path)


def test_an_index_that_places_a_tensor_wrongly_is_refused_by_name(folder):
    rewrite(shard_of_keys(folder), lambda tensors: tensors.pop(f"{KEYS}.weight"))

    assert f"has no tensor {KEYS}.weight, which the index places there" in refusal(folder)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.zeros(32, 65), "has shape [32, 65]; config.json makes it [32, 64]"),
        (torch.zeros(32, 64, dtype=torch.int8), "is of int8"),
    ],
)
def test_a_tensor_of_another_shape_or_kind_is_refused_by_name(folder, value, named):
    rewrite(shard_of_keys(folder), lambda tensors: tensors.update({f"{KEYS}.weight": value}))

    assert f"{KEYS}.weight {named}" in refusal(folder)


def test_a_tensor_that_the_model_has_not_is_refused_by_name(folder):
    rewrite(shard_of_keys(folder), lambda tensors: tensors.update({f"{KEYS}.bias": torch.zeros(32)}))

    assert f"{KEYS}.bias is there, but" in refusal(folder)


def test_a_head_beside_a_tied_embedding_is_taken_when_equal_and_refused_when_not(tmp_path):
    shape = SHAPES["llama, tied"]
    weights = random_weights(shape)
    path = export(tmp_path / "model", shape, weights, dtype="fp32")
    head = weights["embed_tokens.weight"].clone()
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": head}))

    assert all(torch.equal(value, weights[name]) for name, value in load(path, shape).items())
    changed = head.clone()
    changed[3, 3] += 1
    for other in (changed, head.double()):
        rewrite(path / "model.safetensors", lambda tensors, other=other: tensors.update({"lm_head.weight": other}))
        assert "lm_head.weight is not the embedding" in refusal(path, shape)


def test_names_without_the_prefix_are_read(tmp_path):
    shape = SHAPES["gpt2, tied"]
    weights = random_weights(shape)
    path = export(tmp_path / "model", shape, weights, dtype="fp32")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(4, 4)}, path / "model.safetensors")

    assert all(torch.equal(value, weights[name]) for name, value in load(path, shape).items())


def test_data_at_any_byte_are_read(tmp_path):
    """The format promises no alignment: here 16-bit numbers start at an odd byte."""
    entries = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]},
    }
    header = json.dumps(entries).encode()
    numbers = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    data = b"\x07" + numbers.view(torch.uint8).numpy().tobytes()
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + data)

    found = open_tensors(tmp_path / "odd")
    assert found["a"].tensor.tolist() == [7]
    assert torch.equal(found["b"].tensor, numbers)


def test_scalars_and_empty_tensors_have_their_shapes(tmp_path):
    allocate(tmp_path / "some", {"empty": (torch.float32, (0, 3)), "scalar": (torch.float32, ())})

    found = open_tensors(tmp_path / "some")
    assert found["empty"].tensor.shape == (0, 3)
    assert (found["scalar"].box, found["scalar"].tensor.item()) == ((), 0.0)
