"""The newest figures for Prometheus (text exposition format 0.0.4), served by rank 0 on request.

The format is a line a figure, and the standard library serves it: a client library would add nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shipway.runtime.exit_codes import Fatal

PREFIX = "shipway_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAYER = re.compile(r"^(expert_load|activation_rms|gradient_norm)/layer_(.+)$")


class Exporter:
    """A thread that answers GET /metrics with what was set last."""

    def __init__(self, port: int, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._figures: dict[str, float] = {}
        self._lock = threading.Lock()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer a scrape."""
                if self.path.split("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                body = exporter.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        try:
            self._server = ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise Fatal(
                f"training.observability.prometheus_port {port} cannot be served: {error.strerror};"
                " choose another port, or 0 for a free one"
            ) from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        """Port that is served."""
        return int(self._server.server_address[1])

    def set(self, figures: Mapping[str, float]) -> None:
        """Figures by TensorBoard's names; they stay until set again."""
        with self._lock:
            self._figures.update(figures)

    def text(self) -> str:
        """All figures as gauges, in the exposition format."""
        with self._lock:
            figures = dict(self._figures)
        lines: list[str] = []
        seen: set[str] = set()
        for name, value in sorted(figures.items()):
            metric, labels = self._named(name)
            if metric not in seen:
                seen.add(metric)
                lines.append(f"# TYPE {metric} gauge")
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{metric}{{{inside}}} {_number(value)}")
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _named(self, name: str) -> tuple[str, dict[str, str]]:
        """Metric and labels of a figure: a layer is a label, not a metric of its own."""
        if found := _LAYER.match(name):
            return PREFIX + found[1], self._labels | {"layer": found[2]}
        return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name), self._labels


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
