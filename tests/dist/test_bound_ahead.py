"""In ``keep`` the new modules have their storage before the stall, and follow what has changed since."""

import torch
from tests.dist.trained import DoneError, sit_down, switcher, train
from tests.ranks import run

from dynatrain.layout.text import print_layout
from dynatrain.train.torch_private import local_tensor


def place(value):
    return local_tensor(value).untyped_storage().data_ptr()


def test_new_modules_have_their_storage_before_the_edge_and_what_lies_elsewhere_since_is_mended():
    def work(world):
        sit_down(world)
        seen = {}

        def hook(event, _number, _switch):
            if event != "quiesce":
                return
            old, new = sw.world, sw._course._attempt.new
            seen["on meta"] = [name for name, entry in new.found.items() if local_tensor(entry.value).is_meta]
            stays = [name for name, entry in new.found.items() if place(entry.value) == place(old.found[name].value)]
            # The loop gives one of those that stay other storage, as late as can be.
            seen["moved"], local = stays[0], local_tensor(old.found[stays[0]].value)
            with torch.no_grad():
                local.set_(local.clone())
            seen["stays"], seen["place"] = len(stays), local.untyped_storage().data_ptr()

        def after_step(_result):
            if "place" in seen and print_layout(sw.layout) == "tp2":
                seen["right"] = place(sw.world.found[seen["moved"]].value) == seen["place"]
                raise DoneError
            if "asked" not in seen:
                seen["asked"] = sw.request("tp2", mode="keep")

        sw = switcher(world, "fsdp2", hook=hook)
        train(sw, after_step, until=60)
        return seen["on meta"], seen["stays"] > 1, seen.get("right")

    assert run(2, work, seconds=40) == [([], True, True)] * 2
