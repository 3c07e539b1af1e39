"""What a recorder counts as lost."""

from dynatrain.observe.run import RunFolder
from dynatrain.train.record import SETTLED, Recorder


class Votes:
    def __init__(self):
        self.told = []

    def vote(self, _topic, _rank, value):
        self.told.append(value)

    def leave(self, _topic):
        pass


def lost(folder, validations):
    """Seconds lost by a switch after which every step takes 1 s, and some have a validation of 5 s behind them."""
    votes = Votes()
    recorder = Recorder(RunFolder(folder), votes, rank=1, generation=0, attempt=0, rates=None)
    now = 10.0
    recorder.apart(3.0)  # of a validation before the switch
    recorder.step_ended(now + 3.0)
    recorder._before, recorder._ends, recorder._counting = recorder._ends[-1], [], "topic"
    now += 3.0
    for step in range(SETTLED):
        now += 1.0
        if step in validations:
            recorder.apart(5.0)
            now += 5.0
        recorder.step_ended(now)
    return votes.told


def test_a_validation_is_no_part_of_a_step(tmp_path):
    assert lost(tmp_path, ()) == lost(tmp_path, (0,)) == lost(tmp_path, (1, 5)) == [0.0]
