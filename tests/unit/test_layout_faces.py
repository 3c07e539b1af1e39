import pytest

from dynatrain.layout.explain import describe, difference
from dynatrain.layout.foreign import read_layout
from dynatrain.layout.form import LayoutError
from dynatrain.layout.text import parse_layout, print_layout

FOREIGN = {
    "--parallelism.tensor_parallel_degree=2 data_parallel_shard_degree=4": "fsdp4.tp2-sp",
    "--parallelism.tensor_parallel_degree 2 --parallelism.enable_sequence_parallel=False --world-size=4": "fsdp2.tp2",
    "[parallelism]\ntensor_parallel_degree = 2  # of 8\ndata_parallel_replicate_degree = 2\nworld_size = 8": (
        "dp2.fsdp2.tp2-sp"
    ),
    "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 2": "pp2.fsdp2-z2",
    "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 2 "
    "--parallelism.fsdp_reshard_after_forward always --parallelism.pipeline_parallel_schedule 1F1B": "pp2.fsdp2",
    "--parallelism.data_parallel_shard_degree 4 --parallelism.fsdp_reshard_after_forward never": "fsdp4-z2",
    "--parallelism.data_parallel_shard_degree=1": "dp1",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --world-size 8": (
        "pp2.dp2.tp2-sp"
    ),
    "--tensor-model-parallel-size 1 --sequence-parallel --world-size 2 --lr 1e-4": "dp2",
    "--tensor-model-parallel-size=2 --use-distributed-optimizer --world-size=8": "fsdp4-z1.tp2",
    "--tensor-model-parallel-size 2 --use-torch-fsdp2 --world-size 8": "fsdp4.tp2",
    "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --world-size 4": "dp2.pp2",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --tensor-model-parallel-size 1 "
    "--world-size 4": "fsdp4-z2",
    "--tensor-model-parallel-size 2 --context-parallel-size 1 --world-size 2": "tp2",
    "--tensor-model-parallel-size 2 --context-parallel-size 2 --world-size 8": "dp2.cp2-ring.tp2",
    "--context-parallel-size 2 --cp-comm-type a2a --use-distributed-optimizer --world-size 4": "fsdp2-z1.cp2-ulysses",
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --use-torch-fsdp2 --world-size 8": (
        "fsdp4.tp2.ep4.etp2"
    ),
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --use-torch-fsdp2 "
    "--world-size 8": "fsdp4.tp2.ep4",
    "--tensor-model-parallel-size 2 --num-experts 8 --use-torch-fsdp2 --world-size 4": "fsdp2.tp2.etp2",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3 --world-size 2": "pp2v3",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --num-layers 32 --world-size 4": (
        "pp2v4.dp2"
    ),
    "context_parallel_degree=2 tensor_parallel_degree=2 expert_parallel_degree=4 world_size=8": "fsdp2.cp2.tp2-sp.ep4",
    "context_parallel_degree=2 context_parallel_rotate_method=alltoall data_parallel_shard_degree=1": "cp2-ring",
    "data_parallel_shard_degree=4 expert_parallel_degree=2 expert_tensor_parallel_degree=2": "fsdp4.ep2.etp2",
    "pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBVZeroBubble data_parallel_shard_degree=2": (
        "pp2v2-zbv.fsdp2-z2"
    ),
    "pipeline_parallel_degree=2 pipeline_parallel_schedule=Interleaved1F1B data_parallel_shard_degree=1": "pp2v2",
    "torchrun train.py --tensor-model-parallel-size 2 --data-path 0.3 a 0.7 b --lr 1 --lr 2 --world-size 2": "tp2",
    "tensor_parallel_degree = 2\n[training]\nsteps = 3\n[validation]\nsteps = 4\nworld_size = 2": "tp2-sp",
    "pp2.fsdp2": "pp2.fsdp2",
}

REFUSED = {
    "--parallelism.tensor_parallel_degree=2": "data_parallel_shard_degree (-1, what is left over) cannot be known",
    "--tensor-model-parallel-size 2": "data-parallel size cannot be known without the number of ranks",
    "--tensor-model-parallel-size 2 --world-size 7": "nearest: 6, 8",
    "--parallelism.tensor_parallel_degree=4 --world-size 2": "nearest: 4",
    "--parallelism.data_parallel_shard_degree=4 --world-size 8": "multiply to 4, but world_size is 8",
    "--expert-model-parallel-size 8 --tensor-model-parallel-size 2 --use-torch-fsdp2 --world-size 8": (
        "ep8 x etp2 = 16 does not divide the 8 ranks of fsdp x cp x tp"
    ),
    "--tensor-model-parallel-size 2 --cp-comm-type a2a+p2p --world-size 4": "cp_comm_type = a2a+p2p: one of p2p",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --world-size 2": "add --num-layers N",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5 --num-layers 32 --world-size 2": (
        "num_layers 32 is no multiple of pp x num_layers_per_virtual_pipeline_stage = 2 x 5"
    ),
    "pipeline_parallel_degree=2 pipeline_parallel_schedule=DualPipeV world_size=2": "DualPipeV: one of 1F1B, GPipe",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --world-size 2": (
        "decoder_first_pipeline_num_layers: not understood"
    ),
    "--tensor-model-parallel-size two --world-size 2": "tensor_model_parallel_size = two",
    "--parallelism.tensor_parallel_degree=2 --sequence-parallel --world-size 2": "are mixed",
    "--parallelism.tensor_parallel_degree=2 --parallelism.fsdp_reshard_after_forward=sometimes --world-size 2": (
        "one of default, always, never"
    ),
    "--tensor-model-parallel-size 1000000 --world-size 1000000": "a size is a whole number from 1 to 65536",
    "tensor_parallel_degree=2 world_size=" + 5000 * "9": "from 1 to 65536",
    "tensor_parallel_degree=60000 data_parallel_shard_degree=60000": "3600000000 ranks; at most 65536",
    "--tensor-model-parallel-size 2 4 --world-size 8": "tensor_model_parallel_size = 2 is followed by 4",
    "tensor_parallel_degree=2 4 world_size=8": "tensor_parallel_degree = 2 is followed by 4",
    "--world-size 8 --tensor-model-parallel-size 2 --tensor-model-parallel-size 4": (
        "tensor_model_parallel_size is 2 and then 4; give it once"
    ),
    "--tensor-model-parallel-size 2 --sequence-parallel --world-size 8 --sequence-parallel false": (
        "sequence_parallel is true and then false"
    ),
    "--tensor-model-parallel-size '2": "quotes are not closed",
}


