"""One signed call to Baidu AI Cloud: `python -m shipway.compiler.launch.bce METHOD URL < body`.

The keys come from BCE_ACCESS_KEY_ID and BCE_SECRET_ACCESS_KEY, and go nowhere but into the signature
(authorisation v1: https://cloud.baidu.com/doc/Reference/s/Njwvz1wot).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

EXPIRES_SECONDS = 1800
API_VERSION = "v2"
ENVIRONMENT_CODE = 4


def authorization(
    method: str, url: str, headers: Mapping[str, str], access_key: str, secret_key: str, timestamp: str
) -> str:
    """The Authorization header: HMAC-SHA256 over method, path, query and signed headers."""
    parts = urlsplit(url)
    prefix = f"bce-auth-v1/{access_key}/{timestamp}/{EXPIRES_SECONDS}"
    signing_key = _hmac(secret_key, prefix)
    query = sorted(f"{_encoded(k)}={_encoded(v)}" for k, v in parse_qsl(parts.query, keep_blank_values=True))
    signed = sorted((_encoded(name.lower()), _encoded(value.strip())) for name, value in headers.items())
    path = quote(parts.path or "/", safe="/-_.~")
    canonical = "\n".join([method, path, "&".join(query), "\n".join(f"{k}:{v}" for k, v in signed)])
    names = ";".join(name for name, _ in signed)
    return f"{prefix}/{names}/{_hmac(signing_key, canonical)}"


def call(method: str, url: str, body: bytes, access_key: str, secret_key: str) -> tuple[int, str]:
    """Send a request; returns the HTTP status and the answer's text."""
    timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    headers = {"Host": urlsplit(url).netloc, "x-bce-date": timestamp}
    signature = authorization(method, url, headers, access_key, secret_key, timestamp)
    request = urllib.request.Request(
        url,
        data=body or None,
        method=method,
        headers={
            **headers,
            "Authorization": signature,
            "Content-Type": "application/json",
            "X-API-Version": API_VERSION,
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def main() -> int:
    """Call with the body from standard input; prints the answer."""
    method, url = sys.argv[1:3]
    access_key, secret_key = os.environ.get("BCE_ACCESS_KEY_ID"), os.environ.get("BCE_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        print("set BCE_ACCESS_KEY_ID and BCE_SECRET_ACCESS_KEY", file=sys.stderr)
        return ENVIRONMENT_CODE
    try:
        status, text = call(method, url, sys.stdin.buffer.read(), access_key, secret_key)
    except OSError as error:
        print(f"{urlsplit(url).netloc} cannot be reached: {error}", file=sys.stderr)
        return ENVIRONMENT_CODE
    print(text, file=sys.stdout if status < 300 else sys.stderr)
    return 0 if status < 300 else ENVIRONMENT_CODE


def _hmac(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


if __name__ == "__main__":
    sys.exit(main())
