"""What an AIHC job's pods wrote: `python -m shipway.compiler.launch.aihc_pods WHAT ENDPOINT POOL QUEUE JOB`.

The service gives logs of one pod at a time, in pages: DescribeJob names the pods
(https://cloud.baidu.com/doc/AIHC/s/Kmayvejf0), DescribeJobLogs reads one (.../s/Hmayvkw26). WHAT is one of

logs      all lines so far, each with its pod before it
follow    and those that are written, until the job ends
bad       names of nodes whose pods say that their pre-flight failed
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from shipway.compiler.launch.bce import ENVIRONMENT_CODE, call

PAUSE_SECONDS = 5.0
"""Between two looks at all pods."""
ENDED = ("Succeeded", "Failed", "ManualTermination", "Stopped")
ACCUSATION = "exclude: "
"""How start.sh begins the line that names bad nodes, or, where it knows none, its pod."""


class Refused(Exception):  # noqa: N818 - says what happened
    """The service did not answer as asked, in its own words."""


@dataclass(frozen=True)
class Service:
    """One job, and the keys to ask about it."""

    endpoint: str
    pool: str
    queue: str
    job: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    def ask(self, action: str, **more: object) -> dict[str, Any]:
        """The answer to one action about the job; raises Refused or OSError."""
        query = urlencode({"action": action, "resourcePoolId": self.pool, "queueID": self.queue})
        body = json.dumps({"jobId": self.job, **more}).encode()
        status, text = call("POST", f"{self.endpoint}/?{query}", body, self.access_key, self.secret_key)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if status >= 300 or not isinstance(answer, dict):
            raise Refused(f"{action}: {status} {text.strip()}")
        return answer

    def describe(self) -> dict[str, Any]:
        """The job with its pods; the service has them at the top, its library one level down."""
        answer = self.ask("DescribeJob", needDetail=True)
        inside = answer.get("job")
        return inside if isinstance(inside, dict) else answer


@dataclass
class Reader:
    """Reads on in the logs of one job's pods."""

    service: Service
    _marker: dict[str, str] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)
    """Lines of the page at the marker that were given out."""

    def lines(self, pod: str, keywords: str = "") -> Iterator[str]:
        """Lines of a pod that were not given out before, page by page."""
        while True:
            marker = self._marker.get(pod, "")
            wanted = {"keywords": keywords} if keywords else {}
            asked = wanted | ({"marker": marker} if marker else {})
            answer = self.service.ask("DescribeJobLogs", podName=pod, **asked)
            entries = [str(entry) for entry in answer.get("logs") or ()]
            for entry in entries[self._read.get(pod, 0) :]:
                yield from entry.splitlines()
            following = str(answer.get("nextMarker") or "")
            if not following or following == marker:
                self._read[pod] = len(entries)
                return
            self._marker[pod], self._read[pod] = following, 0


def pods_of(job: dict[str, Any]) -> dict[str, str]:
    """Name of each pod, now and before a restart, and the node that it is on."""
    found = [*(job.get("historyPods") or ()), *(job.get("pods") or ())]
    names = {str(pod.get("name") or pod.get("podName") or ""): str(pod.get("nodeName", "")) for pod in found}
    return {name: node for name, node in names.items() if name}


def show(service: Service, *, follow: bool) -> None:
    """Print the lines of all pods; with `follow` until the job has ended."""
    reader = Reader(service)
    while True:
        job = service.describe()  # before reading, so that what was written until its end is read
        for pod in pods_of(job):
            for line in reader.lines(pod):
                print(f"[{pod}] {line}", flush=True)
        if not follow or job.get("status") in ENDED:
            return
        time.sleep(PAUSE_SECONDS)


def bad_nodes(service: Service) -> tuple[str, ...]:
    """Nodes of the pods that accuse themselves or each other."""
    pods, reader = pods_of(service.describe()), Reader(service)
    lines = [line for pod in pods for line in reader.lines(pod, ACCUSATION)]
    named = {name for line in lines if line.startswith(ACCUSATION) for name in line.split()[1:]}
    return tuple(sorted(pods.get(name) or name for name in named))


def main(arguments: Sequence[str]) -> int:
    """Run one of the three; returns the exit code."""
    what, endpoint, pool, queue, job = arguments
    access_key, secret_key = os.environ.get("BCE_ACCESS_KEY_ID"), os.environ.get("BCE_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        print("set BCE_ACCESS_KEY_ID and BCE_SECRET_ACCESS_KEY", file=sys.stderr)
        return ENVIRONMENT_CODE
    service = Service(endpoint, pool, queue, job, access_key, secret_key)
    try:
        if what == "bad":
            print("\n".join(bad_nodes(service)))
        else:
            show(service, follow=what == "follow")
    except Refused as error:
        print(error, file=sys.stderr)
        return ENVIRONMENT_CODE
    except OSError as error:
        print(f"{endpoint} cannot be reached: {error}", file=sys.stderr)
        return ENVIRONMENT_CODE
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