@pytest.mark.parametrize("text", FOREIGN)
def test_settings_of_other_trainers_read_as_the_same_layout(text):
    assert print_layout(read_layout(text)) == FOREIGN[text]


@pytest.mark.parametrize("text", REFUSED)
def test_settings_that_leave_the_layout_open_are_refused_by_name(text):
    with pytest.raises(LayoutError) as caught:
        read_layout(text)

    assert REFUSED[text] in str(caught.value)


def test_a_description_has_a_line_per_axis_and_the_place_of_each_rank():
    lines = describe(parse_layout("pp2.fsdp2-z1.tp2-sp"))

    assert lines[0] == "pp2.fsdp2-z1.tp2-sp: 8 ranks"
    assert "first group: ranks 0, 4" in lines[1]
    assert "ZeRO-1" in lines[2]
    assert "sequence parallel" in lines[3]
    assert lines[-3].split() == ["5", "1", "0", "1"]


def test_a_description_of_a_pinned_order_shows_where_ranks_really_sit():
    lines = describe(parse_layout("dp2.tp2.order_0_2_1_3"))

    assert "first group: ranks 0, 2" in lines[2]
    assert lines[-3].split() == ["1", "1", "0"]


def test_a_description_says_where_each_rank_is_among_experts():
    lines = describe(parse_layout("pp2v2-zbv.fsdp2-z2.cp2-ring.ep2"))

    assert "4 pipeline stages on 2 ranks; zero bubble, stages laid as a V" in lines[1]
    assert "first group: ranks 0, 2" in lines[2]
    assert "each sequence cut 2 ways, keys and values passed round" in lines[3]
    assert "dealt out to 2 groups of ranks, each of which 2 ranks share; first group: ranks 0, 1" in lines[4]
    assert lines[-1].split() == ["7", "1", "1", "1", "1"]
    assert lines[-2].split() == ["6", "1", "1", "0", "0"]


def test_a_description_says_what_is_kept_gathered_over_cp_alone():
    assert "ZeRO-1" in describe(parse_layout("cp2-z1"))[1]
    assert "ZeRO" not in describe(parse_layout("fsdp2-z1.cp2"))[2]


def test_a_difference_names_what_changes_of_every_axis():
    lines = difference(parse_layout("pp2v2.cp2-ring"), parse_layout("pp2-zb.fsdp2-z2.ep2"))

    assert lines[1:-1] == (
        "  fsdp: 1 -> 2",
        "  cp: 2 -> 1",
        "  ep: 1 -> 2",
        "  stages per pp rank: 2 -> 1",
        "  schedule of the pipeline: the run's own -> zb",
        "  ZeRO stage: 3 -> 2",
        "  attention over cp: ring -> gather",
    )


def test_a_description_of_a_large_world_has_no_table():
    assert len(describe(parse_layout("fsdp1024"))) == 2


def test_a_difference_names_axes_options_moved_and_new_ranks():
    lines = difference(parse_layout("pp2.fsdp2.tp2-sp"), parse_layout("fsdp4-z2.tp4"))

    assert lines == (
        "pp2.fsdp2.tp2-sp -> fsdp4-z2.tp4",
        "  pp: 2 -> 1",
        "  fsdp: 2 -> 4",
        "  tp: 2 -> 4",
        "  ZeRO stage: 3 -> 2",
        "  sequence parallel: on -> off",
        "  6 of 8 ranks sit at another place",
        "  8 ranks join",
    )


def test_a_difference_of_rank_order_alone_is_seen():
    lines = difference(parse_layout("dp2.tp2"), parse_layout("tp2.dp2"))

    assert "  rank order of axes: dp, tp -> tp, dp" in lines
    assert "  2 of 4 ranks sit at another place" in lines


def test_a_layout_does_not_differ_from_itself():
    assert difference(parse_layout("dp2"), parse_layout("dp2")) == ("dp2 -> dp2: the same layout",)
