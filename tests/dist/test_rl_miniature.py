"""The recipe of reinforcement learning: it learns, and trainer and engine mean the same by the same weights."""

from tests.dist.test_model_recipes import trained


def test_a_tiny_policy_learns_from_an_engine_that_computes_as_the_trainer_does():
    seen = trained(2, "rl_miniature", rounds=5)
    rewards, apart = [row[0] for row in seen], [row[1] for row in seen]
    assert len(seen) == 5
    assert max(apart) < 1e-5
    assert {tuple(row[2:]) for row in seen} == {("tp2", "fsdp2")}
    assert rewards[0] < 0.05
    assert rewards[-1] > 0.1
