"""Each published preset is the model that ``transformers`` builds from its public config, name by name."""

from dataclasses import replace

import pytest
import torch
from tests.published import CONFIGS

from dynatrain.space.decoder import DecoderShape, catalogue
from dynatrain.space.hf_config import ModelError
from dynatrain.space.hf_names import file_shapes
from dynatrain.space.presets import PRESETS

TOTALS = {
    "gpt2": 124_439_808,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
}
TOLD = {
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "llama-3.1-405b": 405.9e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235.1e9,
    "deepseek-v3": 671e9,
    "kimi-k2": 1.03e12,
}
"""As they are told in public: with three or four digits."""
published = pytest.mark.parametrize("name", CONFIGS)


def test_every_published_preset_is_compared():
    assert CONFIGS.keys() == PRESETS.keys() - {"tiny", "25m", "200m", "600m"} == TOTALS.keys()


@published
def test_a_preset_is_what_its_public_config_says(name):
    shape = DecoderShape.from_config(CONFIGS[name], to_train=False)

    assert replace(shape, dropout=0.0, attention_dropout=0.0) == PRESETS[name]


@published
def test_a_preset_has_the_parameters_that_the_public_model_has(name):
    tensors = catalogue(PRESETS[name])

    assert sum(tensor.numel for tensor in tensors if tensor.states[0].name == "param") == TOTALS[name]


@pytest.mark.parametrize("name", TOLD)
def test_the_total_is_the_one_that_is_told_of_the_model(name):
    told = f"{TOLD[name]:.4g}"
    digits = len(told.partition("e")[0].replace(".", "").rstrip("0"))

    assert float(f"{TOTALS[name]:.{digits}g}") == TOLD[name]


@published
def test_the_files_of_a_preset_are_those_of_the_public_model(name, transformers):
    """Names and shapes, as their own code writes them: it holds a layer's experts in one tensor, too."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415

    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"  # the public one names code of its own, which is this model's
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    theirs = {key: tuple(value.shape) for key, value in revert_weight_conversion(model, model.state_dict()).items()}
    if PRESETS[name].tie_word_embeddings:
        del theirs["lm_head.weight"]

    assert file_shapes(PRESETS[name]) == theirs
    assert sum(value.numel() for value in model.parameters()) == TOTALS[name]


def test_a_config_that_is_scaled_or_quantised_is_read_for_its_shape_and_not_trained():
    with pytest.raises(ModelError) as caught:
        DecoderShape.from_config(CONFIGS["deepseek-v3"])

    found = [problem.split(" is not built")[0] for problem in caught.value.problems]
    assert found == ["quantization_config", "rope_scaling of type 'yarn'"]
