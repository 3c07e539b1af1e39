"""What a publish hears of an engine over HTTP, and what is said where it hears nothing."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dynatrain.execute.engine_client import EngineError, HttpEngine

pytestmark = pytest.mark.clock


@contextmanager
def engine(code, answer):
    """An engine that answers everything alike; its client, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield HttpEngine(f"http://127.0.0.1:{server.server_port}", 5.0), asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_calls_are_those_of_vllms_server():
    with engine(200, b'{"weight_version": 7}') as (client, asked):
        client.init_weight_transfer_engine({"dtype": "bfloat16"})
        assert client.start_weight_update() == {"weight_version": 7}
        client.update_weights({"names": ["a"]})
        client.pause_generation()
        client.finish_weight_update({"weight_version": "8"})
        client.resume_generation()
    assert asked == [
        ("/init_weight_transfer_engine", {"init_info": {"dtype": "bfloat16"}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"names": ["a"]}}),
        ("/pause?mode=keep", {}),
        ("/finish_weight_update", {"weight_version": "8"}),
        ("/resume", {}),
    ]


def test_a_refusal_is_told_in_the_engines_words():
    with engine(500, b'{"error": "no room"}') as (client, _), pytest.raises(EngineError, match="with 500: no room"):
        client.start_weight_update()
    with engine(503, b"<html>") as (client, _), pytest.raises(EngineError, match="with 503: <html>"):
        client.start_weight_update()


def test_an_answer_that_says_nothing_is_no_error():
    for answer in (b"", b"null", b"[1]"):
        with engine(200, answer) as (client, _):
            assert client.start_weight_update() == {}


def test_nobody_there_is_said_with_the_call_and_the_address():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(EngineError, match=f"update_weights: http://127.0.0.1:{port} does not answer"):
        HttpEngine(f"http://127.0.0.1:{port}", 5.0).update_weights({})
