"""What the members of a run know of each other beside their ranks."""

from torch.distributed import HashStore

from dynatrain.cluster.worlds import Worlds, forget_others


def test_members_say_once_on_which_node_they_are_and_every_later_world_knows():
    run = HashStore()
    one, other, late = (Worlds(run=run, groups=run, member=m, rank=0, world_size=2) for m in (0, 1, 7))
    one.say_node(0)
    assert one.nodes((0, 1)) == ()
    other.say_node(1)
    late.say_node(1)
    forget_others(run, 5)
    assert one.nodes((0, 1)) == (0, 1)
    assert other.nodes((7, 0)) == (1, 0)
