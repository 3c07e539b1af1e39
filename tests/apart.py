"""Tests in a process of their own."""

import functools
import multiprocessing
import os
import traceback

import pytest


def apart(test):
    """A test in a forked child: what it starts (threads of pyarrow, workers) must not stay where other tests fork."""

    @functools.wraps(test)
    def body(*args, **given):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)

        def child():
            try:
                test(*args, **given)
                theirs.send("")
            except BaseException:  # noqa: BLE001 - told to the parent
                theirs.send(traceback.format_exc())
            os._exit(0)

        process = context.Process(target=child)
        process.start()
        said = ours.recv() if ours.poll(60) else "nothing was said in 60 s"
        process.kill()
        process.join()
        if said:
            pytest.fail(said)

    return body
