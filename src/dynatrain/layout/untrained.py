"""Layouts that can be read, planned and judged, but not trained in yet: the one list of them."""

from dynatrain.layout.layout import Layout


def untrained(layout: Layout, num_kv_heads: int | None = None) -> list[str]:
    """Why no run can be in ``layout`` yet; empty where it can.

    Args:
        layout: well-formed.
        num_kv_heads: key/value heads of the model; None where they do not matter.
    """
    tp = layout.size("tp")
    parts = {
        f"tp{tp} above {num_kv_heads} key/value heads": num_kv_heads is not None and tp > num_kv_heads,
    }
    return [f"{part} can be planned, but not trained in yet" for part, there in parts.items() if there]
