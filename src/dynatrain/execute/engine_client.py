"""The calls by which an engine takes weights, as vLLM names them, and their form over HTTP."""

import http.client
import json
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit


class EngineError(RuntimeError):
    """An engine refused a call, or does not answer; the text says which and why."""


class EngineClient(Protocol):
    """What a publish asks of an engine: vLLM's client for weight updates, with pause and resume.

    Every call returns when all ranks of the engine have done it, or raises. What it returns is JSON's. An update that
    fails is over, and the version before goes on serving; ``start_weight_update`` drops what an earlier one left.
    """

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the run takes the engine for: ``dtype``, and ``shapes`` of the tensors of each of its ranks."""

    def start_weight_update(self) -> Mapping[str, Any]:
        """Begin; the answer's ``weight_version`` is the version that serves, if the engine says so."""

    def update_weights(self, update_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take one round of messages.

        The info has ``weight_version``, ``base_version``, ``names``, ``dtype_names`` and ``shapes`` (of whole tensors),
        and ``messages``, the addresses that each rank is to fetch. The last one also has ``digests``, of each rank by
        name: vLLM's server hands this info to whoever takes the weights, and nothing of the calls behind it.
        """

    def finish_weight_update(self, finish_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Hold all tensors against the digests, and serve ``weight_version``, a text there, from now on."""

    def pause_generation(self) -> Mapping[str, Any]:
        """Freeze what is being generated, to go on with it later."""

    def resume_generation(self) -> Mapping[str, Any]:
        """Go on."""


class HttpEngine:
    """An :class:`EngineClient` for an engine that speaks HTTP, by the paths of vLLM's server.

    Args:
        url: of the engine, such as ``http://host:8000``.
        timeout: seconds that a call may take.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self.url = url
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, finish_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("finish_weight_update", finish_info)

    def pause_generation(self) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("pause?mode=keep", {})

    def resume_generation(self) -> Mapping[str, Any]:
        """See :class:`EngineClient`."""
        return self._call("resume", {})

    def _call(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.netloc, timeout=self._timeout)
        try:
            text = json.dumps(body)
            connection.request("POST", f"{place.path}/{path}", text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said, code = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path}: {self.url} does not answer: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        try:
            told = json.loads(said or b"{}")
        except ValueError:
            told = {"error": said[:200].decode(errors="replace")}
        if code != http.client.OK:
            reason = told.get("error", "") if isinstance(told, dict) else told
            raise EngineError(f"{path}: {self.url} refused, with {code}: {reason}")
        return told if isinstance(told, dict) else {}
