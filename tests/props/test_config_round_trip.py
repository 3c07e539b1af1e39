import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dynatrain.config.load import load_config
from dynatrain.config.run import Batch, Data, Model, Optimizer, RunConfig, Switch, World
from dynatrain.config.toml import to_toml

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
positive = st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False)
below_one = st.floats(min_value=0, max_value=1, exclude_max=True)
configs = st.builds(
    RunConfig,
    layout=words,
    steps=st.integers(1, 2**31 - 1),
    seed=st.integers(0, 2**63 - 1),
    world=st.builds(World, size=st.none() | st.integers(1, 99)),
    model=st.builds(Model, config=words, dropout=st.none() | below_one),
    data=st.builds(Data, paths=st.lists(words, max_size=3).map(tuple), validation=below_one),
    batch=st.builds(Batch, global_sequences=st.integers(1, 99)),
    optimizer=st.builds(
        Optimizer, lr=positive, eps=positive, betas=st.tuples(below_one, below_one), exact_norm=st.booleans()
    ),
    switch=st.lists(st.builds(Switch, step=st.integers(1, 99), layout=words), max_size=3).map(tuple),
)


@given(configs)
def test_what_is_written_as_toml_reads_back_equal(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(to_toml(config).encode())

        assert load_config(path, []).config == config
